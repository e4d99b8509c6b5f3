-- Queues of one model: one for any version, and one for each version. Their prefixes share a hash tag made of model and shard, so a step
-- in one queue may read the others. Below, a queue is named by its ending after the tag: `:` (any version) or `@VERSION:`.
local siblings = {}

-- Tag that the model's queues share, and ending of this queue.
function siblings.split(prefix) return string.match(prefix, '^(.*})(.*)$') end

-- List this queue as one that may hold data for this many seconds.
function siblings.list(s, seconds)
  local tag, own = siblings.split(s.prefix)
  local key = tag .. ':qs'
  redis.call('ZADD', key, 'GT', s.now + seconds, own)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', s.now)
  for _, when in ipairs({'NX', 'GT'}) do redis.call('EXPIRE', key, math.ceil(seconds), when) end
end

-- States of the model's other queues by ending. They are complete enough for lookups.
function siblings.others(s)
  local tag, own = siblings.split(s.prefix)
  local others = {}
  for _, ending in ipairs(redis.call('ZRANGE', tag .. ':qs', 0, -1)) do
    if ending ~= own then others[ending] = setmetatable({prefix = tag .. ending, entered = false}, {__index = s}) end
  end
  return others
end

-- Record that this queue has dead letters. Returns the prefixes of the model's queues that may have any.
function siblings.with_letters(prefix)
  local tag, own = siblings.split(prefix)
  local key, prefixes = tag .. ':ql', {}
  redis.call('SADD', key, own)
  redis.call('EXPIRE', key, LETTER_SECONDS)
  for _, ending in ipairs(redis.call('SMEMBERS', key)) do
    if ending == own or redis.call('EXISTS', tag .. ending .. 'o') == 1 then
      prefixes[#prefixes + 1] = tag .. ending
    else
      redis.call('SREM', key, ending)
    end
  end
  return prefixes
end

-- Queues of one model: one for any version and one per version. Their prefixes share a hash tag of model and shard, so a step in
-- one may read the others. After the tag a prefix goes on as `:` (any version) or `@VERSION:`; that ending names the queue below.
local siblings = {}

-- The tag that the model's queues share, and the ending of this one.
function siblings.split(prefix) return string.match(prefix, '^(.*})(.*)$') end

-- List this queue as one that may know something for this many seconds.
function siblings.list(s, seconds)
  local tag, own = siblings.split(s.prefix)
  local key = tag .. ':qs'
  redis.call('ZADD', key, 'GT', s.now + seconds, own)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', s.now)
  for _, when in ipairs({'NX', 'GT'}) do redis.call('EXPIRE', key, math.ceil(seconds), when) end
end

-- States of the model's other queues by ending, complete enough to look something up.
function siblings.others(s)
  local tag, own = siblings.split(s.prefix)
  local found = {}
  for _, one in ipairs(redis.call('ZRANGE', tag .. ':qs', 0, -1)) do
    if one ~= own then found[one] = setmetatable({prefix = tag .. one, entered = false}, {__index = s}) end
  end
  return found
end

-- Note that this queue has dead letters. Returns the prefixes of the model's queues that may have some.
function siblings.with_letters(prefix)
  local tag, own = siblings.split(prefix)
  local key, found = tag .. ':ql', {}
  redis.call('SADD', key, own)
  redis.call('EXPIRE', key, LETTER_SECONDS)
  for _, one in ipairs(redis.call('SMEMBERS', key)) do
    if one == own or redis.call('EXISTS', tag .. one .. 'o') == 1 then
      found[#found + 1] = tag .. one
    else
      redis.call('SREM', key, one)
    end
  end
  return found
end

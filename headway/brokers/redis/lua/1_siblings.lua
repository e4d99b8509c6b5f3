-- The queues of one model: one for any version, and one for each version. Their prefixes begin with the same hash tag, of the model
-- and the shard, so that a step in one of them may look into the others. A prefix goes on as `:` for any version, as `@VERSION:` for one.
local siblings = {}

-- What the prefixes of a model's queues have in common, and how that of one goes on.
function siblings.split(prefix) return string.match(prefix, '^(.*})(.*)$') end

-- Something may be known in this queue for so many seconds.
function siblings.list(s, seconds)
  local tag, own = siblings.split(s.prefix)
  local key = tag .. ':qs'
  redis.call('ZADD', key, 'GT', s.now + seconds, own)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', s.now)
  for _, when in ipairs({'NX', 'GT'}) do
    redis.call('EXPIRE', key, math.ceil(seconds), when)
  end
end

-- The state of each other queue of the model, as far as it is needed to look something up, by how its prefix goes on.
function siblings.others(s)
  local tag, own = siblings.split(s.prefix)
  local found = {}
  for _, one in ipairs(redis.call('ZRANGE', tag .. ':qs', 0, -1)) do
    if one ~= own then
      found[one] = setmetatable({prefix = tag .. one, entered = false}, {__index = s})
    end
  end
  return found
end

-- There are dead letters in this queue. Returns the prefixes of all queues of its model in which there may be.
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

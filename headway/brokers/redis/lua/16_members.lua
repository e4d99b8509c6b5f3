-- The fleet: its key is one prefix for all models. Arguments begin with the clock.
--
--   w          hash    worker → when it was heard of, and what it said of itself
--   known      zset    model → until when something may be known in one of its queues
--   k          hash    process → when it was heard of, and what it said of itself
--   j          string  the leading controller and until when
--   capacity   hash    model → when it was measured, and the capacity

together.register('register', function(keys, args)
  redis.call('HSET', keys[1] .. 'w', args[2], struct.pack('<d', clock(args[1])) .. args[3])
  redis.call('EXPIRE', keys[1] .. 'w', LIFE_SECONDS)
  return 1
end)

-- The hash's values that are not older than so many seconds; older ones are forgotten, and so are those of a time to come,
-- as the clock was put back: who is there will say so again.
local function recent(key, now, age)
  local found, all = {}, redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local stamp = struct.unpack('<d', all[i + 1])
    if now - age <= stamp and stamp <= now + CLOCK_STEP then
      found[#found + 1] = all[i + 1]
    else
      redis.call('HDEL', key, all[i])
    end
  end
  return found
end

-- workers: the instant, the registry, and the models in which something may be known. Arguments after the clock: of some models
-- until when that is so, and the model.
together.register('workers', function(keys, args)
  local now, known = clock(args[1]), keys[1] .. 'known'
  if #args > 1 then
    redis.call('ZADD', known, unpack(args, 2))
    redis.call('ZREMRANGEBYSCORE', known, '-inf', now)
    redis.call('EXPIRE', known, LETTER_SECONDS)
  end
  return {exact(now), recent(keys[1] .. 'w', now, WORKER_SECONDS), redis.call('ZRANGE', known, exact(now), '+inf', 'BYSCORE')}
end)

together.register('attend', function(keys, args)
  redis.call('HSET', keys[1] .. 'k', args[2], struct.pack('<d', clock(args[1])) .. args[3])
  redis.call('EXPIRE', keys[1] .. 'k', LIFE_SECONDS)
  return 1
end)

redis.register_function{function_name = VERSION .. '_leave', flags = {'allow-oom'}, callback = function(keys, args)
  redis.call('HDEL', keys[1] .. 'k', args[2])
  local leader = redis.call('GET', keys[1] .. 'j')
  if leader and string.sub(leader, 9) == args[2] then
    redis.call('DEL', keys[1] .. 'j')
  end
  return 1
end}

together.register('members', function(keys, args)
  return recent(keys[1] .. 'k', clock(args[1]), OFFLINE_AFTER)
end)

together.register('lead', function(keys, args)
  local now, seconds = clock(args[1]), tonumber(args[3])
  local leader = redis.call('GET', keys[1] .. 'j')
  if leader and string.sub(leader, 9) ~= args[2] then
    local left = struct.unpack('<d', leader) - now
    if 0 < left and left <= seconds + CLOCK_STEP then
      return 0
    end
  end
  redis.call('SET', keys[1] .. 'j', struct.pack('<d', now + seconds) .. args[2], 'EX', LIFE_SECONDS)
  return 1
end)

together.register('publish', function(keys, args)
  redis.call('HSET', keys[1] .. 'capacity', args[2], struct.pack('<d', clock(args[1])) .. args[3])
  redis.call('EXPIRE', keys[1] .. 'capacity', LIFE_SECONDS)
  return 1
end)

redis.register_function{function_name = VERSION .. '_withdraw_capacity', flags = {'allow-oom'}, callback = function(keys, args)
  redis.call('HDEL', keys[1] .. 'capacity', args[2])
  return 1
end}

together.register('capacities', function(keys, args)
  return recent(keys[1] .. 'capacity', clock(args[1]), CAPACITY_SECONDS)
end)

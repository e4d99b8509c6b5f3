-- The fleet: its key is one prefix for all models. Arguments begin with the clock.
--
--   k          hash    process → when it was heard of, and what it said of itself
--   j          string  the leading controller and until when
--   capacity   hash    model → when it was measured, and the capacity

redis.register_function{function_name = VERSION .. '_attend', flags = {'allow-oom'}, callback = function(keys, args)
  redis.call('HSET', keys[1] .. 'k', args[2], struct.pack('<d', clock(args[1])) .. args[3])
  return 1
end}

redis.register_function{function_name = VERSION .. '_leave', flags = {'allow-oom'}, callback = function(keys, args)
  redis.call('HDEL', keys[1] .. 'k', args[2])
  local leader = redis.call('GET', keys[1] .. 'j')
  if leader and string.sub(leader, 9) == args[2] then
    redis.call('DEL', keys[1] .. 'j')
  end
  return 1
end}

redis.register_function{function_name = VERSION .. '_members', flags = {'allow-oom'}, callback = function(keys, args)
  local since, found = clock(args[1]) - OFFLINE_AFTER, {}
  local all = redis.call('HGETALL', keys[1] .. 'k')
  for i = 1, #all, 2 do
    if struct.unpack('<d', all[i + 1]) >= since then
      found[#found + 1] = all[i + 1]
    else
      redis.call('HDEL', keys[1] .. 'k', all[i])
    end
  end
  return found
end}

redis.register_function{function_name = VERSION .. '_lead', flags = {'allow-oom'}, callback = function(keys, args)
  local now = clock(args[1])
  local leader = redis.call('GET', keys[1] .. 'j')
  if leader and string.sub(leader, 9) ~= args[2] and now < struct.unpack('<d', leader) then
    return 0
  end
  redis.call('SET', keys[1] .. 'j', struct.pack('<d', now + tonumber(args[3])) .. args[2])
  return 1
end}

redis.register_function{function_name = VERSION .. '_publish', flags = {'allow-oom'}, callback = function(keys, args)
  redis.call('HSET', keys[1] .. 'capacity', args[2], struct.pack('<d', clock(args[1])) .. args[3])
  return 1
end}

redis.register_function{function_name = VERSION .. '_capacities', flags = {'allow-oom'}, callback = function(keys, args)
  return redis.call('HVALS', keys[1] .. 'capacity')
end}

-- Dead letters: their keys are z, o, on and u of a queue.

redis.register_function{function_name = VERSION .. '_bury', flags = {'allow-oom'}, callback = function(keys, args)
  keep_letter(keys[1], args[1], args[2])
  return 1
end}

-- letters: how many there are, and the newest so many of them.
redis.register_function{function_name = VERSION .. '_letters', flags = {'no-writes', 'allow-oom'}, callback = function(keys, args)
  local count, wanted_count = redis.call('ZCARD', keys[1] .. 'o'), tonumber(args[1])
  if wanted_count == 0 or count == 0 then
    return {count, {}}
  end
  return {count, call_each('HMGET', keys[1] .. 'z', redis.call('ZRANGE', keys[1] .. 'o', 0, wanted_count - 1, 'REV'))}
end}

redis.register_function{function_name = VERSION .. '_letter', flags = {'no-writes', 'allow-oom'}, callback = function(keys, args)
  return redis.call('HGET', keys[1] .. 'z', args[1])
end}

-- unbury: remove one.
redis.register_function{function_name = VERSION .. '_unbury', flags = {'allow-oom'}, callback = function(keys, args)
  local letter = redis.call('HGET', keys[1] .. 'z', args[1])
  if not letter then
    return 0
  end
  redis.call('HDEL', keys[1] .. 'z', args[1])
  redis.call('ZREM', keys[1] .. 'o', args[1])
  redis.call('INCRBY', keys[1] .. 'u', -#letter)
  return 1
end}

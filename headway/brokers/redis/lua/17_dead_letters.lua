-- Dead letters are kept by 10_outcomes.lua, and read here: keys z, zl, o, o:<tenant>, on, oc and ou of a queue.
redis.register_function{function_name = VERSION .. '_bury', flags = {'allow-oom'}, callback = function(keys, args)
  dead.keep(keys[1], args[1], args[2])
  return 1
end}

-- letters: number of dead letters, list of the newest, and number of dead letters ever added. Argument: maximum length of the list.
together.register('letters', function(keys, args)
  local count, wanted_count = redis.call('ZCARD', keys[1] .. 'o'), tonumber(args[1])
  local total = tonumber(redis.call('GET', keys[1] .. 'on') or 0)
  if wanted_count == 0 or count == 0 then return {count, {}, total} end
  local newest = redis.call('ZRANGE', keys[1] .. 'o', 0, wanted_count - 1, 'REV')
  return {count, call_each('HMGET', keys[1] .. 'zl', newest), total}
end, {'no-writes', 'allow-oom'})

-- Keys of the letters with an id, for one tenant or all. For all, thousands of keys are scanned. Only people search without a tenant.
local function keys_of(prefix, id, tenant)
  local ending, keys = '\0' .. id, {}
  if tenant then return {tenant .. ending} end
  for _, key in ipairs(redis.call('HKEYS', prefix .. 'z')) do
    if string.sub(key, -#ending) == ending then keys[#keys + 1] = key end
  end
  return keys
end

redis.register_function{function_name = VERSION .. '_letters_of', flags = {'no-writes', 'allow-oom'}, callback = function(keys, args)
  local letters = {}
  for _, key in ipairs(keys_of(keys[1], args[1], args[2])) do
    letters[#letters + 1] = redis.call('HGET', keys[1] .. 'z', key) or nil
  end
  return letters
end}

-- unbury: remove letters. Returns how many there were.
redis.register_function{function_name = VERSION .. '_unbury', flags = {'allow-oom'}, callback = function(keys, args)
  local count = 0
  for _, key in ipairs(keys_of(keys[1], args[1], args[2])) do
    if dead.drop(keys[1], key) then count = count + 1 end
  end
  return count
end}

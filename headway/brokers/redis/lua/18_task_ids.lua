-- claim_id: claim a tenant's task id for one model. Arguments: time, model, duration of the claim in seconds, and the model whose claim is known
-- to be void, if any. Returns whether the id was already claimed, and the mark of the claim. If another model has claimed it, returns 2, that
-- model, and whether its task may still be on its way to the queue. A claim never shortens another.
--
-- A claim consists of its time and its model.
redis.register_function{function_name = VERSION .. '_claim_id', flags = {'allow-oom'}, callback = function(keys, args)
  local now, model, held = clock(args[1]), args[2], redis.call('GET', keys[1])
  if held then
    local made, owner = struct.unpack('<d', held), string.sub(held, 9)
    local young = now - made < CLAIM_SECONDS
    if owner ~= model and (young or owner ~= args[4]) then return {2, owner, young and 1 or 0} end
  end
  local made = struct.pack('<d', now)
  redis.call('SET', keys[1], made .. model, 'EX', math.max(tonumber(args[3]), redis.call('TTL', keys[1])))
  return {held and 1 or 0, made}
end}

-- unclaim_id: make the claim of a refused task expire soon, unless the id was claimed again. Arguments: the claim's mark, seconds.
redis.register_function{function_name = VERSION .. '_unclaim_id', flags = {'allow-oom'}, callback = function(keys, args)
  local held = redis.call('GET', keys[1])
  if held and string.sub(held, 1, 8) == args[1] then redis.call('EXPIRE', keys[1], args[2]) end
end}

-- claim_id: the id of a tenant's task is one model's. The key is that of the id. Arguments: instant, model, seconds for which the claim lasts
-- unless it is renewed, and the model whose claim is known to be void, if any. Returns whether it was claimed already, and the claim's
-- mark; and if it is another model's 2, that, and whether its task may still be on its way to the queue. No claim is cut short by another.
--
-- A claim is the instant at which it was made, and the model.
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

-- unclaim_id: have a claim end soon whose task was refused, unless somebody has claimed the id since. Arguments: the claim's mark, seconds.
redis.register_function{function_name = VERSION .. '_unclaim_id', flags = {'allow-oom'}, callback = function(keys, args)
  local held = redis.call('GET', keys[1])
  if held and string.sub(held, 1, 8) == args[1] then
    redis.call('EXPIRE', keys[1], args[2])
  end
end}

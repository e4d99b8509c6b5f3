-- The fleet. Its keys have one prefix for all models. The first argument is the clock.
--
--   w          hash    worker → time of its last heartbeat, and its report
--   known      zset    model → until when one of its queues may hold data
--   k          hash    process → time of its last heartbeat, and its report
--   j          string  leading controller, and until when it leads
--   capacity   hash    model → when it was measured, and the capacity
--   rollout    hash    model → revision of its last rollout, and the rollout
--   departed   hash    process or worker that ended → when and how
--   silent     hash    process that stopped reporting → time of its last heartbeat, and its report
--   drain      hash    worker or process → since when it must not claim, and the order
do
-- note: store what a process or worker reports about itself or a model. Arguments after the clock: hash, name, report.
together.register('note', function(keys, args)
  redis.call('HSET', keys[1] .. args[2], args[3], struct.pack('<d', clock(args[1])) .. args[4])
  redis.call('EXPIRE', keys[1] .. args[2], LIFE_SECONDS)
  return 1
end)

-- attend: store what a process reports about itself. Arguments after the clock: its id, report. Returns the names of everything that is
-- drained. Drains last as long as some process calls this.
together.register('attend', function(keys, args)
  together.parts.note(keys, {args[1], 'k', args[2], args[3]})
  local drained = redis.call('HKEYS', keys[1] .. 'drain')
  if #drained > 0 then redis.call('EXPIRE', keys[1] .. 'drain', LIFE_SECONDS) end
  return drained
end)

-- Record an end. At most MOST_DEPARTED are kept.
local function note_end(key, name, value)
  redis.call('HSET', key, name, value)
  redis.call('EXPIRE', key, DEPARTED_SECONDS)
  if redis.call('HLEN', key) > MOST_DEPARTED then
    local all, first, oldest = redis.call('HGETALL', key), INF, nil
    for i = 1, #all, 2 do
      local stamp = struct.unpack('<d', all[i + 1])
      if stamp < first then first, oldest = stamp, all[i] end
    end
    redis.call('HDEL', key, oldest)
  end
end

-- Values of a hash that are at most this many seconds old. Others are dropped. So are those from the future: the clock was set back, and their
-- processes will report again. The hash `silent` keeps dropped values for a while.
local function recent(key, now, age, silent)
  local values, all = {}, redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local stamp = struct.unpack('<d', all[i + 1])
    if now - age <= stamp and stamp <= now + CLOCK_STEP then
      values[#values + 1] = all[i + 1]
    else
      redis.call('HDEL', key, all[i])
      if silent and stamp <= now then note_end(silent, all[i], all[i + 1]) end
    end
  end
  return values
end

-- workers: the time, the registry, and models that may hold data. Arguments after the clock: more such models, each after the time until which it may.
together.register('workers', function(keys, args)
  local now, known = clock(args[1]), keys[1] .. 'known'
  if #args > 1 then
    redis.call('ZADD', known, unpack(args, 2))
    redis.call('ZREMRANGEBYSCORE', known, '-inf', now)
    redis.call('EXPIRE', known, LETTER_SECONDS)
  end
  return {exact(now), recent(keys[1] .. 'w', now, WORKER_SECONDS), redis.call('ZRANGE', known, exact(now), '+inf', 'BYSCORE')}
end)

redis.register_function{function_name = VERSION .. '_leave', flags = {'allow-oom'}, callback = function(keys, args)
  redis.call('HDEL', keys[1] .. 'k', args[2])
  local leader = redis.call('GET', keys[1] .. 'j')
  if leader and string.sub(leader, 9) == args[2] then redis.call('DEL', keys[1] .. 'j') end
  return 1
end}

-- notes: recent values of a hash. Arguments after the clock: hash, age in seconds.
together.register('notes', function(keys, args)
  local silent = args[2] == 'k' and keys[1] .. 'silent' or nil
  return recent(keys[1] .. args[2], clock(args[1]), tonumber(args[3]), silent)
end)

-- depart: record how a process or worker ended. Arguments after the clock: its id, report.
together.register('depart', function(keys, args)
  note_end(keys[1] .. 'departed', args[2], struct.pack('<d', clock(args[1])) .. args[3])
  return 1
end)

-- departed: how processes and workers ended in the last few minutes, and the last reports of processes that stopped reporting.
together.register('departed', function(keys, args)
  local now, silent = clock(args[1]), keys[1] .. 'silent'
  recent(keys[1] .. 'k', now, OFFLINE_AFTER, silent)
  return {recent(keys[1] .. 'departed', now, DEPARTED_SECONDS), recent(silent, now, DEPARTED_SECONDS)}
end)
end

-- Take or renew a key for a name, for this many seconds. Returns 0, or the seconds for which it still belongs to another name.
local function held_for(key, now, name, seconds)
  local holder = redis.call('GET', key)
  local left = holder and string.sub(holder, 9) ~= name and struct.unpack('<d', holder) - now or 0
  if 0 < left and left <= seconds + CLOCK_STEP then return left end
  redis.call('SET', key, struct.pack('<d', now + seconds) .. name, 'EX', LIFE_SECONDS)
  return 0
end

-- lead: 0 if the candidate now leads for this many seconds, otherwise the seconds for which another process still leads.
together.register('lead', function(keys, args)
  return exact(held_for(keys[1] .. 'j', clock(args[1]), args[2], tonumber(args[3])))
end)

-- drop_notes: drop values. Arguments after the clock: hash, names.
redis.register_function{function_name = VERSION .. '_drop_notes', flags = {'allow-oom'}, callback = function(keys, args)
  redis.call('HDEL', keys[1] .. args[2], unpack(args, 3))
  return 1
end}

-- drain: add drains if the current drains are those that the caller has seen. Arguments after the clock: their number (-1 for any), their
-- names; then name and order of each new drain.
redis.register_function{function_name = VERSION .. '_drain', flags = {'allow-oom'}, callback = function(keys, args)
  local key, stamp, seen = keys[1] .. 'drain', struct.pack('<d', clock(args[1])), tonumber(args[2])
  if seen >= 0 and redis.call('HLEN', key) ~= seen then return 0 end
  for i = 3, 2 + seen do
    if redis.call('HEXISTS', key, args[i]) == 0 then return 0 end
  end
  for i = 3 + math.max(seen, 0), #args, 2 do redis.call('HSET', key, args[i], stamp .. args[i + 1]) end
  redis.call('EXPIRE', key, LIFE_SECONDS)
  return 1
end}

-- rollouts: the last rollout of each model.
together.register('rollouts', function(keys)
  local key = keys[1] .. 'rollout'
  local left = redis.call('TTL', key)
  if 0 < left and left < LETTER_SECONDS / 2 then redis.call('EXPIRE', key, LETTER_SECONDS) end
  return redis.call('HVALS', key)
end)

-- keep_rollout: store a rollout if its revision follows that of the stored one. Arguments after the clock: model, revision, rollout.
redis.register_function{function_name = VERSION .. '_keep_rollout', flags = {'allow-oom'}, callback = function(keys, args)
  local key = keys[1] .. 'rollout'
  local there = redis.call('HGET', key, args[2])
  if there and struct.unpack('<d', there) ~= tonumber(args[3]) - 1 then return 0 end
  redis.call('HSET', key, args[2], args[4])
  redis.call('EXPIRE', key, LETTER_SECONDS)
  return 1
end}

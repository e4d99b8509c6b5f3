-- claim: the batch that leaves now for a slot. Arguments after the head: slot, its largest batch, a token, whether it is at
-- home elsewhere and only helps, the instant and the number of slots of the load that the rule was made of, then the
-- rule's numbers (none when there is none).
-- Returns {'lease', …}, {'wait', instant, load}, or {'load', load} when a rule made of this load is needed first.

local RULE = {'size', 'headway', 'window', 'rule_rate', 'service', 'pace', 'lead', 'gather', 'quiet'}

local function granted(s, slot, fence, lease, entries)
  local names, arrivals, first_due = {}, {}, INF
  for i, entry in ipairs(entries) do
    names[i] = entry.key
    arrivals[i] = entry.arrived
    first_due = math.min(first_due, entry.due)
  end
  local payloads = call_each('HMGET', s.prefix .. 'p', names)
  return {'lease', exact(s.now), exact(fence), lease.reason, exact(lease.left_at), exact(lease.ends), exact(first_due - s.now),
    struct.pack('<' .. string.rep('d', #arrivals), unpack(arrivals)), payloads}
end

local function depart(s, slot, token, entries, reason, failures, attempts)
  local q, now, members = s.q, s.now, {}
  note_busy(q, now)
  q.busy = q.busy + 1
  q.departures = q.departures + 1
  q.gate_at = -INF
  -- By the clock, lest leases of a state that was lost, or that a replica never heard of, pass for new ones.
  q.fence = math.max(q.fence + 1, math.floor(now * 1e6))
  for i, entry in ipairs(entries) do
    members[i] = entry.member
  end
  local lease = {
    slot = slot, members = members, reason = reason, failures = failures, attempts = attempts + 1, left_at = now,
    ends = now + s.lease_seconds,
  }
  redis.call('HSET', s.prefix .. 'x', exact(q.fence), cmsgpack.pack(lease))
  redis.call('ZADD', s.prefix .. 'y', exact(lease.ends), exact(q.fence))
  redis.call('HSET', s.prefix .. 'n', slot, struct.pack('<d', q.fence) .. token)
  lasting(s, 'x', 'y', 'n')
  no_longer_idle(s, slot)
  return granted(s, slot, q.fence, lease, entries)
end

local function take_lease(s, fence)
  local packed = redis.call('HGET', s.prefix .. 'x', fence)
  if not packed then
    return nil
  end
  local lease = cmsgpack.unpack(packed)
  redis.call('HDEL', s.prefix .. 'x', fence)
  redis.call('ZREM', s.prefix .. 'y', fence)
  local last = redis.call('HGET', s.prefix .. 'n', lease.slot)
  if last and struct.unpack('<d', last) == tonumber(fence) then
    redis.call('HDEL', s.prefix .. 'n', lease.slot)
  end
  note_busy(s.q, s.now)
  s.q.busy = s.q.busy - 1
  return lease
end

-- The lease that the same claim got before, if it did, and its answer was lost. Who left meanwhile leaves it, too: both
-- sides count places in what is handed out now.
local function granted_before(s, slot, token)
  local last = redis.call('HGET', s.prefix .. 'n', slot)
  if not last or string.sub(last, 9) ~= token then
    return nil
  end
  local fence = struct.unpack('<d', last)
  local packed = redis.call('HGET', s.prefix .. 'x', exact(fence))
  if not packed then
    return nil
  end
  local lease = cmsgpack.unpack(packed)
  local entries, members = wanted(s, lease.members), {}
  if #entries == 0 then
    take_lease(s, exact(fence))
    return nil
  end
  for i, entry in ipairs(entries) do
    members[i] = entry.member
  end
  if #members < #lease.members then
    lease.members = members
    redis.call('HSET', s.prefix .. 'x', exact(fence), cmsgpack.pack(lease))
  end
  return granted(s, slot, fence, lease, entries)
end

-- Fill a batch of fresh entries. When more waits than fits, no place goes to what cannot be answered in time.
local function pack_batch(s, limit)
  local q, entries, late, gone = s.q, {}, {}, {}
  local hopeless = s.now + batch_seconds(q, limit)
  while q.fresh > 0 and #entries < limit do
    local room = limit - #entries
    local contended = q.fresh > room
    local popped = pop_in_turns(s, room, gone)
    if #popped == 0 then
      recount(s)
      break
    end
    for _, entry in ipairs(wanted(s, popped)) do
      if contended and entry.due < hopeless then
        late[#late + 1] = entry
      else
        entries[#entries + 1] = entry
      end
    end
  end
  look_again(s, gone)
  return entries, late
end

-- Suspects that the slot may run now; else the instant from which it may.
local function take_suspects(s, groups, worker, limit)
  local again = INF
  for _, group in ipairs(groups) do
    local opens = opens_at(s, group, worker)
    if opens <= s.now then
      local taken, rest = {}, {}
      for place, member in ipairs(group.members) do
        local into = place <= limit and taken or rest
        into[#into + 1] = member
      end
      s.q.suspects = s.q.suspects - #taken
      group.members = rest
      if #rest == 0 then
        remove_group(s, group)
      else
        store_group(s, group)
      end
      return group, wanted(s, taken)
    end
    again = math.min(again, opens)
  end
  return nil, again
end

local function claim(keys, args)
  local s = open(keys, args)
  local q, now = s.q, s.now
  local slot, limit, token = args[HEAD + 1], tonumber(args[HEAD + 2]), args[HEAD + 3]
  local worker = string.match(slot, '%z(.*)$')
  local before = granted_before(s, slot, token)
  if before then
    return before
  end
  q.max_batch = tonumber(args[MAX_BATCH])
  limit = math.min(limit, q.max_batch)
  came(s, slot)
  off_watch(s, slot)
  expire(s)
  local groups, again = read_groups(s), INF
  if #groups > 0 then
    local group, found = take_suspects(s, groups, worker, limit)
    if group then
      local reply = depart(s, slot, token, found, 'retry', group.failures, group.attempts)
      ring(s)
      save(s)
      return reply
    end
    again = found
  end
  local reason, instant = nil, INF
  q.limit = limit
  local made_at = tonumber(args[HEAD + 5])
  if #args > HEAD + 6 and now - made_at <= RULE_AGE and tonumber(args[HEAD + 6]) == q.slots then
    for i, name in ipairs(RULE) do
      q[name] = tonumber(args[HEAD + 6 + i])
    end
    q.rule_at = made_at
    reason, instant = decide(s)
  else
    local told = load_of(s)
    save(s)
    return {'load', told}
  end
  if not reason then
    local by_itself = args[HEAD + 4] == '1' and INF or go_idle(s, slot, math.min(instant, again), groups)
    local told = load_of(s)
    save(s)
    return {'wait', exact(by_itself), told}
  end
  local entries, late = pack_batch(s, limit)
  if #late > 0 then
    send_failures(s, 'late', late, 0)
  end
  if #entries == 0 then
    local told = load_of(s)
    save(s)
    return {'load', told}
  end
  local oldest = INF
  for _, entry in ipairs(entries) do
    oldest = math.min(oldest, entry.arrived)
  end
  q.wait = q.wait + (now - oldest - q.wait) * WAIT_WEIGHT
  q.last_departure = now
  q.schedule = math.max(q.schedule, now) + q.pace
  q.saved = math.min(q.saved + #entries * BUDGET_RATIO, budget_reserve(q.max_batch))
  local reply = depart(s, slot, token, entries, reason, 0, 0)
  ring(s)
  save(s)
  return reply
end

redis.register_function{function_name = VERSION .. '_claim', flags = {'allow-oom'}, callback = claim}

-- unlisten: a slot no longer waits for its bell; if it had been woken, another is.
redis.register_function{function_name = VERSION .. '_unlisten', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  no_longer_idle(s, args[HEAD + 1])
  came(s, args[HEAD + 1])
  ring(s)
  save(s)
  return {exact(s.now), exact(s.q.born)}
end}

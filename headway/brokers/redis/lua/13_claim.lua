-- claim: the batch that leaves now for a slot. Arguments after the common ones: slot, its maximum batch size, token, 1 if it is a guest from
-- another shard; and packed, the time and slots of the load that the rule is based on and, if there is a rule, the fields of
-- `core.departure.Rule`. Returns {'lease', …}, {'wait', time, load}, or {'load', load} if it first needs a rule based on this load.
do
local function granted(s, slot, fence, lease, entries)
  local names, arrivals, first_due = {}, {}, INF
  for i, entry in ipairs(entries) do
    names[i], arrivals[i], first_due = entry.key, entry.arrived, math.min(first_due, entry.due)
  end
  local payloads = call_each('HMGET', s.prefix .. 'p', names)
  return {'lease', as_doubles({s.now, fence, lease.left_at, lease.ends, first_due - s.now, lease.attempts}), lease.reason, as_doubles(arrivals), payloads}
end

local function size_of_batch(s, entries)
  if not s.weighed then return #entries end
  local weight = 0
  for _, entry in ipairs(entries) do weight = weight + counted_weight(s, entry.weight) end
  return size_of(s, #entries, weight)
end

-- Make a batch leave. `group` is its group, if it was waiting separately. `of_bulk` is set if bulk entries have some or all of its seats.
local function depart(s, slot, token, entries, reason, group, of_bulk)
  local q, now, members = s.q, s.now, {}
  note_busy(s)
  q.busy = q.busy + 1
  q.departures = q.departures + 1
  q.gate_at = -INF
  -- Fences follow the clock, so that leases that were lost with the state, or that a replica never received, aren't mistaken for new ones.
  q.fence = math.max(q.fence + 1, math.floor(now * 1e6))
  for i = 1, #entries do members[i] = entries[i].member end
  local lease = {
    slot = slot, members = members, size = size_of_batch(s, entries), reason = reason, left_at = now, ends = now + s.lease_seconds,
    failures = group and group.failures or 0, attempts = (group and group.attempts or 0) + 1,
    alone = group and group.alone or 0, rest = group and group.rest or 0, caller = group and group.caller or '', bulk = of_bulk, parted = s.parted,
  }
  local fence = exact(q.fence)
  redis.call('HSET', s.prefix .. 'x', fence, cmsgpack.pack(lease))
  redis.call('ZADD', s.prefix .. 'y', lease.ends, fence)
  redis.call('ZADD', s.prefix .. 'ys', lease.size, fence)
  q.running = math.max(q.running, lease.size)
  redis.call('HSET', s.prefix .. 'n', slot, struct.pack('<d', q.fence) .. token)
  lasting(s, 'n')
  if q.busy == 1 then lasting(s, 'x', 'y', 'ys') end  -- There is no other lease.
  no_longer_idle(s, slot)
  return granted(s, slot, q.fence, lease, entries)
end

-- The lease that was granted to an earlier attempt at the same claim, if its answer was lost. Entries that have left since are removed from the
-- lease, because both sides count positions in what is returned now.
local function granted_before(s, slot, token)
  local last = redis.call('HGET', s.prefix .. 'n', slot)
  if not last or string.sub(last, 9) ~= token then return nil end
  local fence = struct.unpack('<d', last)
  local lease = lease_of(s, exact(fence))
  if not lease then return nil end
  local entries, members = wanted(s, lease.members), {}
  if #entries == 0 then
    take_lease(s, exact(fence))
    suspects.unknown(s, suspects.let_go(s, lease.rest), {ready_at = lease.left_at, failures = lease.failures, attempts = lease.attempts - 1})
    return nil
  end
  for i, entry in ipairs(entries) do members[i] = entry.member end
  if #members < #lease.members then
    lease.members = members
    redis.call('HSET', s.prefix .. 'x', exact(fence), cmsgpack.pack(lease))
  end
  return granted(s, slot, fence, lease, entries)
end

-- Pack a batch of fresh entries. If more is waiting than fits, entries that can't be answered in time get no place. If there are several
-- tenants, large entries take at most BATCH_PAGES of the batch, or one of them rides alone.
local function pack_batch(s, limit)
  local q, entries, late, gone, closed = s.q, {}, {}, {}, {}
  local hopeless, left, owed, promised = s.now + batch_seconds(q, limit), s.most_weight, q.owed, 0
  local blocked = false
  local pages = s.now - q.mixed_at < MIXED_SECONDS and BATCH_PAGES or INF
  s.pages, s.most = pages, INF
  if s.longest > 0 then
    local chosen = nearest.pack(s, limit, hopeless, gone, late)
    if chosen then
      q.owed, s.touched[DEPARTED] = 0, true
      look_again(s, gone)
      return chosen, late
    end
  end
  local top = 1
  while top < s.tiers and q.depth[top] == 0 do
    top = top + 1
  end
  local before = waiting_weight(s) - q.weight[top]  -- What is waiting in lower tiers.
  while q.fresh > 0 and #entries < limit and (left > 0 or #entries == 0) do
    local room = {count = limit - #entries, weight = left, kept = 0, promised = 0, empty = #entries == 0}
    local contended = q.fresh > room.count or (waiting_weight(s) > left and (q.fresh > 1 or not room.empty))
    local popped, again = pop_in_turns(s, room, owed, gone, closed)
    promised, owed = math.max(promised, room.promised), 0
    blocked = blocked or (again and again ~= top)
    if #popped == 0 and not again then
      if not next(closed) then recount(s) end
      break
    end
    for _, entry in ipairs(wanted(s, popped)) do
      if contended and entry.due < hopeless then
        late[#late + 1] = entry
      else
        entries[#entries + 1] = entry
        if s.weighed then left = left - counted_weight(s, entry.weight) end
      end
    end
    if #entries == 0 then closed, s.pages, s.most = {}, pages, INF end
  end
  local below = waiting_weight(s) - q.weight[top]
  if blocked and s.max_weight > 0 then  -- All might have fitted if their shapes were the same.
    promised = math.max(promised, math.min(reserved_places(s, limit) * s.unit + q.owed, s.most_weight))
  end
  if #entries > 0 and entries[1].shape > 0 and entries[1].tier ~= top then
    promised = 0  -- The lower tiers had the batch.
  end
  q.owed = (blocked or left <= 0) and math.min(math.max(0, promised - (before - below)), blocked and INF or below) or 0
  s.touched[DEPARTED] = true
  look_again(s, gone)
  return entries, late
end

-- Make a group leave, or as much of it as fits.
local function depart_apart(s, slot, token, group, limit, price)
  local q, kind = s.q, group.kind
  if group.caller ~= '' then
    local _, beside = suspects.callers(s, group.caller)
    local others = q.fresh > 0 or s.now - q.newest < MIXED_SECONDS or beside > 0
    limit = culprits.group_size(s, group.caller, limit, others and MOST_OUTPUT or LONE_ROOM)
  end
  local reason = kind == GROUP.QUARANTINE and group.attempts == 0 and APART_REASON or RETRY_REASON
  local entries = suspects.take(s, group, limit)
  if kind ~= GROUP.FIRST then
    suspects.pay(s, kind, batch_seconds(q, size_of_batch(s, entries)), batch_seconds(q, q.max_batch), price)
  end
  local reply = depart(s, slot, token, entries, reason, group)
  ring(s)
  return reply
end

-- Call this after the batch has left, because it offers the followers of late entries again.
local function send_late(s, late) if #late > 0 then send_failures(s, 'late', late, 0) end end

step('claim', function(s, args)
  local q, now = s.q, s.now
  local slot, limit, token = args[HEAD + 1], tonumber(args[HEAD + 2]), args[HEAD + 3]
  local worker = string.match(slot, '%z(.*)$')
  local before = granted_before(s, slot, token)
  if before then return before, true end
  limit = math.min(limit, s.max_batch)
  if limit ~= q.limit or s.max_batch ~= q.max_batch then q.max_batch, s.touched[RULE] = s.max_batch, true end
  s.most_weight = limit * s.unit
  came(s, slot)
  off_watch(s, slot)
  expire(s)
  local first, turn, again = nil, nil, INF
  if q.groups > 0 then first, turn, again = suspects.choose(s, worker) end
  if first then return depart_apart(s, slot, token, first, limit, 0) end
  local reason, instant = nil, INF
  q.limit = limit
  local rule = args[HEAD + 5]
  local made_at, slots = struct.unpack('<dd', rule)
  if #rule >= RULE_BYTES and now - made_at <= RULE_AGE and slots == q.slots then
    made_at, slots, EACH_OF_RULE = struct.unpack(RULE_FORMAT, rule)
    q.rule_at, s.touched[RULE] = made_at, true
    reason, instant = decide(s, slot)
  else
    return {'load', load_of(s)}
  end
  if turn and (not reason or q.credit >= 0) then
    return depart_apart(s, slot, token, turn, limit, reason and suspects.price(s, turn) or 0)
  end
  if not reason and bulk.waits(s) and args[HEAD + 4] ~= '1' then
    local opens = bulk.opens_at(s)
    local entries = opens <= now and bulk.whole(s, limit) or {}
    if #entries > 0 then
      local reply = depart(s, slot, token, entries, BULK_REASON, nil, WHOLE)
      ring(s)
      return reply
    end
    again = math.min(again, opens)
  end
  if not reason then
    local by_itself = args[HEAD + 4] == '1' and INF or go_idle(s, slot, math.min(instant, again))
    return {'wait', struct.pack('<d', by_itself), load_of(s)}
  end
  local seats = limit
  if q.bulk_used > 0 then bulk.charge(s, slot, limit) end
  limit = math.floor(math.min(limit, instant))  -- Maximum size of the batch.
  s.most_weight = limit * s.unit
  local tenants = turn and tenants_in_lanes(s)
  local entries, late = pack_batch(s, limit)
  if #entries == 0 then
    send_late(s, late)
    return {'load', load_of(s)}
  end
  local oldest = INF
  for _, entry in ipairs(entries) do oldest = math.min(oldest, entry.arrived) end
  q.wait = q.wait + (now - oldest - q.wait) * WAIT_WEIGHT
  q.last_departure = now
  q.schedule = math.max(q.schedule, now) + q.pace
  budgets.earn(s, entries)
  if turn then
    suspects.earn(s, batch_seconds(q, size_of_batch(s, entries)), tenants, batch_seconds(q, q.max_batch))
  end
  local riders = q.bulk_used > 0 and bulk.fill(s, entries, seats, size_of_batch(s, entries), now - oldest) or 0
  local reply = depart(s, slot, token, entries, reason, nil, riders > 0 and SEATS or nil)
  send_late(s, late)
  ring(s)
  return reply
end)

-- lose: drop entries if the claiming worker didn't find their separately stored inputs, and tell those that are waiting for them. Arguments
-- after the common ones: fence, packed positions of the entries. Returns how many entries are left in the lease.
step('lose', function(s, args)
  local lease, lost, members = lease_of(s, args[HEAD + 1]), {}, {}
  if not lease then return 0, true end
  for _, position in ipairs(cmsgpack.unpack(args[HEAD + 2])) do lost[position + 1] = true end
  for position, member in ipairs(lease.members) do
    if not lost[position] then members[#members + 1] = member end
  end
  local entries = split(wanted(s, lease.members), function(entry) return lost[entry.position] end)
  send_failures(s, 'lost', entries, lease.attempts, lease.left_at)
  if #members > 0 then
    lease.members = members
    redis.call('HSET', s.prefix .. 'x', args[HEAD + 1], cmsgpack.pack(lease))
  else
    take_lease(s, args[HEAD + 1])
    suspects.unknown(s, suspects.let_go(s, lease.rest), {ready_at = lease.left_at, failures = lease.failures, attempts = lease.attempts - 1})
    ring(s)
  end
  return #members
end)

-- unlisten: a slot no longer waits to be woken. If it has been woken, another slot is woken.
step('unlisten', function(s, args)
  no_longer_idle(s, args[HEAD + 1])
  came(s, args[HEAD + 1])
  ring(s)
end)
end

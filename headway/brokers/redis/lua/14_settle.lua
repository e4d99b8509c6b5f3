-- The ways in which a lease ends: completed, released or expired. `take_lease` of 12_leases.lua refuses a stale fence.
local fail
do  -- A library may have only 200 local names.
-- Send replies to gateways that still exist. Arguments from position `first` on: number of gateways, then the name and packed replies of each.
-- `unwanted` are the packed positions of entries that nobody is waiting for, or ''.
local function send_replies(s, lease, args, first, present, unwanted)
  local left_at, size = lease.left_at, #lease.members
  for at = first + 1, first + 2 * tonumber(args[first]), 2 do
    if present[args[at]] then
      send(s, args[at], 'k', 'ran', 'd', args[at + 1], 't', left_at, 'e', s.now, 'n', size, 'a', lease.attempts, 'x', unwanted)
    end
  end
end

-- Give entries of a lease their outcomes. Arguments from position `first` on:
-- - replies, see `send_replies`; number of entries with dedup keys; 0 if outcomes may not be kept; the bytes to put before a single packed
--   reply; packed positions and tokens of separately stored outputs, or ''; version and code that ran the entries;
-- - for each entry with dedup keys: position, usefulness and weight of its outcome, number of its gateway, begin and end of its reply there;
-- - for each item that failed individually: its position and the reason.
local function give(s, lease, entries, args, first)
  local at = first + 1 + 2 * tonumber(args[first])
  local count, head, ran = tonumber(args[at]), args[at + 2], args[at + 4]
  local present, there, tokens, unwanted = {}, {}, {}, {}
  for _, entry in ipairs(entries) do present[entry.gateway], there[entry.position - 1] = true, entry end
  for _, output in ipairs(args[at + 3] ~= '' and cmsgpack.unpack(args[at + 3]) or {}) do
    tokens[output[1]] = output[2]
  end
  for position = 0, #lease.members - 1 do
    local entry = there[position]
    if not entry or entry.gateway == '' then
      unwanted[#unwanted + 1] = position
      if tokens[position] and not (entry and entry.shared) then
        redis.call('UNLINK', s.prefix .. 'R:' .. tokens[position])
      end
    end
  end
  send_replies(s, lease, args, first, present, #unwanted > 0 and cmsgpack.pack(unwanted) or '')
  local alone, left_at = {}, exact(lease.left_at)
  s.scarce = args[at + 1] == '0'
  at = at + 5
  for i = at, at + 6 * count - 1, 6 do
    local position, replies = tonumber(args[i]), args[first + 2 * tonumber(args[i + 3])]
    local reply = head .. string.sub(replies, tonumber(args[i + 4]), tonumber(args[i + 5]))
    alone[position] = {
      worth = tonumber(args[i + 1]), weight = tonumber(args[i + 2]), ran = ran, token = tokens[position],
      fields = {'k', 'ran', 'd', reply, 't', left_at, 'e', exact(s.now), 'n', #lease.members, 'a', lease.attempts, 'x', ''},
    }
  end
  for i = at + 6 * count, #args, 2 do
    local entry = there[tonumber(args[i])]
    if entry and entry.tier <= s.tiers then bury(s, entry, lease.attempts, args[i + 1]) end
  end
  for _, entry in ipairs(entries) do
    if entry.shared then
      local outcome = alone[entry.position - 1]
      if outcome and outcome.token and entry.gateway ~= '' then
        large.lend(s, outcome.token, {submissions.name(entry.nonce, entry.key)})
      end
      conclude(s, outcome or late_outcome(s, entry), {whose(entry.key, '', false, false)}, not outcome)
    end
  end
  mark(s, entries)
end

-- deliver: settle some entries before the completion, because large outputs in a single step would block everything else. Arguments after the
-- common ones: fence, packed positions, outcomes. Returns how many entries were answered, or nothing if the lease isn't valid.
step('deliver', function(s, args)
  local lease, there = lease_of(s, args[HEAD + 1]), {}
  if not lease then return {}, true end
  for _, position in ipairs(cmsgpack.unpack(args[HEAD + 2])) do there[position + 1] = true end
  local entries = split(wanted(s, lease.members), function(entry) return there[entry.position] end)
  give(s, lease, entries, args, HEAD + 3)
  return {#entries}
end)

-- Fast path of `give` if all entries of a lease are present and plain. Returns their number, or nil if it did nothing.
local function give_alike(s, lease, args, first)
  local after, members, sub = first + 1 + 2 * tonumber(args[first]), lease.members, string.sub
  if #args ~= after + 4 or args[after + 3] ~= '' then return nil end
  local keys, marks, present = {}, {}, {}
  for i = 1, #members do keys[i] = sub(members[i], DIGITS + 1) end
  local headers = call_each('HMGET', s.prefix .. 'e', keys)
  for i = 1, #members do
    local mark, gateway = submissions.mark_of_plain(headers[i], members[i])
    if not mark then return nil end
    present[gateway], marks[2 * i - 1], marks[2 * i] = true, keys[i], mark
  end
  send_replies(s, lease, args, first, present, '')
  call_all('HSET', s.prefix .. 'e', marks)
  call_all('HDEL', s.prefix .. 'p', keys)
  return #members
end

-- Record that a batch returned with outputs. See `ModelQueue.finish`. `learns` is set if its run time is representative.
local function finish(s, lease, learns)
  local q, now = s.q, s.now
  if lease.caller ~= '' and culprits.sends_large(s, lease.caller) then
    if q.fresh > 0 then suspects.overrun(s, now - lease.left_at - batch_seconds(q, lease.size)) end
  elseif learns and (lease.bulk ~= WHOLE or not string.find(shape_of(lease.members[1]), '[^0]')) then  -- Batches that ride separately aren't representative.
    observe_run(s, lease.slot, lease.size, now - lease.left_at, lease.parted)
  end
  q.gate_at = -INF
  local rest = suspects.let_go(s, lease.rest)
  if #rest > 0 then
    suspects.halve(s, rest, {ready_at = now, failures = lease.failures, attempts = lease.attempts - 1})
  end
  if lease.caller ~= '' then culprits.ran(s, lease.caller, #lease.members, true) end
end

-- complete: a batch has returned. Arguments after the common ones: fence, outcomes. Returns the numbers of answered and departed entries, and the load, or nothing.
step('complete', function(s, args)
  local lease = take_lease(s, args[HEAD + 1])
  if not lease then return {}, true end
  finish(s, lease, true)
  local answered = give_alike(s, lease, args, HEAD + 2)
  if not answered then
    local entries = wanted(s, lease.members)
    answered = #entries
    give(s, lease, entries, args, HEAD + 2)
  end
  return {answered, #lease.members - answered, load_of(s)}
end)

-- Move the entries of these callers that are next in line to quarantine. See `ModelQueue._move_apart`.
local function move_apart(s, anew)
  local tenants = {}
  for caller in pairs(anew) do tenants[string.match(caller, '^%Z*')] = true end
  for tier = 1, s.tiers do
    local members = {}
    for _, member in ipairs(s.q.depth[tier] > 0 and redis.call('ZRANGE', s.prefix .. 'l' .. tier, 0, NEAR_BATCHES * s.max_batch - 1) or {}) do
      members[#members + 1] = tenants[tenant_of(key_of(member))] and member or nil
    end
    local entries = wanted(s, members)
    local callers = culprits.callers_of(s, entries)
    for i, entry in ipairs(entries) do
      if anew[callers[i]] and drop_from_lane(s, entry) then
        suspects.join(s, callers[i], {entry}, {ready_at = s.now, failures = 0, attempts = 0})
      end
    end
  end
  look_again(s)
end

-- leave_out: a batch has returned, and all entries were answered except those whose outputs were left out. These run again, separately. See
-- `ModelQueue.leave_out`. Arguments after the common ones: fence, packed position and size of each. Returns their number and the load, or nothing.
step('leave_out', function(s, args)
  local lease, sizes, again = take_lease(s, args[HEAD + 1]), {}, 0
  if not lease then return {}, true end
  finish(s, lease, false)
  for _, left in ipairs(cmsgpack.unpack(args[HEAD + 2])) do sizes[left[1] + 1] = left[2] end
  local entries = wanted(s, lease.members)
  local callers = culprits.callers_of(s, entries)
  local anew = {}
  for i, entry in ipairs(entries) do
    anew[callers[i]] = sizes[entry.position] and not culprits.ride_apart(s, callers[i]) or anew[callers[i]]
  end
  if next(anew) then move_apart(s, anew) end
  for i, entry in ipairs(entries) do
    if sizes[entry.position] then
      again = again + 1
      culprits.left_out(s, callers[i], sizes[entry.position])
      suspects.join(s, callers[i], {entry}, {ready_at = s.now, failures = lease.failures, attempts = lease.attempts})
    end
  end
  ring(s)
  return {again, load_of(s)}
end)

-- True if the rest of a failed batch isn't run again. See `core.retry.is_over`.
local function is_over(cause, size, attempts, alone)
  if NEVER_SPLIT[cause] then
    return attempts >= MAX_ATTEMPTS
  elseif size > 1 then
    return false
  elseif SEARCHED[cause] then
    return alone > 0 and attempts >= RAISES
  end
  return alone >= DEATHS_ALONE and attempts >= MAX_ATTEMPTS
end

-- Run failed entries again. See `ModelQueue._run_again`.
local function run_again(s, entries, cause, group, lease, dice)
  local single, there = #entries == 1, #entries > 0
  local whole = there and (NEVER_SPLIT[cause] or (not SEARCHED[cause] and (single or group.failures <= 1)))
  if single or (there and not SEARCHED[cause]) then
    local pause = math.min(BACKOFF_BASE * 2 ^ math.min(group.failures - 1, 16), BACKOFF_CAP)  -- See `core.retry.backoff`.
    group.ready_at = group.ready_at + pause * (0.5 + 0.5 * dice)
    group.avoid = string.match(lease.slot, '%z(.*)$')
    group.avoid_until = group.ready_at + math.max(batch_seconds(s.q, #entries), MIN_AVOIDANCE)
  end
  if whole and lease.rest ~= 0 and NEVER_SPLIT[cause] then
    group.rest = lease.rest
  else
    suspects.unknown(s, suspects.let_go(s, lease.rest), {ready_at = lease.left_at, failures = lease.failures, attempts = lease.attempts - 1})
  end
  if whole then
    suspects.add(s, entries, GROUP.FIRST, group)
  elseif there then
    suspects.halve(s, entries, group)
  end
end

-- Fail a batch that has bulk entries. See `ModelQueue._fail_beside`. Returns how many entries run again.
local function fail_beside(s, lease, failure, late, entries, riders)
  if #entries > 0 then
    suspects.add(s, entries, GROUP.FIRST, {ready_at = s.now, failures = lease.failures, attempts = lease.attempts - 1})
  end
  send_failures(s, 'dead', riders, lease.attempts, lease.left_at, #lease.members, failure)
  send_failures(s, 'late', late, lease.attempts)
  return #entries
end

-- Fail a batch. See `ModelQueue.fail`. Returns how many entries run again.
function fail(s, lease, failure, dice)
  local now, failed = s.now, cmsgpack.unpack(failure)
  local cause = failed[1]
  local riders, others, spent = nil, wanted(s, lease.members), {}
  if lease.bulk then riders, others = bulk.parted(s, others) end
  local entries, late = split(others, function(entry) return entry.due > now end)
  if riders then return fail_beside(s, lease, failure, late, entries, riders) end
  local places, beside = failed[7] or {}, 0
  local alone = lease.alone + ((#lease.members == 1 or #places == 1) and 1 or 0)
  if #places > 0 then entries, beside = suspects.at(s, lease, entries, places) end
  if lease.caller ~= '' and SEARCHED[cause] then culprits.ran(s, lease.caller, #lease.members, false) end
  local dead = {}
  if #entries > 0 and is_over(cause, #entries, lease.attempts, alone) then
    dead, entries = entries, {}
    if not BLAMELESS[cause] then
      culprits.found(s, dead[1], not SEARCHED[cause], failed[4] ~= '' and failed[4] or failed[2], lease.left_at)
    end
  elseif not SEARCHED[cause] then
    entries, spent = budgets.pay(s, entries)
  end
  local hung = cause == 'timeout' or nil
  run_again(s, entries, cause,
    {ready_at = now, failures = lease.failures + 1, attempts = lease.attempts, alone = alone, hung = hung}, lease, dice)
  for _, entry in ipairs(dead) do bury(s, entry, lease.attempts, failure) end
  send_failures(s, 'dead', dead, lease.attempts, lease.left_at, #lease.members, failure)
  send_failures(s, 'spent', spent, lease.attempts, lease.left_at, #lease.members, failure)
  send_failures(s, 'late', late, lease.attempts, nil, nil, nil, hung)
  return #entries + beside
end

-- release: end a lease without outputs. Arguments after the common ones: fence, then the failure and a random number in [0, 1). If there is
-- no failure, the batch never started, and nothing is charged. Returns how many entries run again.
step('release', function(s, args)
  local lease = take_lease(s, args[HEAD + 1])
  if not lease then return {}, true end
  local again = 0
  if args[HEAD + 2] then
    again = fail(s, lease, args[HEAD + 2], tonumber(args[HEAD + 3]))
  else
    local entries, riders = wanted(s, lease.members), nil
    if lease.bulk then
      riders, entries = bulk.parted(s, entries)
      bulk.hand_back(s, riders)
    end
    local before = {
      ready_at = s.now, failures = lease.failures, attempts = lease.attempts - 1, alone = lease.alone, rest = lease.rest,
    }
    if #entries > 0 then
      suspects.add(s, entries, GROUP.FIRST, before)
    else
      suspects.unknown(s, suspects.let_go(s, lease.rest), before)
    end
  end
  ring(s)
  return {again}
end)

-- extend: renew a lease for its full length from now.
step('extend', function(s, args)
  local there = redis.call('HEXISTS', s.prefix .. 'x', args[HEAD + 1])
  if there == 1 then redis.call('ZADD', s.prefix .. 'y', s.now + s.lease_seconds, args[HEAD + 1]) end
  return there, true
end)
end

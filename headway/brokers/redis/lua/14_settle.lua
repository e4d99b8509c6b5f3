-- How a lease ends: completed, released, or outlived.

-- Give entries of a lease their outcomes. Arguments from a position on: how many gateways, for each its name and its packed
-- replies; how many entries have dedup keys, whether outcomes may be kept, what makes packed replies of a single one, the packed positions
-- and tokens of outputs that are stored apart, or nothing, the version that ran them; for each such entry its position, what its outcome is worth, what it weighs, the number of its gateway, and where in that one's packed
-- replies its own begins and ends; then for each item that failed by itself: its position and why.
local function give(s, lease, entries, args, at)
  local now = s.now
  local first, at = at, at + 1
  local present, tokens = {}, {}
  for _, entry in ipairs(entries) do
    present[entry.gateway] = true
  end
  local aparts = args[first + 4 + 2 * tonumber(args[first])]
  aparts = aparts ~= '' and cmsgpack.unpack(aparts) or {}
  for _, output in ipairs(aparts) do
    tokens[output[1]] = output[2]
  end
  local unwanted = ''
  if #entries < #lease.members or present[''] then
    local there, positions, shared = {}, {}, {}
    for _, entry in ipairs(entries) do
      there[entry.position] = entry.gateway ~= ''
      shared[entry.position] = entry.shared
    end
    for position = 1, #lease.members do
      if not there[position] then
        positions[#positions + 1] = position - 1
      end
    end
    unwanted = cmsgpack.pack(positions)
    for _, output in ipairs(aparts) do
      if not there[output[1] + 1] and not shared[output[1] + 1] then
        redis.call('UNLINK', s.prefix .. 'R:' .. output[2])
      end
    end
  end
  if #entries > 0 then
    for _ = 1, tonumber(args[first]) do
      if present[args[at]] then
        send(s, args[at], 'k', 'ran', 'd', args[at + 1], 't', lease.left_at, 'e', now, 'n', #lease.members, 'a', lease.attempts, 'x', unwanted)
      end
      at = at + 2
    end
  end
  at = first + 1 + 2 * tonumber(args[first])
  local alone = {}
  s.scarce = args[at + 1] == '0'
  local head, count = args[at + 2], tonumber(args[at])
  for i = at + 5, at + 4 + 6 * count, 6 do
    local replies = args[first + 2 * tonumber(args[i + 3])]
    local reply = head .. string.sub(replies, tonumber(args[i + 4]), tonumber(args[i + 5]))
    alone[tonumber(args[i])] = {worth = tonumber(args[i + 1]), weight = tonumber(args[i + 2]), version = args[at + 4],
      token = tokens[tonumber(args[i])], fields = {'k', 'ran', 'd', reply,
      't', exact(lease.left_at), 'e', exact(now), 'n', #lease.members, 'a', lease.attempts, 'x', ''}}
  end
  at = at + 5 + 6 * count
  local at_position = {}
  if at < #args then
    for _, entry in ipairs(entries) do
      at_position[entry.position - 1] = entry
    end
  end
  for i = at, #args, 2 do
    local entry = at_position[tonumber(args[i])]
    if entry then
      bury(s, entry, lease.attempts, args[i + 1])
    end
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

-- deliver: some of a batch's outcomes, ahead of its completion, which has the others: large outputs in one step would keep
-- everybody waiting. Arguments after the head: fence, packed positions of the entries, and their outcomes. Returns how many were
-- answered; or nothing.
redis.register_function{function_name = VERSION .. '_deliver', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  local packed = redis.call('HGET', s.prefix .. 'x', args[HEAD + 1])
  if not packed then
    leave(s)
    return {}
  end
  local lease, there, entries = cmsgpack.unpack(packed), {}, {}
  for _, position in ipairs(cmsgpack.unpack(args[HEAD + 2])) do
    there[position + 1] = true
  end
  for _, entry in ipairs(wanted(s, lease.members)) do
    if there[entry.position] then
      entries[#entries + 1] = entry
    end
  end
  give(s, lease, entries, args, HEAD + 3)
  save(s)
  return {#entries}
end}

-- Give the entries of a lease their outcomes, as `give`, where all are there and nothing is rare about any of them. Returns how many
-- there were; or nothing, and has done nothing.
local function give_alike(s, lease, args, first)
  local after, members, sub = first + 1 + 2 * tonumber(args[first]), lease.members, string.sub
  if #args ~= after + 4 or args[after + 3] ~= '' then
    return nil
  end
  local keys, marks, present = {}, {}, {}
  for i = 1, #members do
    keys[i] = sub(members[i], DIGITS + 1)
  end
  local headers = call_each('HMGET', s.prefix .. 'e', keys)
  for i = 1, #members do
    local mark, gateway = submissions.mark_of_plain(headers[i], members[i])
    if not mark then
      return nil
    end
    present[gateway], marks[2 * i - 1], marks[2 * i] = true, keys[i], mark
  end
  for at = first + 1, after - 1, 2 do
    if present[args[at]] then
      send(s, args[at], 'k', 'ran', 'd', args[at + 1], 't', lease.left_at, 'e', s.now, 'n', #members, 'a', lease.attempts, 'x', '')
    end
  end
  call_all('HSET', s.prefix .. 'e', marks)
  call_all('HDEL', s.prefix .. 'p', keys)
  return #members
end

-- complete: a batch came back. Arguments after the head: fence, and the outcomes of its entries.
-- Returns answered, departed, load; or nothing.
redis.register_function{function_name = VERSION .. '_complete', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  local q, now = s.q, s.now
  local lease = take_lease(s, args[HEAD + 1])
  if not lease then
    leave(s)
    return {}
  end
  observe_run(s, lease.slot, lease.size, now - lease.left_at)
  q.gate_at = -INF
  local rest = suspects.let_go(s, lease.rest)
  if #rest > 0 then
    suspects.halve(s, rest, {ready_at = now, failures = lease.failures, attempts = lease.attempts - 1})
  end
  if lease.caller ~= '' then
    culprits.ran(s, lease.caller, #lease.members, true)
  end
  local answered = give_alike(s, lease, args, HEAD + 2)
  if not answered then
    local entries = wanted(s, lease.members)
    answered = #entries
    give(s, lease, entries, args, HEAD + 2)
  end
  local told = load_of(s)
  save(s)
  return {answered, #lease.members - answered, told}
end}

local fail, forget_full_budgets

do

local function refilled(q, saved, seconds)
  local trickle = math.max(BUDGET_TRICKLE, BUDGET_TRICKLE_RUNS * q.max_batch)
  return math.min(saved + seconds * trickle, math.max(BUDGET_RESERVE, BUDGET_RUNS * q.max_batch))
end

-- Forget the budgets of tenants that are full again.
function forget_full_budgets(s)
  local q = s.q
  local all = q.budgets > 0 and redis.call('HGETALL', s.prefix .. 'rb') or {}
  for i = 1, #all, 2 do
    local saved, at = struct.unpack('<dd', all[i + 1])
    if refilled(q, saved, s.now - at) >= refilled(q, INF, 0) then
      redis.call('HDEL', s.prefix .. 'rb', all[i])
      q.budgets, s.touched[SELDOM] = q.budgets - 1, true
    end
  end
end

-- Backoff with equal jitter: as `core.retry.backoff`.
local function backoff(failures, dice)
  local whole = math.min(BACKOFF_BASE * 2 ^ math.min(failures - 1, 16), BACKOFF_CAP)
  return whole * (0.5 + 0.5 * dice)
end

-- Take retries out of a tenant's budget; false when they are not there.
local function spend(s, tenant, count)
  local q, now = s.q, s.now
  local packed, saved = redis.call('HGET', s.prefix .. 'rb', tenant), refilled(q, INF, 0)
  if packed then
    local at
    saved, at = struct.unpack('<dd', packed)
    saved = refilled(q, saved, now - at)
  else
    q.budgets, s.touched[SELDOM] = q.budgets + 1, true
  end
  local paid = saved >= count
  redis.call('HSET', s.prefix .. 'rb', tenant, struct.pack('<dd', paid and saved - count or saved, now))
  lasting(s, 'rb')
  return paid
end

-- Those whose tenants have the retries for them, and those whose tenants have not.
local function paid_for(s, entries)
  local counts, order, pays, paid, spent = {}, {}, {}, {}, {}
  for _, entry in ipairs(entries) do
    local tenant = tenant_of(key_of(entry.member))
    if not counts[tenant] then
      counts[tenant] = 0
      order[#order + 1] = tenant
    end
    counts[tenant] = counts[tenant] + 1
  end
  for _, tenant in ipairs(order) do
    pays[tenant] = spend(s, tenant, counts[tenant])
  end
  for _, entry in ipairs(entries) do
    local into = pays[tenant_of(key_of(entry.member))] and paid or spent
    into[#into + 1] = entry
  end
  return paid, spent
end

-- Whether what is left of a failed batch gets no further run: as `core.retry.is_over`.
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

-- What failed runs again: as `ModelQueue._run_again`.
local function run_again(s, entries, cause, group, lease, dice)
  local there, whole = #entries > 0, false
  if there then
    whole = NEVER_SPLIT[cause] or (not SEARCHED[cause] and (#entries == 1 or group.failures <= 1))
  end
  if there and (whole or not SEARCHED[cause] or #entries == 1) then
    group.ready_at = group.ready_at + backoff(group.failures, dice)
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

-- A batch failed: as `ModelQueue.fail`. Returns how many run again.
function fail(s, lease, failure, dice)
  local now, failed = s.now, cmsgpack.unpack(failure)
  local cause = failed[1]
  local entries, late, spent = {}, {}, {}
  for _, entry in ipairs(wanted(s, lease.members)) do
    local into = entry.due > now and entries or late
    into[#into + 1] = entry
  end
  local alone = lease.alone + (#lease.members == 1 and 1 or 0)
  if lease.caller ~= '' and SEARCHED[cause] then
    culprits.ran(s, lease.caller, #lease.members, false)
  end
  local dead = {}
  if #entries > 0 and is_over(cause, #entries, lease.attempts, alone) then
    dead, entries = entries, {}
    if not BLAMELESS[cause] then
      culprits.found(s, dead[1], not SEARCHED[cause], culprits.shown(failed))
    end
  elseif not SEARCHED[cause] then
    entries, spent = paid_for(s, entries)
  end
  local hung = cause == 'timeout'
  run_again(s, entries, cause,
    {ready_at = now, failures = lease.failures + 1, attempts = lease.attempts, alone = alone, hung = hung or nil}, lease, dice[1])
  for _, entry in ipairs(dead) do
    bury(s, entry, lease.attempts, failure)
  end
  for kind, list in pairs({dead = dead, spent = spent}) do
    if #list > 0 then
      send_failures(s, kind, list, lease.attempts, lease.left_at, #lease.members, failure)
    end
  end
  if #late > 0 then
    send_failures(s, 'late', late, lease.attempts, nil, nil, nil, hung)
  end
  return #entries
end

end

-- release: a lease ends without outputs. Arguments after the head: fence, then the failure and two throws of the dice,
-- each in [0, 1); no failure means that the work never started, and nothing is charged. Returns how many run again.
redis.register_function{function_name = VERSION .. '_release', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  local lease = take_lease(s, args[HEAD + 1])
  if not lease then
    leave(s)
    return {}
  end
  local again = 0
  if #args > HEAD + 1 then
    again = fail(s, lease, args[HEAD + 2], {tonumber(args[HEAD + 3]), tonumber(args[HEAD + 4])})
  else
    local entries = wanted(s, lease.members)
    local before = {ready_at = s.now, failures = lease.failures, attempts = lease.attempts - 1, alone = lease.alone}
    if #entries > 0 then
      before.rest = lease.rest
      suspects.add(s, entries, GROUP.FIRST, before)
    else
      suspects.unknown(s, suspects.let_go(s, lease.rest), before)
    end
  end
  ring(s)
  save(s)
  return {again}
end}

-- extend: renew a lease by its full length from now on.
redis.register_function{function_name = VERSION .. '_extend', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  leave(s)
  if redis.call('HEXISTS', s.prefix .. 'x', args[HEAD + 1]) == 0 then
    return 0
  end
  redis.call('ZADD', s.prefix .. 'y', s.now + s.lease_seconds, args[HEAD + 1])
  return 1
end}

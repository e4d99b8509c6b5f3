-- How a lease ends: completed, released, or outlived.

local fail

do  -- A library has room for 200 local names.

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
step('deliver', function(s, args)
  local packed = redis.call('HGET', s.prefix .. 'x', args[HEAD + 1])
  if not packed then
    return {}, true
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
  return {#entries}
end)

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
step('complete', function(s, args)
  local q, now = s.q, s.now
  local lease = take_lease(s, args[HEAD + 1])
  if not lease then
    return {}, true
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
  return {answered, #lease.members - answered, load_of(s)}
end)

-- Backoff with equal jitter: as `core.retry.backoff`.
local function backoff(failures, dice)
  local whole = math.min(BACKOFF_BASE * 2 ^ math.min(failures - 1, 16), BACKOFF_CAP)
  return whole * (0.5 + 0.5 * dice)
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
    entries, spent = budgets.pay(s, entries)
  end
  local hung = cause == 'timeout' or nil
  run_again(s, entries, cause,
    {ready_at = now, failures = lease.failures + 1, attempts = lease.attempts, alone = alone, hung = hung}, lease, dice)
  for _, entry in ipairs(dead) do
    bury(s, entry, lease.attempts, failure)
  end
  send_failures(s, 'dead', dead, lease.attempts, lease.left_at, #lease.members, failure)
  send_failures(s, 'spent', spent, lease.attempts, lease.left_at, #lease.members, failure)
  send_failures(s, 'late', late, lease.attempts, nil, nil, nil, hung)
  return #entries
end

-- release: a lease ends without outputs. Arguments after the head: fence, then the failure and a throw of the dice
-- in [0, 1); no failure means that the work never started, and nothing is charged. Returns how many run again.
step('release', function(s, args)
  local lease = take_lease(s, args[HEAD + 1])
  if not lease then
    return {}, true
  end
  local again = 0
  if args[HEAD + 2] then
    again = fail(s, lease, args[HEAD + 2], tonumber(args[HEAD + 3]))
  else
    local entries = wanted(s, lease.members)
    local before = {ready_at = s.now, failures = lease.failures, attempts = lease.attempts - 1, alone = lease.alone, rest = lease.rest}
    if #entries > 0 then
      suspects.add(s, entries, GROUP.FIRST, before)
    else
      suspects.unknown(s, suspects.let_go(s, lease.rest), before)
    end
  end
  ring(s)
  return {again}
end)

-- extend: renew a lease by its full length from now on.
step('extend', function(s, args)
  local there = redis.call('HEXISTS', s.prefix .. 'x', args[HEAD + 1])
  if there == 1 then
    redis.call('ZADD', s.prefix .. 'y', s.now + s.lease_seconds, args[HEAD + 1])
  end
  return there, true
end)

end

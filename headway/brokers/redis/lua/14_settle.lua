-- How a lease ends: completed, released, or outlived.

-- complete: a batch came back. Arguments after the head: fence, how many gateways, for each its name and its packed
-- replies; how many entries have shares, whether outcomes may be kept, for each such entry its place, what its outcome is
-- worth, what it weighs, and its packed reply alone; then for each item that failed by itself: its place and why. Returns answered, departed, load; or nothing.
redis.register_function{function_name = VERSION .. '_complete', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  local q, now = s.q, s.now
  local lease = take_lease(s, args[HEAD + 1])
  if not lease then
    return {}
  end
  local entries = wanted(s, lease.members)
  observe_batch(q, #lease.members, now - lease.left_at)
  q.gate_at = -INF
  local at = HEAD + 3
  local present = {}
  for _, entry in ipairs(entries) do
    present[entry.gateway] = true
  end
  local unwanted = ''
  if #entries < #lease.members or present[''] then
    local there, places = {}, {}
    for _, entry in ipairs(entries) do
      there[entry.place] = entry.gateway ~= ''
    end
    for place = 1, #lease.members do
      if not there[place] then
        places[#places + 1] = place - 1
      end
    end
    unwanted = cmsgpack.pack(places)
  end
  if #entries > 0 then
    for _ = 1, tonumber(args[HEAD + 2]) do
      if present[args[at]] then
        send(s, args[at], 'k', 'ran', 'd', args[at + 1], 't', exact(lease.left_at), 'e', exact(now),
          'n', #lease.members, 'a', lease.attempts, 'x', unwanted)
      end
      at = at + 2
    end
  end
  local place_of = {}
  for _, entry in ipairs(entries) do
    place_of[entry.place - 1] = entry
  end
  at = HEAD + 3 + 2 * tonumber(args[HEAD + 2])
  local alone = {}
  s.scarce = args[at + 1] == '0'
  for i = at + 2, at + 1 + 4 * tonumber(args[at]), 4 do
    alone[tonumber(args[i])] = {worth = tonumber(args[i + 1]), weight = tonumber(args[i + 2]), fields = {'k', 'ran', 'd', args[i + 3],
      't', exact(lease.left_at), 'e', exact(now), 'n', #lease.members, 'a', lease.attempts, 'x', ''}}
  end
  at = at + 2 + 4 * tonumber(args[at])
  for i = at, #args, 2 do
    local entry = place_of[tonumber(args[i])]
    if entry then
      bury(s, entry.key, lease.attempts, args[i + 1])
    end
  end
  for _, entry in ipairs(entries) do
    if entry.shared then
      local outcome = alone[entry.place - 1]
      conclude(s, outcome or late_outcome(s, entry), {whose(entry.key, '', false, false)}, not outcome)
    end
  end
  mark(s, entries)
  local told = load_of(s)
  save(s)
  return {#entries, #lease.members - #entries, told}
end}

-- Backoff with equal jitter: as `core.retry.backoff`.
local function backoff(failures, dice)
  local whole = math.min(BACKOFF_BASE * 2 ^ math.min(failures - 1, 16), BACKOFF_CAP)
  return whole * (0.5 + 0.5 * dice)
end

local function spend(q, count, now)
  local reserve = budget_reserve(q.max_batch)
  if q.saved_at > -INF then
    q.saved = math.min(q.saved + (now - q.saved_at) * math.max(BUDGET_TRICKLE, BUDGET_TRICKLE_RUNS * q.max_batch), reserve)
  end
  q.saved_at = now
  if q.saved < count then
    return false
  end
  q.saved = q.saved - count
  return true
end

-- The index ranges of a failed batch that run again; none when all of it is dead: as `core.retry.plan`.
local function plan(size, failures, attempts, cause)
  if size == 1 or NEVER_SPLIT[cause] then
    return attempts < MAX_ATTEMPTS and {{1, size}} or {}
  elseif failures <= 1 then
    return {{1, size}}
  end
  local middle = math.floor(size / 2)
  return {{1, middle}, {middle + 1, size}}
end

-- A batch failed: the plan decides for its entries. Returns how many run again.
local function fail(s, lease, failure, dice)
  local q, now = s.q, s.now
  local worker = string.match(lease.slot, '%z(.*)$')
  local entries, late = {}, {}
  for _, entry in ipairs(wanted(s, lease.members)) do
    local into = entry.due > now and entries or late
    into[#into + 1] = entry
  end
  local failures, again = lease.failures + 1, 0
  if #entries > 0 then
    local parts = plan(#entries, failures, lease.attempts, cmsgpack.unpack(failure)[1])
    if #parts == 0 then
      for _, entry in ipairs(entries) do
        bury(s, entry.key, lease.attempts, failure)
      end
      send_failures(s, 'dead', entries, lease.attempts, lease.left_at, #lease.members, failure)
    elseif not spend(q, #entries, now) then
      send_failures(s, 'spent', entries, lease.attempts, lease.left_at, #lease.members, failure)
    else
      again = #entries
      for i, part in ipairs(parts) do
        local members = {}
        for place = part[1], part[2] do
          members[#members + 1] = entries[place]
        end
        local ready_at = now + backoff(failures, dice[i])
        set_apart(s, members, {
          ready_at = ready_at, failures = failures, attempts = lease.attempts, avoid = worker,
          avoid_until = ready_at + math.max(batch_seconds(q, #members), MIN_AVOIDANCE),
        })
      end
    end
  end
  if #late > 0 then
    send_failures(s, 'late', late, lease.attempts)
  end
  return again
end

-- release: a lease ends without outputs. Arguments after the head: fence, then the failure and two throws of the dice,
-- each in [0, 1); no failure means that the work never started, and nothing is charged. Returns how many run again.
redis.register_function{function_name = VERSION .. '_release', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  local lease = take_lease(s, args[HEAD + 1])
  if not lease then
    return {}
  end
  local again = 0
  if #args > HEAD + 1 then
    again = fail(s, lease, args[HEAD + 2], {tonumber(args[HEAD + 3]), tonumber(args[HEAD + 4])})
  else
    local entries = wanted(s, lease.members)
    if #entries > 0 then
      set_apart(s, entries, {
        ready_at = s.now, failures = lease.failures, attempts = lease.attempts - 1, avoid = '', avoid_until = -INF,
      })
    end
  end
  ring(s)
  save(s)
  return {again}
end}

-- extend: renew a lease by its full length from now on.
redis.register_function{function_name = VERSION .. '_extend', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  if redis.call('HEXISTS', s.prefix .. 'x', args[HEAD + 1]) == 0 then
    return 0
  end
  redis.call('ZADD', s.prefix .. 'y', exact(s.now + s.lease_seconds), args[HEAD + 1])
  return 1
end}

-- Into the lanes: what a step lets in is gathered, and written down together.

local function new_intake(s)
  local intake = {headers = {}, payloads = {}, odd = {}, lanes = {}, lines = {}, latest = {}, stamps = {}, joined = {}, counted = {}}
  for tier = 1, s.tiers do
    intake.lanes[tier], intake.lines[tier], intake.latest[tier], intake.joined[tier] = {}, {}, {}, 0
  end
  return intake
end

local function round_of(s, tier, tenant, latest)
  local of = latest[tier]
  local last = of[tenant]
  if not last then
    last = tonumber(redis.call('ZSCORE', s.prefix .. 't' .. tier, tenant) or 0)
  end
  local round = math.max(last + 1, s.q.next[tier])
  of[tenant] = round
  return round
end

-- At most how many of an entry's lane are served before it, as `core.packing.Lane.ahead`. What this step has let in is not
-- in the lanes yet; all of it is in rounds that have not begun.
local function served_before(s, intake, entry)
  local q, tier, counted = s.q, entry.tier, intake.counted[entry.tier]
  local tenant, lane = tenant_of(entry.key), s.prefix .. 'l' .. entry.tier
  if not counted then
    counted = {redis.call('ZCOUNT', lane, '-inf', '(' .. q.next[tier]), redis.call('ZCOUNT', lane, q.next[tier], q.next[tier])}
    intake.counted[tier] = counted
  end
  local last = intake.latest[tier][tenant] or tonumber(redis.call('ZSCORE', s.prefix .. 't' .. tier, tenant) or 0)
  local rounds = math.max(last + 2 - q.next[tier], 1)
  return math.min(q.depth[tier], counted[1] + rounds * (counted[2] + intake.joined[tier]))
end

-- Tenants that have entries in the lanes, and in the intake, which is not in the lanes yet.
local function tenants_in_lanes(s, intake)
  local count = 0
  for tier = 1, s.tiers do
    local key = s.prefix .. 't' .. tier
    if s.q.depth[tier] > 0 then
      count = count + redis.call('ZCARD', key)
    end
    for tenant in pairs(intake and intake.latest[tier] or {}) do
      count = count + (redis.call('ZSCORE', key, tenant) and 0 or 1)
    end
  end
  return count
end

-- The header of an entry that arrives: it gets the next number.
local function new_header(s, entry)
  s.q.seq = s.q.seq + 1
  entry.seq = s.q.seq
  local tier = entry.shared and entry.tier + SHARED or entry.tier
  return pack_header(tier, entry.seq, s.now, entry.queue_due, entry.due, entry.nonce, entry.gateway)
end

-- Let an entry wait in its lane.
local function take_in(s, intake, entry, payload)
  local q, tier, queue_due = s.q, entry.tier, entry.queue_due
  local headers, payloads = intake.headers, intake.payloads
  headers[#headers + 1], headers[#headers + 2] = entry.key, new_header(s, entry)
  if payload then
    payloads[#payloads + 1], payloads[#payloads + 2] = entry.key, payload
  end
  local member = member_of(entry.seq, entry.key)
  local round = round_of(s, tier, tenant_of(entry.key), intake.latest)
  local lane, line, stamps = intake.lanes[tier], intake.lines[tier], intake.stamps
  lane[#lane + 1], lane[#lane + 2] = round, member
  if round == q.next[tier] then
    intake.joined[tier] = intake.joined[tier] + 1
  end
  if not stamps[queue_due] then
    stamps[queue_due] = struct.pack(STAMP, s.now, queue_due)
  end
  line[#line + 1] = stamps[queue_due] .. member
  if queue_due < q.last_due[tier] then
    local odd = intake.odd
    odd[#odd + 1], odd[#odd + 2] = queue_due, member
  else
    q.last_due[tier] = queue_due
  end
  q.depth[tier] = q.depth[tier] + 1
  q.fresh = q.fresh + 1
  q.newest = s.now
  q.oldest = math.min(q.oldest, s.now)
  q.due = math.min(q.due, queue_due)
end

local function write_down(s, intake)
  local p = s.prefix
  call_all('HSET', p .. 'e', intake.headers)
  call_all('HSET', p .. 'p', intake.payloads)
  if s.q.fresh <= #intake.headers / 2 then  -- Nothing else waits in the lanes.
    lasting(s, 'e', 'p')
  end
  if #intake.odd > 0 then
    call_all('ZADD', p .. 'd', intake.odd)
    if s.q.odd == 0 then
      lasting(s, 'd')
    end
    s.q.odd = s.q.odd + #intake.odd / 2
  end
  for tier = 1, s.tiers do
    if #intake.lanes[tier] > 0 then
      call_all('ZADD', p .. 'l' .. tier, intake.lanes[tier])
      call_all('RPUSH', p .. 'a' .. tier, intake.lines[tier])
      local rounds = {}
      for tenant, round in pairs(intake.latest[tier]) do
        rounds[#rounds + 1], rounds[#rounds + 2] = round, tenant
      end
      call_all('ZADD', p .. 't' .. tier, rounds)
      lasting(s, 't' .. tier)
      if s.q.depth[tier] == #intake.lanes[tier] / 2 then
        lasting(s, 'l' .. tier, 'a' .. tier)
      end
    end
  end
end

-- The caller of an entry, if it rides apart.
local function caller_apart(s, key, payload)
  local caller = culprits.caller_in(key, payload)
  return culprits.ride_apart(s, caller) and caller or nil
end

-- Let an entry wait in the pool of its caller, which rides apart.
local function wait_apart(s, entry, caller)
  entry.member = member_of(entry.seq, entry.key)
  suspects.join(s, caller, {entry}, {ready_at = s.now + batch_seconds(s.q, 1), failures = 0, attempts = 0})
end

-- Why a new entry may not wait, as `refuse`: in its lane, or in the pool of its caller when that rides apart.
local function admissible(s, intake, entry, timeouts, apart)
  if not apart then
    return refuse(s, entry.tier, timeouts[1], timeouts[2], function()
      return served_before(s, intake, entry)
    end)
  end
  local q, pool = s.q, suspects.pool(s, apart)
  local waiting = pool and #pool.members or 0
  if waiting >= POOL_BATCHES * q.max_batch * q.known_slots then
    gate(s)
    local pace = pace_of(q, entry.tier)
    return pace > 0 and math.max(1 / pace, MIN_WAIT) or UNKNOWN_WAIT, false
  end
  local callers = suspects.callers(s)
  return judge(s, math.floor(SEARCH_LOAD * waiting * (callers + tenants_in_lanes(s, intake)) / callers), entry.tier, timeouts[1],
    timeouts[2])
end

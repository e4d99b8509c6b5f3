-- Intake: entries that a step admits to the tier queues. They are collected, and written together.

-- A list with preallocated space.
local function some()
  return {nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil}
end

local function new_intake() return {headers = some(), payloads = some(), odd = {}, tiers = {}, waiting = {}} end

-- Intake of a tier: rounds and members alternating, the line, each tenant's last round, and how many entries joined the next round.
local function intake_of(intake, tier)
  local of_tier = intake.tiers[tier]
  if not of_tier then
    of_tier = {tier_queue = some(), line = some(), latest = {}, joined = 0, tallied = 0}
    intake.tiers[tier] = of_tier
  end
  return of_tier
end

-- Last round that a tenant's entries have paid for.
local function latest_of(s, intake, tier, tenant)
  local into = intake.tiers[tier]
  return into and into.latest[tenant] or tonumber(redis.call('ZSCORE', s.prefix .. 't' .. tier, tenant) or 0)
end

local function round_of(s, intake, tier, tenant, cost)
  local q = s.q
  local latest = math.max(latest_of(s, intake, tier, tenant), q.next[tier] - 1)
  intake_of(intake, tier).latest[tenant] = latest + cost
  if cost ~= 1 then
    q.rough[tier] = math.max(q.rough[tier], math.ceil(latest + cost))
    s.touched[TIERS + tier] = true
  end
  return math.floor(latest) + 1
end

-- Start counting each tenant's entries in the tier queues.
local function count_tenants(s)
  local counts, list = {}, {}
  for tier = 1, s.tiers do
    for _, member in ipairs(redis.call('ZRANGE', s.prefix .. 'l' .. tier, 0, -1)) do
      local tenant = tenant_of(key_of(member))
      counts[tenant] = (counts[tenant] or 0) + 1
    end
  end
  for tenant, count in pairs(counts) do list[#list + 1], list[#list + 2] = tenant, count end
  redis.call('DEL', s.prefix .. 'tw')
  call_all('HSET', s.prefix .. 'tw', list)
  lasting(s, 'tw')
  s.q.counted, s.counts_anew, s.touched[SELDOM] = 1, true, true
end

do
-- Number of entries in this many rounds from the next one on.
local function in_rounds(s, intake, tier, rounds)
  local last, tier_queue = s.q.next[tier] + rounds - 1, intake_of(intake, tier).tier_queue
  local count = redis.call('ZCOUNT', s.prefix .. 'l' .. tier, s.q.next[tier], last)
  for i = 1, #tier_queue, 2 do count = count + (tier_queue[i] <= last and 1 or 0) end
  return count
end

-- Upper bound on the number of entries in its tier queue that are served before an entry. See `core.fair_queue.TierQueue.ahead`. The entries
-- in this intake aren't in the tier queue yet, but all of them are in rounds that haven't begun.
function served_before(s, intake, entry)
  local q, tier, into = s.q, entry.tier, intake_of(intake, entry.tier)
  local tenant, tier_queue, counted = entry.tenant, s.prefix .. 'l' .. entry.tier, into.counted
  if not counted then
    counted = {redis.call('ZCOUNT', tier_queue, '-inf', '(' .. q.next[tier]), redis.call('ZCOUNT', tier_queue, q.next[tier], q.next[tier])}
    into.counted = counted
  end
  local rounds = math.max(math.floor(latest_of(s, intake, tier, tenant)) + 2 - q.next[tier], 1)
  if q.rough[tier] < q.next[tier] then
    return math.min(q.depth[tier], counted[1] + rounds * (counted[2] + into.joined))
  end
  return rounds > LOOKED_AT and q.depth[tier] or counted[1] + in_rounds(s, intake, tier, rounds)
end

-- The next LOOK_AHEAD entries of a tier queue and its intake, in turn, each as {round, member}.
local function next_in_turn(s, intake, tier)
  local into = intake_of(intake, tier)
  local coming = into.tier_queue
  if not into.ahead then
    local ahead, waiting = {}, redis.call('ZRANGE', s.prefix .. 'l' .. tier, 0, LOOK_AHEAD - 1, 'WITHSCORES')
    for i = 1, #waiting, 2 do ahead[#ahead + 1] = {tonumber(waiting[i + 1]), waiting[i]} end
    into.ahead, into.merged = ahead, 0
  end
  local ahead = into.ahead
  for i = into.merged + 1, #coming, 2 do
    local at = #ahead
    while at > 0 and ahead[at][1] > coming[i] do
      at = at - 1
    end
    if at < LOOK_AHEAD then
      table.insert(ahead, at + 1, {coming[i], coming[i + 1]})
      ahead[LOOK_AHEAD + 1] = nil
    end
  end
  into.merged = #coming
  return ahead
end

-- See `ModelQueue._stretch`.
function stretch_of(s, intake, entry)
  local q, shapes, sizes, own, takes, takes_own, sum, sum_own = s.q, {}, {}, {}, 0, 0, 0, 0
  for _, next_one in ipairs(next_in_turn(s, intake, entry.tier)) do
    local member = next_one[2]
    local shape, size = shape_of(member), size_of(s, 1, weight_of(s, member))
    if not sizes[shape] then shapes[#shapes + 1], sizes[shape], own[shape] = shape, 0, 0 end
    sizes[shape] = sizes[shape] + size
    own[shape] = own[shape] + (tenant_of(key_of(member)) == entry.tenant and size or 0)
  end
  for _, shape in ipairs(shapes) do
    local size = sizes[shape]
    local batches = math.ceil(size / s.max_batch)
    local seconds = batches * batch_seconds(q, size / batches)
    takes, sum = takes + seconds, sum + size
    takes_own, sum_own = takes_own + seconds * own[shape] / size, sum_own + own[shape]
  end
  local each = sum > 0 and takes / sum or 0
  if takes_own > 0 then each = math.min(each, takes_own / sum_own) end
  return math.max(each * s.max_batch / batch_seconds(q, s.max_batch), 1)
end
end

-- Number of tenants that have entries in the tier queues or the intake.
local function tenants_in_lanes(s, intake)
  local count = 0
  for tier = 1, s.tiers do
    local key = s.prefix .. 't' .. tier
    if s.q.depth[tier] > 0 then count = count + redis.call('ZCARD', key) end
    for tenant in pairs(intake and intake_of(intake, tier).latest or {}) do
      count = count + (redis.call('ZSCORE', key, tenant) and 0 or 1)
    end
  end
  return count
end

-- Give an arriving entry the next number. Returns its header.
local function new_header(s, entry)
  s.q.seq, s.touched[INTAKE] = s.q.seq + 1, true
  entry.number, entry.arrived = numbers.next(s.q.seq, entry.weight, entry.shape), s.now
  return pack_header(entry, entry.shared and entry.tier + SHARED or entry.tier, entry.gateway)
end

local tenant_numbers, tenants_known = {}, 0

local function number_of(tenant)
  local number = tenant_numbers[tenant]
  if not number then
    if tenants_known >= MOST_SETTINGS then tenant_numbers, tenants_known = {}, 0 end
    number = tonumber(string.sub(redis.sha1hex(tenant), 1, 12), 16)
    tenant_numbers[tenant], tenants_known = number, tenants_known + 1
  end
  return number
end

-- Record whose entry arrived, because batches are limited in bytes for a while after the tenant changed. Figures can't contain strings, so
-- tenants are numbers there.
local function note_tenant(s, intake, tenant)
  local q, number = s.q, number_of(tenant)
  intake.tenant = tenant
  if number ~= q.last_tenant and q.last_tenant > 0 then q.mixed_at = s.now end
  q.last_tenant = number
  s.touched[INTAKE] = true
end

-- Add an entry to the intake of its tier queue.
local function take_in(s, intake, entry, payload)
  local q, tier, queue_due, tenant = s.q, entry.tier, entry.queue_due, entry.tenant
  local headers, count = intake.headers, #intake.headers
  headers[count + 1], headers[count + 2] = entry.key, new_header(s, entry)
  if payload then
    local payloads = intake.payloads
    count = #payloads
    payloads[count + 1], payloads[count + 2] = entry.key, payload
  end
  local member = member_of(entry)
  local bytes = payload and (entry.token and large.length(s, entry, payload) or #payload) or bytes_of(s, member)
  local cost = (s.weighed or bytes > PAGE) and cost_of(s, entry.weight, bytes) or 1
  local round = round_of(s, intake, tier, tenant, cost)
  if tenant ~= intake.tenant then note_tenant(s, intake, tenant) end
  local into = intake.tiers[tier]
  local tier_queue, line = into.tier_queue, into.line
  count = #tier_queue
  tier_queue[count + 1], tier_queue[count + 2] = round, member
  if round == q.next[tier] then into.joined = into.joined + 1 end
  if intake.stamped ~= queue_due then
    intake.stamped, intake.stamp = queue_due, struct.pack(STAMP, s.now, queue_due)
  end
  line[#line + 1] = intake.stamp .. member
  if queue_due < q.last_due[tier] then
    local odd = intake.odd
    odd[#odd + 1], odd[#odd + 2] = queue_due, member
  else
    q.last_due[tier] = queue_due
  end
  q.depth[tier] = q.depth[tier] + 1
  q.weight[tier] = q.weight[tier] + counted_weight(s, entry.weight)
  s.touched[TIERS + tier] = true
  q.fresh = q.fresh + 1
  q.newest = s.now
  q.oldest, q.due = math.min(q.oldest, s.now), math.min(q.due, queue_due)
end

local write_down
do
-- Count each tenant's entries in the intake.
local function let_in(intake)
  local counts = intake.waiting
  for _, into in pairs(intake.tiers) do
    for i = into.tallied + 1, #into.line do
      local tenant = tenant_of(key_of(into.tier_queue[2 * i]))
      counts[tenant] = (counts[tenant] or 0) + 1
    end
    into.tallied = #into.line
  end
  return counts
end

-- Number of a tenant's entries in the tier queues and the intake.
function held_by(s, intake, tenant)
  if s.q.counted == 0 then count_tenants(s) end
  return math.max(tonumber(redis.call('HGET', s.prefix .. 'tw', tenant) or 0), 0) + (let_in(intake)[tenant] or 0)
end

function write_down(s, intake)
  local p, q = s.prefix, s.q
  if q.counted > 0 then
    for tenant, count in pairs(let_in(intake)) do redis.call('HINCRBY', p .. 'tw', tenant, count) end
    if s.counts_anew then lasting(s, 'tw') end
  end
  call_all('HSET', p .. 'e', intake.headers)
  call_all('HSET', p .. 'p', intake.payloads)
  if q.fresh <= #intake.headers / 2 then lasting(s, 'e', 'p') end  -- Nothing else is waiting in the tier queues.
  if #intake.odd > 0 then
    call_all('ZADD', p .. 'd', intake.odd)
    if q.odd == 0 then lasting(s, 'd') end
    q.odd = q.odd + #intake.odd / 2
  end
  for tier, into in pairs(intake.tiers) do
    if #into.line > 0 then
      call_all('ZADD', p .. 'l' .. tier, into.tier_queue)
      call_all('RPUSH', p .. 'a' .. tier, into.line)
      local rounds = {}
      for tenant, round in pairs(into.latest) do rounds[#rounds + 1], rounds[#rounds + 2] = round, tenant end
      call_all('ZADD', p .. 't' .. tier, rounds)
      if q.depth[tier] == #into.line then lasting(s, 'l' .. tier, 'a' .. tier, 't' .. tier) end
    end
  end
end
end

local function caller_apart(s, key, payload)
  local caller = culprits.caller_in(key, payload)
  return culprits.ride_apart(s, caller) and caller or nil
end

-- Add an entry to the quarantine of its caller.
local function wait_apart(s, entry, caller)
  entry.member = member_of(entry)
  suspects.join(s, caller, {entry}, {ready_at = s.now + batch_seconds(s.q, 1), failures = 0, attempts = 0})
end

-- Judge a new entry like `refuse`, for its tier queue or, if `apart` is set, for the quarantine of that caller.
local function admissible(s, intake, entry, queue_timeout, timeout, apart)
  if not apart then return refuse(s, intake, entry, queue_timeout, timeout) end
  local q, quarantine = s.q, suspects.quarantine(s, apart)
  local count, size = entry.count or 1, size_of(s, 1, counted_weight(s, entry.weight))
  local waiting = math.max(count - 1, 0) * size
  if quarantine then
    waiting = waiting + size_of(s, #quarantine.members, weight_of_all(s, quarantine.members))
  end
  local callers, beside = suspects.callers(s, apart)
  local tenants = tenants_in_lanes(s, intake)
  local bound = QUARANTINE_BATCHES * q.max_batch * q.known_slots
  if tenants + beside == 0 then
    bound = math.max(bound, math.min(math.floor(s.max_queue * GREED / (GREED + 1)), QUARANTINE_ALONE) * size)
  end
  local load = SEARCH_LOAD * (callers + tenants) / callers
  local wait = judge(s, math.floor(load * waiting), entry.tier, queue_timeout, timeout)
  if not wait and waiting < bound then return nil end
  local in_time = most_of(q, SEARCH_LOAD * size, queue_timeout, timeout)
  local most = math.max(math.floor(math.min(bound / size, in_time)), 1)
  if count > most then return in_time > 0 and most or -most, TOO_MANY_APART end
  local pace = pace_of(q, entry.tier)
  return pace > 0 and math.max(wait or 0, load * (waiting - bound + 1) / pace, MIN_WAIT) or UNKNOWN_WAIT, APART
end

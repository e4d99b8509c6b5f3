-- Which entries ride next. See `core.fair_queue`. A tier queue serves its tenants in rounds, with one entry of each tenant per round.
--
-- It also has a line: a list of all members in order, each with its arrival and queue deadline. Members that have left are removed when
-- they reach the head. Deadlines are mostly in order, because most requests use the configured timeout. Only a member that is due sooner
-- than one ahead of it also needs a place in the sorted set of odd members.

local STAMP, STAMP_BYTES = '>dd', 16
local FIRST_WINDOW, WINDOW = 4, 64  -- Usually only the first one is needed.

-- Number of rounds that an entry costs its tenant, depending on its weight and the bytes of its payload.
local function cost_of(s, weight, bytes)
  local cost = 1
  if s.longest > 0 then
    cost = math.min((s.fixed + weight) / (s.fixed + s.longest), LOOKED_AT)
  elseif s.weighed then
    cost = math.min(math.max(weight / s.round_weight, s.least_cost), LOOKED_AT)
  end
  return bytes <= PAGE and cost or math.max(cost, math.ceil(bytes / PAGE))
end

-- Payload bytes of a waiting entry. It may be stored under its member.
local function bytes_of(s, member)
  local name = key_of(member)
  local bytes = redis.call('HSTRLEN', s.prefix .. 'p', name)
  if bytes == 0 then
    name = member
    bytes = redis.call('HSTRLEN', s.prefix .. 'p', name)
  end
  return bytes + (large.apart_of(s, name) or 0)
end

local function waiting_weight(s)
  local sum = 0
  for tier = 1, s.tiers do sum = sum + s.q.weight[tier] end
  return sum
end

local function start_afresh(s, tier)
  redis.call('DEL', s.prefix .. 't' .. tier, s.prefix .. 'a' .. tier)
  s.q.last_due[tier] = -INF
  s.q.weight[tier] = 0
  s.touched[TIERS + tier] = true
end

local function is_waiting(s, tier, member) return redis.call('ZSCORE', s.prefix .. 'l' .. tier, member) end

-- Walk along a tier queue's line from its head. Call `visit` with the arrival, deadline and member of each entry that is still waiting, until
-- it returns false. Members that have left, or that `visit` accepts, are dropped from the line. `gone` are members known to have left.
local function walk(s, tier, gone, visit)
  local key, done, window = s.prefix .. 'a' .. tier, 0, FIRST_WINDOW
  while true do
    local part = redis.call('LRANGE', key, done, done + window - 1)
    for _, element in ipairs(part) do
      local member = string.sub(element, STAMP_BYTES + 1)
      if not (gone and gone[member]) and is_waiting(s, tier, member) then
        local arrived, due = struct.unpack(STAMP, element)
        if not visit(arrived, due, member) then
          if done > 0 then redis.call('LTRIM', key, done, -1) end
          return
        end
      end
      done = done + 1
    end
    if #part < window then
      redis.call('DEL', key)
      return
    end
    window = math.min(2 * window, WINDOW)
  end
end

-- Arrival and deadline of the entry that has been waiting longest.
local function head_of(s, tier, gone)
  local arrived, due = INF, INF
  walk(s, tier, gone, function(since, by)
    arrived, due = since, by
    return false
  end)
  return arrived, due
end

local function look_again(s, gone)
  local q = s.q
  q.oldest, q.due = INF, INF
  if q.fresh == 0 then
    if q.odd > 0 then
      redis.call('DEL', s.prefix .. 'd')
      q.odd = 0
    end
    return
  end
  for tier = 1, s.tiers do
    if q.depth[tier] > 0 then
      local arrived, due = head_of(s, tier, gone)
      q.oldest, q.due = math.min(q.oldest, arrived), math.min(q.due, due)
    end
  end
  if q.odd > 0 then
    local first = redis.call('ZRANGE', s.prefix .. 'd', 0, 0, 'WITHSCORES')
    q.due = math.min(q.due, tonumber(first[2] or INF))
  end
end

-- Stop counting each tenant's entries. `held_by` starts counting when the queue fills up.
local function stop_counting(s)
  if s.q.counted > 0 then
    redis.call('DEL', s.prefix .. 'tw')
    s.q.counted = 0
    s.touched[SELDOM] = true
  end
end

-- If the tier queues have fewer entries than the figures say, because state was lost, correct the figures.
local function recount(s)
  local q = s.q
  stop_counting(s)
  q.fresh = 0
  for tier = 1, s.tiers do
    q.depth[tier] = redis.call('ZCARD', s.prefix .. 'l' .. tier)
    q.weight[tier] = weight_of_all(s, redis.call('ZRANGE', s.prefix .. 'l' .. tier, 0, -1))
    q.fresh = q.fresh + q.depth[tier]
    s.touched[TIERS + tier] = true
  end
end

local function no_longer_odd(s, members)
  if s.q.odd > 0 and #members > 0 then
    call_all('ZREM', s.prefix .. 'd', members)
    s.q.odd = redis.call('ZCARD', s.prefix .. 'd')
  end
end

-- Record that members with this total weight left a tier queue. Returns false if it is now empty.
local function leave_lane(s, tier, members, weight)
  local q, key, counts = s.q, s.prefix .. 'tw', {}
  no_longer_odd(s, members)
  q.depth[tier], q.weight[tier] = q.depth[tier] - #members, q.weight[tier] - weight
  s.touched[TIERS + tier] = true
  q.fresh = q.fresh - #members
  if q.fresh <= COUNTED_FROM * s.max_queue then stop_counting(s) end
  if q.counted > 0 then
    for _, member in ipairs(members) do
      local tenant = tenant_of(key_of(member))
      counts[tenant] = (counts[tenant] or 0) + 1
    end
    for tenant, count in pairs(counts) do
      if redis.call('HINCRBY', key, tenant, -count) <= 0 then redis.call('HDEL', key, tenant) end
    end
  end
  if q.depth[tier] == 0 then start_afresh(s, tier) end
  return q.depth[tier] > 0
end

-- Refund the tenants of members that left a tier queue out of turn.
local function give_places_back(s, tier, members)
  local key, least, latest_of = s.prefix .. 't' .. tier, s.q.next[tier] - 1, {}
  for _, member in ipairs(members) do
    local tenant = tenant_of(key_of(member))
    local latest = latest_of[tenant] or tonumber(redis.call('ZSCORE', key, tenant) or 0)
    if latest > least then
      latest_of[tenant] = latest - cost_of(s, tonumber(string.sub(member, WEIGHT_AT, DIGITS), 16), bytes_of(s, member))
    end
  end
  for tenant, latest in pairs(latest_of) do redis.call('ZADD', key, latest, tenant) end
end

-- Remove an entry from its tier queue and refund its tenant. Returns false if it wasn't there.
local function drop_from_lane(s, entry)
  local tier = entry.tier
  if redis.call('ZREM', s.prefix .. 'l' .. tier, entry.member) == 0 then return false end
  if leave_lane(s, tier, {entry.member}, counted_weight(s, entry.weight)) then
    give_places_back(s, tier, {entry.member})
  end
  return true
end

-- Record that members were popped. The last one popped in turn was in this round. Returns false if the tier queue is now empty.
local function leave_for_batch(s, tier, members, round, into, gone)
  local q, before = s.q, #into
  for i = 1, #members do
    local member = members[i]
    into[before + i], gone[member] = member, true
  end
  if #members > 0 then q.next[tier] = math.max(q.next[tier], round + 1) end
  local others = leave_lane(s, tier, members, s.weighed and weight_of_all(s, members) or #members)
  if others and redis.call('ZCARD', s.prefix .. 't' .. tier) > q.depth[tier] + FORGET_ABOVE then
    redis.call('ZREMRANGEBYSCORE', s.prefix .. 't' .. tier, '-inf', q.next[tier] - 1)
  end
  return others
end

local fewest = {}

-- Pop more members until there are LOOK_AHEAD, and put first the one that `core.fair_queue.TierQueue.pop_of_fewest` would take. `popped`
-- alternates between members and rounds. Returns true if the first member is out of turn.
function fewest.put_first(s, tier_queue, popped, limit, weight)
  for _, part in ipairs(redis.call('ZPOPMIN', tier_queue, LOOK_AHEAD - #popped / 2)) do
    popped[#popped + 1] = part
  end
  local counts, weights, batches, first = {}, {}, {}, 1
  for i = 1, #popped, 2 do
    local tenant, shape = tenant_of(key_of(popped[i])), shape_of(popped[i])
    counts[tenant], weights[tenant] = counts[tenant] or {}, weights[tenant] or {}
    counts[tenant][shape] = (counts[tenant][shape] or 0) + 1
    weights[tenant][shape] = (weights[tenant][shape] or 0) + weight_of(s, popped[i])
  end
  for tenant, shapes in pairs(counts) do
    batches[tenant] = 0
    for shape, count in pairs(shapes) do
      batches[tenant] = batches[tenant] + math.ceil(math.max(count / limit, weights[tenant][shape] / weight))
    end
  end
  local least = INF
  for i = 1, #popped, 2 do
    local own = batches[tenant_of(key_of(popped[i]))]
    if own < least then first, least = i, own end
  end
  local member, round = popped[first], popped[first + 1]
  table.remove(popped, first)
  table.remove(popped, first)
  table.insert(popped, 1, round)
  table.insert(popped, 1, member)
  return first > 1
end

-- True if a batch with these popped members begins with the tenant that has the fewest batches. See `core.packing.Terms.fewest`.
function fewest.begins(s, popped)
  return s.weighed and s.q.departures % 2 == 1 and popped[1] and string.find(shape_of(popped[1]), '[^0]')
end

-- See `core.packing.reserved_places`.
local function reserved_places(s, count)
  return s.share > 0 and count >= 2 and math.max(1, math.floor(count * s.share)) or 0
end

-- If more is waiting than fits, reserve the last places of a batch for tiers below the highest one that is waiting. Returns how many.
local function keep_places(s, room, waiting, owed)
  local q, depth, weight = s.q, 0, 0
  for _, tier in ipairs(waiting) do depth, weight = depth + q.depth[tier], weight + q.weight[tier] end
  if #waiting < 2 or not (owed > 0 or depth > room.count or weight > room.weight) then return 0 end
  local places = reserved_places(s, room.count)
  if s.max_weight > 0 then
    room.promised = math.min(places * s.unit + owed, room.weight)
    room.kept = room.promised >= room.weight and INF or math.min(room.promised, weight - q.weight[waiting[1]])
  end
  return math.min(places, depth - q.depth[waiting[1]])
end

local pop_in_turns
do
-- Return true if the next member rides, and false to pass over a member of another shape. Returns nil if it doesn't fit; the second result
-- is true if its size is the reason. If there are several tenants, large entries share `s.pages`, or one of them rides alone. `room` is what
-- is left in the batch. The member can only be large if `any_large` is set.
local function fits(s, member, room, any_large)
  local weight = 0
  if s.weighed then
    if room.weight <= room.kept then return nil, false end
    if not room.empty and shape_of(member) ~= s.shape then return false end
    weight = weight_of(s, member)
    if weight > room.weight - room.kept and not room.empty then return nil, true end
    s.shape = shape_of(member)
  end
  local pages = any_large and math.ceil(bytes_of(s, member) / PAGE) or 1
  if pages > 1 then
    if pages > s.most then return nil, true end
    s.pages = s.pages - pages
    s.most = math.max(s.pages, 1)
  end
  room.weight, room.empty = room.weight - weight, false
  return true
end

-- Pop up to `count` members that fit. Returns true if the next one is too large or too heavy, or if the next LOOK_AHEAD have other shapes.
local function pop(s, tier, count, into, gone, room)
  local tier_queue, any_large = s.prefix .. 'l' .. tier, s.pages < INF and s.q.rough[tier] >= s.q.next[tier]
  if not (s.weighed or any_large) then
    if count > 0 then  -- Three commands, because only the last round is needed.
      local members = redis.call('ZRANGE', tier_queue, '0', count - 1)
      local round = #members > 0 and tonumber(redis.call('ZSCORE', tier_queue, members[#members]))
      redis.call('ZREMRANGEBYRANK', tier_queue, '0', count - 1)
      leave_for_batch(s, tier, members, round, into, gone)
      room.count = room.count - #members
    end
    return false
  end
  local taken, free, back, passed, round, stopped, too_much, all = {}, {}, {}, 0, s.q.next[tier] - 1, false, false, false
  while #taken < count and not (stopped or all) do
    local asked = s.weighed and math.min(passed > 0 and WINDOW or count - #taken, WINDOW) or count
    local popped = redis.call('ZPOPMIN', tier_queue, asked)
    all = #popped < 2 * asked
    local early = false
    if room.empty and fewest.begins(s, popped) then
      early = fewest.put_first(s, tier_queue, popped, room.count, room.weight)
      all = #popped < 2 * LOOK_AHEAD
    end
    for i = 1, #popped, 2 do
      local member, rides = popped[i], nil
      if #taken < count and not stopped then
        if passed < LOOK_AHEAD then
          rides, too_much = fits(s, member, room, any_large)
        else
          too_much = true
        end
        stopped = rides == nil
      end
      if rides then
        taken[#taken + 1] = member
        if passed > 0 or (early and i == 1) then
          free[#free + 1] = member
        else
          round = tonumber(popped[i + 1])
        end
      else
        passed = rides == false and passed + 1 or passed
        back[#back + 1], back[#back + 2] = popped[i + 1], member
      end
    end
  end
  if #back > 0 then
    call_all('ZADD', tier_queue, back)
    lasting(s, 'l' .. tier)  -- All may have been popped.
  end
  if leave_for_batch(s, tier, taken, round, into, gone) and #free > 0 then give_places_back(s, tier, free) end
  room.count = room.count - #taken
  if stopped then return too_much end
  return passed > 0 and #taken < count
end

-- Pop as many members as fit. Tiers go in order. But if more is waiting than fits, the last places go to tiers below the highest one that is
-- waiting, with the longest wait first. Adds members to `gone`. Stops when the next member of a tier doesn't fit, and marks that tier in
-- `closed`. Returns the members and that tier.
function pop_in_turns(s, room, owed, gone, closed)
  local q, waiting, taken = s.q, {}, {}
  for tier = 1, s.tiers do
    if q.depth[tier] > 0 and not closed[tier] then waiting[#waiting + 1] = tier end
  end
  local kept = keep_places(s, room, waiting, owed)
  for _, tier in ipairs(waiting) do
    if pop(s, tier, math.min(room.count - kept, q.depth[tier]), taken, gone, room) then
      closed[tier] = true
      return taken, tier
    end
  end
  room.kept = 0
  local arrived = {}
  while room.count > 0 and room.weight > 0 do
    local longest, chosen = INF, nil
    for position = 2, #waiting do
      local tier = waiting[position]
      if q.depth[tier] > 0 then
        arrived[tier] = arrived[tier] or head_of(s, tier, gone)
        if arrived[tier] < longest then longest, chosen = arrived[tier], tier end
      end
    end
    if not chosen then break end
    arrived[chosen] = nil
    if pop(s, chosen, 1, taken, gone, room) then
      closed[chosen] = true
      return taken, chosen
    end
  end
  return taken, nil
end
end

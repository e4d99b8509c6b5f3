-- Who rides: as `core.fair_queue`. A tier queue serves its tenants in rounds, one entry of each in a round.

--
-- Beside its rounds a tier queue has a line: all that came, in order, each with its arrival and its queue deadline. What has left
-- is taken out of it only when it comes to the head. Deadlines come almost in order, too, as most requests use the
-- configured timeout; only what is due sooner than the one before it pays for a place in the sorted set of the odd.

local STAMP = '>dd'
local STAMP_BYTES = 16
local FIRST_WINDOW, WINDOW = 4, 64  -- Mostly the first is wanted alone.

-- Rounds that an entry costs its tenant, by the bytes of its payload.
local function cost_of(bytes)
  return bytes <= PAGE and 1 or math.ceil(bytes / PAGE)
end

-- The same of an entry that waits; one that nobody waits for any more itself has its payload under its member.
local function cost_of_member(s, member)
  local bytes = redis.call('HSTRLEN', s.prefix .. 'p', key_of(member))
  return cost_of(bytes > 0 and bytes or redis.call('HSTRLEN', s.prefix .. 'p', member))
end

local function start_afresh(s, tier)
  redis.call('DEL', s.prefix .. 't' .. tier, s.prefix .. 'a' .. tier)
  s.q.last_due[tier] = -INF
end

local function is_waiting(s, tier, member)
  return redis.call('ZSCORE', s.prefix .. 'l' .. tier, member)
end

-- Go along a tier queue's line from its head. `visit` is called with the arrival, the deadline and the member of each that still
-- waits, until it returns false; what has left is dropped on the way, and so is what `visit` takes. `gone` has members that
-- are known to have left.
local function walk(s, tier, gone, visit)
  local key, done, window = s.prefix .. 'a' .. tier, 0, FIRST_WINDOW
  while true do
    local part = redis.call('LRANGE', key, done, done + window - 1)
    for _, element in ipairs(part) do
      local member = string.sub(element, STAMP_BYTES + 1)
      if not (gone and gone[member]) and is_waiting(s, tier, member) then
        local arrived, due = struct.unpack(STAMP, element)
        if not visit(arrived, due, member) then
          if done > 0 then
            redis.call('LTRIM', key, done, -1)
          end
          return
        end
      end
      done = done + 1
    end
    if #part < window then
      redis.call('DEL', key)
      return
    end
    window = WINDOW
  end
end

-- Arrival and deadline of the one that has waited longest in a tier queue.
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

-- The entries of each tenant in the tier queues are counted from the moment on at which somebody has to know, until there are few
-- again: see `held_by`.
local function stop_counting(s)
  if s.q.counted > 0 then
    redis.call('DEL', s.prefix .. 'tw')
    s.q.counted = 0
  end
end

-- The tier queues hold less than the figures say: part of the state was lost. Believe the tier queues.
local function recount(s)
  local q = s.q
  stop_counting(s)
  q.fresh = 0
  for tier = 1, s.tiers do
    q.depth[tier] = redis.call('ZCARD', s.prefix .. 'l' .. tier)
    q.fresh = q.fresh + q.depth[tier]
  end
end

local function no_longer_odd(s, members)
  if s.q.odd > 0 and #members > 0 then
    call_all('ZREM', s.prefix .. 'd', members)
    s.q.odd = redis.call('ZCARD', s.prefix .. 'd')
  end
end

-- These members wait in the tier queues no more.
local function leave_lanes(s, members)
  local q, key, counts = s.q, s.prefix .. 'tw', {}
  q.fresh = q.fresh - #members
  if q.fresh <= COUNTED_FROM * s.max_queue then
    stop_counting(s)
  end
  if q.counted == 0 then
    return
  end
  for _, member in ipairs(members) do
    local tenant = tenant_of(key_of(member))
    counts[tenant] = (counts[tenant] or 0) + 1
  end
  for tenant, count in pairs(counts) do
    if redis.call('HINCRBY', key, tenant, -count) <= 0 then
      redis.call('HDEL', key, tenant)
    end
  end
end

-- Take an entry out of its tier queue; its tenant gets the place back. False when it was not there.
local function drop_from_lane(s, entry)
  local q, tier = s.q, entry.tier
  if redis.call('ZREM', s.prefix .. 'l' .. tier, entry.member) == 0 then
    return false
  end
  no_longer_odd(s, {entry.member})
  q.depth[tier] = q.depth[tier] - 1
  leave_lanes(s, {entry.member})
  if q.depth[tier] == 0 then
    start_afresh(s, tier)
  else
    local tenant = tenant_of(key_of(entry.member))
    local latest = tonumber(redis.call('ZSCORE', s.prefix .. 't' .. tier, tenant) or 0)
    if latest >= q.next[tier] then
      redis.call('ZADD', s.prefix .. 't' .. tier, latest - cost_of_member(s, entry.member), tenant)
    end
  end
  return true
end

-- How many of these fit into a batch where several tenants ask: its large ones have `s.pages` together, or are a single one.
local function fitting(s, popped)
  for i = 1, #popped, 2 do
    local cost = cost_of_member(s, popped[i])
    if cost > 1 then
      if cost > s.most then
        return i - 1
      end
      s.pages = s.pages - cost
      s.most = math.max(s.pages, 1)
    end
  end
  return #popped
end

-- True when all were taken; false when the next one does not fit.
local function pop(s, tier, count, into, gone)
  local q = s.q
  local popped = redis.call('ZPOPMIN', s.prefix .. 'l' .. tier, count)
  local members, fit = {}, #popped
  if s.pages < INF then
    fit = fitting(s, popped)
    for i = fit + 1, #popped, 2 do
      redis.call('ZADD', s.prefix .. 'l' .. tier, popped[i + 1], popped[i])
    end
  end
  for i = 1, fit, 2 do
    local member = popped[i]
    members[#members + 1] = member
    into[#into + 1] = member
    gone[member] = true
    q.next[tier] = math.max(q.next[tier], tonumber(popped[i + 1]) + 1)
  end
  no_longer_odd(s, members)
  q.depth[tier] = q.depth[tier] - #members
  leave_lanes(s, members)
  if q.depth[tier] == 0 then
    start_afresh(s, tier)
  elseif redis.call('ZCARD', s.prefix .. 't' .. tier) > q.depth[tier] + FORGET_ABOVE then
    redis.call('ZREMRANGEBYSCORE', s.prefix .. 't' .. tier, '-inf', '(' .. q.next[tier])
  end
  return fit == #popped
end

-- Pop as many members as there is room for: tiers in order, but when more waits than fits, the last places are kept
-- for the tiers below the highest that waits, the longest wait first. Notes in `gone` who has left. Ends at once when the next
-- of a tier does not fit: that is `closed` from then on. Returns who was popped, and whether it ended so.
local function pop_in_turns(s, room, gone, closed)
  local q, waiting, total, taken = s.q, {}, 0, {}
  for tier = 1, s.tiers do
    if q.depth[tier] > 0 and not closed[tier] then
      waiting[#waiting + 1] = tier
      total = total + q.depth[tier]
    end
  end
  local kept = 0
  if total > room and s.share > 0 and room >= 2 then
    local lower = total - q.depth[waiting[1]]
    kept = math.min(math.max(1, math.floor(room * s.share)), lower)
  end
  local left = room - kept
  for _, tier in ipairs(waiting) do
    local count = math.min(left, q.depth[tier])
    if count > 0 then
      if not pop(s, tier, count, taken, gone) then
        closed[tier] = true
        return taken, true
      end
      left = left - count
    end
  end
  local arrived = {}
  for _ = 1, kept + left do
    local longest, chosen = INF, nil
    for position = 2, #waiting do
      local tier = waiting[position]
      if q.depth[tier] > 0 then
        arrived[tier] = arrived[tier] or head_of(s, tier, gone)
        if arrived[tier] < longest then
          longest, chosen = arrived[tier], tier
        end
      end
    end
    if not chosen then
      break
    end
    arrived[chosen] = nil
    if not pop(s, chosen, 1, taken, gone) then
      closed[chosen] = true
      return taken, true
    end
  end
  return taken, false
end

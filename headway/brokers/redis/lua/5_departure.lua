-- When a batch leaves for a slot, by the rule of the last claim. See `core.departure.decide`.
local decide
do
-- See `core.departure._spaced`.
local function spaced_from(q, factor, helps)
  if helps then return q.last_departure + q.batch * factor end
  local part = q.team > 0 and math.max(q.team + 1 - factor * q.speed, 0) or 1
  local gathered = math.min(q.oldest + q.gather * part, q.newest + q.quiet)
  return math.max(q.last_departure + (q.headway + q.gap_each * q.running) * part, gathered)
end

-- Size of the batch that leaves from a queue of this depth. See `core.departure.Rule.share`.
local function share_of(q, depth)
  local everything = depth + q.busy * q.running
  if q.split == 0 or depth * q.slots <= (q.team > 0 and OVER_UNLIKE or OVER_ALIKE) * everything then
    return depth
  end
  local batches = math.max(math.floor(math.sqrt(q.split * depth + 0.25) + 0.5), 1)
  return math.min(depth, math.ceil(math.max(depth / batches, everything / q.slots)))
end

-- See `core.departure._each_has_its_own`.
local function each_has_its_own(q, factor, depth)
  local together = depth + q.busy
  local fits = q.slots >= LONE_FROM and q.slots - 1 <= together and together <= q.slots
  if not fits or q.rate * q.headway > LONE_ARRIVALS then return false end
  return q.running > 0 and q.running <= 1 and factor <= LONE_FACTOR
end

-- If a batch should leave now, return the reason and its maximum size, otherwise nil and the time to check again.
function decide(s, slot)
  local q, now = s.q, s.now
  if q.fresh == 0 then return nil, INF end
  local factor, unseen = standing_of(s, slot)
  local helps = factor > q.slowest
  if helps and unseen >= MEASURE_AFTER then return HEADWAY_REASON, INF end
  local enough = q.size * (helps and HELPED_FROM or 1)
  local depth = size_of(s, q.fresh, waiting_weight(s))
  local share = share_of(q, depth)
  local full_from = share >= enough and q.schedule - q.tolerance or INF
  if now >= full_from then return FULL_REASON, INF end
  local leave_by = q.due - q.service - LEEWAY
  if now >= leave_by then return DEADLINE_REASON, INF end
  local window_ends = q.oldest + q.window
  if now >= window_ends then return WINDOW_REASON, INF end
  local again = math.min(leave_by, window_ends, full_from)
  if q.headway >= 0 then
    if q.headway == 0 and not helps then return EARLY_REASON, INF end
    if each_has_its_own(q, factor, depth) then return EARLY_REASON, INF end
    local spaced = spaced_from(q, factor, helps)
    if now >= spaced then return HEADWAY_REASON, share < depth and share or INF end
    again = math.min(again, spaced)
  elseif q.rate * (again - now) < 1 then
    return EARLY_REASON, INF
  end
  return nil, again
end
end

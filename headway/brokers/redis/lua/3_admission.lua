-- Admission. See `core.admission` and `ModelQueue.offer`.
local function gate(s)
  local q, now = s.q, s.now
  if now - q.gate_at > GATE_AGE then
    local full = batch_seconds(q, q.max_batch)
    local drain = full > 0 and q.known_slots * q.max_batch / full or 0
    local above = 0
    for tier = 1, s.tiers do
      q.drain[tier] = math.max(drain - above, drain * s.share)
      above = above + rate_after_rest(s, tier) * size_of(s, 1, q.mean[tier])
    end
    q.batch_seconds = full + q.deviation
    q.spread = full > 0 and (WAIT_DEVIATIONS * q.deviation) ^ 2 / (full * q.known_slots) or 0
    q.gate_at = now
  end
end

local function allowed(q, tier, queue_timeout, timeout)
  local wait, drain = math.min(queue_timeout, timeout - q.batch_seconds), q.drain[tier]
  local margin, square = math.max(MARGIN_SHARE * (wait + q.batch_seconds), MIN_MARGIN), q.spread * wait
  local most = drain * (wait - margin)
  if square <= margin * margin then return most end
  return math.max(drain * (wait - math.sqrt(square)), math.min(most, q.max_batch))
end

local function pace_of(q, tier) return math.max(q.drain[tier], q.drain[1] * LEAST_SHARE) end

-- Maximum number of entries of this size that an otherwise idle queue can answer in time.
local function most_of(q, size, queue_timeout, timeout)
  return q.batch_seconds <= 0 and INF or math.ceil(allowed(q, 1, queue_timeout, timeout) / size)
end

-- Judge an entry that has `ahead` entries ahead of it. Returns nil if it may wait, otherwise the seconds until it would be admitted, and
-- the reason.
local function judge(s, ahead, tier, queue_timeout, timeout)
  local q = s.q
  gate(s)
  local most = allowed(q, tier, queue_timeout, timeout)
  if ahead == 0 or q.batch_seconds <= 0 or ahead < most then return nil end
  local first = size_of(s, q.depth[1], q.weight[1])
  return math.max((ahead - math.max(most, 0)) / pace_of(q, tier), MIN_WAIT),
    (tier > 1 and (first == 0 or first < allowed(q, 1, queue_timeout, timeout))) and SHED or TOO_LONG
end

local held_by, served_before, stretch_of  -- Defined in 7_intake.lua.

-- Cached `allowed`, because most entries of a step have the same timeouts.
local function allowed_in_step(s, intake, tier, queue_timeout, timeout)
  if intake.tier ~= tier or intake.queue_timeout ~= queue_timeout or intake.timeout ~= timeout then
    intake.tier, intake.queue_timeout, intake.timeout = tier, queue_timeout, timeout
    intake.most = allowed(s.q, tier, queue_timeout, timeout)
  end
  return intake.most
end

-- Return true if there is no place left, or if the tenant would hold more than GREED times as many places as are left.
local function has_its_share(s, intake, tenant)
  local left = s.max_queue - s.q.fresh - 1
  if left < 0 then return true end
  local count = held_by(s, intake, tenant)
  return count > 0 and count + 1 > GREED * left
end

-- Return nil to admit an entry, otherwise the seconds until it would be admitted, and the reason as a `RefusalCode`.
local function refuse(s, intake, entry, queue_timeout, timeout)
  local q, tier = s.q, entry.tier
  if q.fresh >= math.floor(s.max_queue * GREED / (GREED + 1)) and has_its_share(s, intake, entry.tenant) then
    gate(s)
    local pace = pace_of(q, tier)
    return pace > 0 and math.max(1 / pace, MIN_WAIT) or UNKNOWN_WAIT, TOO_LONG
  end
  local over = 0
  if tier > 1 and s.shed_last >= 0 then
    over = q.fresh + 1 - (tier == s.tiers and s.shed_last or s.shed_rest)
  end
  if over > 0 then
    gate(s)
    local pace = pace_of(q, 1)
    return pace > 0 and math.max(over / pace, MIN_WAIT) or UNKNOWN_WAIT, SHED
  end
  local ahead, weight, depth = 0, 0, q.depth[tier]
  for above = 1, tier do
    ahead = ahead + q.depth[above]
    weight = weight + q.weight[above]
  end
  if ahead == 0 and (entry.count or 1) == 1 then return nil end
  ahead = size_of(s, ahead, weight)
  local others = (entry.count or 1) - 1
  if others > 0 then  -- Judge the last of the entries that are admitted with it.
    ahead = ahead + others * size_of(s, 1, counted_weight(s, entry.weight))
  end
  gate(s)
  if q.batch_seconds <= 0 then return nil end
  local bound, stretch = allowed_in_step(s, intake, tier, queue_timeout, timeout), 1
  if entry.shape > 0 and ahead * s.max_batch >= bound and depth > 0 then
    stretch = stretch_of(s, intake, entry)
    ahead = ahead + (stretch - 1) * size_of(s, depth, q.weight[tier])
  end
  if ahead < bound then return nil end
  local size = size_of(s, 1, counted_weight(s, entry.weight))
  if ahead + size <= (q.known_slots - q.busy) * s.max_batch then
    return nil  -- It fits into the next batches of free GPUs.
  end
  local after = depth - served_before(s, intake, entry)
  if after > 0 then ahead = ahead - stretch * size_of(s, after, q.weight[tier] / depth * after) end
  local wait, why = judge(s, ahead, tier, queue_timeout, timeout)
  if wait and others > 0 then
    local batch = s.max_batch / size  -- A last batch that isn't full takes just as long.
    local in_time = most_of(q, size, queue_timeout, timeout)
    local whole = math.max(math.floor(in_time / batch), q.known_slots) * batch
    local most = math.max(math.floor(whole), 1)
    if others + 1 > most then return in_time > 0 and most or -most, TOO_MANY end
  end
  return wait, why
end

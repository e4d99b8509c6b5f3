-- When a batch leaves: as `core.departure.decide` with the rule of the last claim.

-- Size of the batch that leaves of `depth`: as `core.departure.Rule.share`, among the GPUs of `core.running`.
local function share_of(q, depth)
  local idle = q.slots - q.busy
  if q.split == 0 or idle < 2 or 2 * idle <= q.slots then
    return depth
  end
  local batches = math.min(idle, math.floor(math.sqrt(q.split * depth + 0.25) + 0.5))
  return batches > 1 and math.ceil(depth / batches) or depth
end

-- Reason for which a batch leaves now and the most that it holds, or nil and the instant to look again.
local function decide(s)
  local q, now = s.q, s.now
  if q.fresh == 0 then
    return nil, INF
  end
  local depth = size_of(s, q.fresh, waiting_weight(s))
  local share = share_of(q, depth)
  local full_from = share >= q.size and q.schedule - q.tolerance or INF
  if now >= full_from then
    return FULL_REASON, INF
  end
  local leave_by = q.due - q.service - LEEWAY
  if now >= leave_by then
    return DEADLINE_REASON, INF
  end
  local window_ends = q.oldest + q.window
  if now >= window_ends then
    return WINDOW_REASON, INF
  end
  local again = math.min(leave_by, window_ends, full_from)
  if q.headway >= 0 then
    if q.headway == 0 then
      return EARLY_REASON, INF
    end
    local gathered = math.min(q.oldest + q.gather, q.newest + q.quiet)
    local gap = q.running > 0 and math.max(q.headway, q.gap_fixed + q.gap_each * q.running) or q.headway
    local spaced = math.max(q.last_departure + gap, gathered)
    if now >= spaced then
      return HEADWAY_REASON, share < depth and share or INF
    end
    again = math.min(again, spaced)
  elseif q.rate * (again - now) < 1 then
    return EARLY_REASON, INF
  end
  return nil, again
end

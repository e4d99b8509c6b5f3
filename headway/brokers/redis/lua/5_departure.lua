-- When a batch leaves: as `core.departure.decide` with the rule of the last claim.

local function decide(s)
  local q, now = s.q, s.now
  if q.fresh == 0 then
    return nil, INF
  end
  local full_from = size_of(s, q.fresh, waiting_weight(s)) >= q.size and q.schedule - q.tolerance or INF
  if now >= full_from then
    return FULL_REASON
  end
  local leave_by = q.due - q.service - LEEWAY
  if now >= leave_by then
    return DEADLINE_REASON
  end
  local window_ends = q.oldest + q.window
  if now >= window_ends then
    return WINDOW_REASON
  end
  local again = math.min(leave_by, window_ends, full_from)
  if q.headway >= 0 then
    if q.headway == 0 then
      return EARLY_REASON
    end
    local gathered = math.min(q.oldest + q.gather, q.newest + q.quiet)
    local gap = q.running > 0 and math.max(q.headway, q.gap_fixed + q.gap_each * q.running) or q.headway
    local spaced = math.max(q.last_departure + gap, gathered)
    if now >= spaced then
      return HEADWAY_REASON
    end
    again = math.min(again, spaced)
  elseif q.rate * (again - now) < 1 then
    return EARLY_REASON
  end
  return nil, again
end

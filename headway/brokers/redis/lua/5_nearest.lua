-- If the model pads its inputs, entries of similar weight ride together. See `core.packing.pack_nearest`.
local nearest = {}
do
-- Sort candidates by distance in weight from the batch's first entry, then by turn.
function nearest.sort(entries)
  table.sort(entries, function(candidate, other)
    return candidate.distance < other.distance or (candidate.distance == other.distance and candidate.turn < other.turn)
  end)
end

-- Maximum weight of light entries, if light and heavy entries should ride separately. Nil if that would save little time. See
-- `core.packing._bound_of_light`.
local function bound_of_light(s)
  local weights, spared, bound = {}, 0, nil
  for tier = 1, s.tiers do
    for _, member in ipairs(s.q.depth[tier] > 0 and redis.call('ZRANGE', s.prefix .. 'l' .. tier, 0, -1) or {}) do
      weights[#weights + 1] = weight_of(s, member)
    end
  end
  table.sort(weights)
  local count, longest, fixed = #weights, weights[#weights], s.fixed * s.max_batch
  for number, weight in ipairs(weights) do
    if number * (longest - weight) >= spared then spared, bound = number * (longest - weight), weight end
  end
  return bound and spared - fixed >= LEAST_SAVED * (fixed + count * longest) and bound or nil
end

-- A tier queue's candidates for riding with a batch's first entry, on its side of the bound. See `core.packing._Candidates`.
-- Heavier candidates are sorted separately from the others. A candidate behind an entry of another shape rides for free.
local function candidates_of(s, tier, weight, shape, most, bound)
  local lighter, heavier, passed, step = {}, {}, false, ALIKE * (s.fixed * s.max_batch / s.q.limit + weight)
  for turn, member in ipairs(redis.call('ZRANGE', s.prefix .. 'l' .. tier, 0, most - 1)) do
    if shape_of(member) == shape then
      local own = weight_of(s, member)
      if (own <= bound) == (weight <= bound) then
        local distance = math.floor(math.abs(own - weight) / step)
        local into = own > weight and distance > 0 and heavier or lighter
        into[#into + 1] = {member = member, weight = own, distance = distance, turn = turn, free = passed}
      end
    else
      passed = true
    end
  end
  nearest.sort(lighter)
  nearest.sort(heavier)
  return {[false] = lighter, [true] = heavier, at = {[false] = 1, [true] = 1}}
end

-- Subtract a member's pages from those of the batch.
local function use_pages(s, member)
  local pages = s.pages < INF and math.ceil(bytes_of(s, member) / PAGE) or 1
  if pages > 1 then
    s.pages = s.pages - pages
    s.most = math.max(s.pages, 1)
  end
end

-- Take the next candidate that has few enough pages and is light enough, or return nil if there is none.
local function next_candidate(s, line, heavier, weight, any_large)
  local list, at = line[heavier], line.at
  while at[heavier] <= #list do
    local candidate = list[at[heavier]]
    at[heavier] = at[heavier] + 1
    local pages = any_large and math.ceil(bytes_of(s, candidate.member) / PAGE) or 1
    if candidate.weight <= weight and (pages == 1 or pages <= s.most) then
      use_pages(s, candidate.member)
      return candidate
    end
  end
end

-- Pop a batch's first entry in turn: from the highest tier that is waiting or, if `by_age` is set, from the tier with the oldest entry among
-- those that would be served in order of arrival.
local function pop_first(s, limit, by_age, gone)
  local q, chosen, ahead, longest = s.q, nil, 0, INF
  for tier = 1, s.tiers do
    if q.depth[tier] > 0 and ahead < limit then
      local arrived = by_age and head_of(s, tier, gone) or 0
      if not chosen or (by_age and arrived < longest) then chosen, longest = tier, arrived end
      ahead = ahead + q.depth[tier]
    end
  end
  local tier_queue, back, early = s.prefix .. 'l' .. chosen, {}, false
  local popped = redis.call('ZPOPMIN', tier_queue)
  if not popped[1] then return nil end
  if fewest.begins(s, popped) then
    early = fewest.put_first(s, tier_queue, popped, limit, s.most_weight)
    for i = 3, #popped, 2 do back[i - 2], back[i - 1] = popped[i + 1], popped[i] end
    call_all('ZADD', tier_queue, back)
    lasting(s, 'l' .. chosen)
  end
  local round = early and q.next[chosen] - 1 or tonumber(popped[2])
  if leave_for_batch(s, chosen, {popped[1]}, round, {}, gone) and early then
    give_places_back(s, chosen, {popped[1]})
  end
  return popped[1]
end

-- Charge tenants whose candidates leave out of turn: for a place padded to `weight`, instead of for their turn. `key` has each
-- tenant's last round. Returns the last of those rounds.
function nearest.recharge(s, key, least, taken, weight)
  local latest_of, last = {}, -INF
  for _, candidate in ipairs(taken) do
    local tenant = tenant_of(key_of(candidate.member))
    local latest = latest_of[tenant] or tonumber(redis.call('ZSCORE', key, tenant) or 0)
    if latest > least then latest = latest - cost_of(s, candidate.weight, candidate.bytes or bytes_of(s, candidate.member)) end
    local cost = (s.fixed + math.max(candidate.weight, weight)) / (s.fixed + s.longest)  -- See `QueueLimits.padded_cost`.
    latest_of[tenant] = math.max(latest, least) + (candidate.free and 0 or cost)
  end
  for tenant, latest in pairs(latest_of) do
    redis.call('ZADD', key, latest, tenant)
    last = math.max(last, latest)
  end
  return last
end

local function leave_early(s, tier, taken, weight)
  local members, sum = {}, 0
  for i, candidate in ipairs(taken) do members[i], sum = candidate.member, sum + candidate.weight end
  call_all('ZREM', s.prefix .. 'l' .. tier, members)
  if not leave_lane(s, tier, members, sum) then return end
  local q = s.q
  local latest = nearest.recharge(s, s.prefix .. 't' .. tier, q.next[tier] - 1, taken, weight)
  q.rough[tier] = math.max(q.rough[tier], math.ceil(latest))
end

-- Take candidates from the `allowed` tiers for up to `room.count` places. Tiers go in order, but the last places are reserved for those below
-- the highest. Returns the taken candidates by tier, their members in order, and the tier that ran out, if there is one.
local function take_seats(s, room, allowed, line_of, heavier, gone)
  local q, waiting, left_of, taken, members = s.q, {}, {}, {}, {}
  for _, tier in ipairs(allowed) do
    if q.depth[tier] > 0 then waiting[#waiting + 1], left_of[tier] = tier, q.depth[tier] end
  end
  local kept = keep_places(s, room, waiting, 0)
  local function take(tier)
    local candidate = next_candidate(s, line_of(tier), heavier, room.weight - room.kept, s.pages < INF)
    if not candidate then return false end
    taken[tier] = taken[tier] or {}
    table.insert(taken[tier], candidate)
    gone[candidate.member] = true
    members[#members + 1], left_of[tier] = candidate.member, left_of[tier] - 1
    room.weight = room.weight < INF and room.weight - candidate.weight or INF
    return true
  end
  local left = room.count - kept
  for _, tier in ipairs(waiting) do
    for _ = 1, math.min(left, left_of[tier]) do
      if room.weight <= room.kept then break end
      left = left - 1
      if not take(tier) then return taken, members, tier end
    end
  end
  room.kept = 0
  for _ = 1, kept + left do
    local longest, chosen = INF, nil
    for position = 2, #waiting do
      local tier = waiting[position]
      local arrived = left_of[tier] > 0 and head_of(s, tier, gone) or INF
      if arrived < longest then longest, chosen = arrived, tier end
    end
    if room.weight <= 0 or not chosen then break end
    if not take(chosen) then return taken, members, chosen end
  end
  return taken, members, nil
end

-- Fill a batch if more is waiting than fits, or if light entries ride separately. Returns its entries, or nil if all ride in turn. Appends
-- entries that would be answered too late to `late`.
function nearest.pack(s, limit, hopeless, gone, late)
  local q, entries, left, lines, weight, shape, bound = s.q, {}, s.most_weight, {}, nil, nil, INF
  local function add(members, contended)
    for _, entry in ipairs(wanted(s, members)) do
      if contended and entry.due < hopeless then
        late[#late + 1] = entry
      else
        entries[#entries + 1] = entry
        left = left < INF and left - counted_weight(s, entry.weight) or INF
      end
    end
  end
  local function line_of(tier)
    lines[tier] = lines[tier] or candidates_of(s, tier, weight, shape, NEAR_BATCHES * limit, bound)
    return lines[tier]
  end
  while #entries == 0 do
    local depth = q.fresh
    bound = depth > q.limit and INF or bound_of_light(s)
    if not bound then return nil end
    local member = pop_first(s, limit, bound < INF or (q.departures % 2 == 1 and s.share > 0), gone)
    if not member then
      recount(s)
      return nil
    end
    weight, shape, s.parted = weight_of(s, member), shape_of(member), bound < INF or nil
    add({member}, depth > limit)
    if #entries > 0 then use_pages(s, member) end
  end
  for _, heavier in ipairs({false, true}) do
    local allowed, ended = {}, false
    for tier = 1, s.tiers do allowed[tier] = tier end
    while not ended and #entries < limit and left > 0 do
      local room = {count = limit - #entries, weight = left, kept = 0, promised = 0}
      local contended = q.fresh > room.count or waiting_weight(s) > left
      local taken, members, empty = take_seats(s, room, allowed, line_of, heavier, gone)
      ended = #members == 0 and not empty
      for place, tier in ipairs(allowed) do
        if tier == empty then
          table.remove(allowed, place)
          break
        end
      end
      for tier, candidates in pairs(taken) do leave_early(s, tier, candidates, weight) end
      add(members, contended)
    end
  end
  return entries
end
end

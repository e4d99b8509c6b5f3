-- Entries that wait separately from the tier queues. See `core.suspects`. A step that needs the groups reads them once, and writes the
-- changed ones when it saves.
local suspects = {}
local GROUP = GROUP_KINDS
do
-- Write the changed groups, and count the members of all groups.
local function flush(s)
  local count = 0
  for _, group in ipairs(s.groups) do
    count = count + #group.members
    if s.changed[group.id] then redis.call('HSET', s.prefix .. 's', exact(group.id), cmsgpack.pack(group)) end
  end
  if next(s.changed) then lasting(s, 's') end
  if count ~= s.q.suspects then s.q.suspects, s.touched[SELDOM] = count, true end
  s.changed = {}
end

function suspects.groups(s)
  if not s.groups then
    s.groups, s.changed, s.flush = {}, {}, flush
    if s.q.groups > 0 then
      local all = redis.call('HGETALL', s.prefix .. 's')
      for i = 2, #all, 2 do s.groups[i / 2] = cmsgpack.unpack(all[i]) end
      table.sort(s.groups, function(group, other) return group.id < other.id end)
    end
  end
  return s.groups
end

function suspects.opens_at(s, group, worker)
  if s.q.slots > 1 and worker == group.avoid then return group.avoid_until end
  return group.ready_at
end

-- Time by which an entry must leave. For an entry that never ran, this is its queue deadline.
function suspects.last_moment(entry, attempts) return attempts > 0 and entry.due or entry.queue_due end
local function touch(s, group) s.changed[group.id] = true end

-- The first element of a list that passes a test, and its position.
local function first_of(list, passes)
  for at, element in ipairs(list) do
    if passes(element) then return element, at end
  end
end

local function append(s, group)
  local q, groups = s.q, suspects.groups(s)
  q.group, q.groups, s.touched[SELDOM] = q.group + 1, q.groups + 1, true
  group.id = q.group
  groups[#groups + 1] = group
end

local function put(s, group, entries)
  local q, members = s.q, group.members
  for _, entry in ipairs(entries) do
    members[#members + 1] = entry.member
    q.suspects_due = math.min(q.suspects_due, suspects.last_moment(entry, group.attempts))
  end
  s.touched[SELDOM] = true
  touch(s, group)
end

local function remove_group(s, group)
  local _, at = first_of(s.groups, function(other) return other == group end)
  if at then table.remove(s.groups, at) end
  redis.call('HDEL', s.prefix .. 's', exact(group.id))
  s.q.groups, s.touched[SELDOM] = s.q.groups - 1, true
end

-- Create a group of entries. `like` contains the time, the failures, the attempts, and whatever else is known.
function suspects.add(s, entries, kind, like)
  local group = {
    members = {}, kind = kind, ready_at = like.ready_at, failures = like.failures, attempts = like.attempts,
    alone = like.alone or 0, caller = like.caller or '', rest = like.rest or 0, avoid = like.avoid or '',
    avoid_until = like.avoid_until or -INF, hung = like.hung,
  }
  append(s, group)
  put(s, group, entries)
  return group
end

-- Separate the entries at some positions of their batch; the others run again. Returns these entries, and the number of the others. See
-- `ModelQueue._suspected`.
function suspects.at(s, lease, entries, places)
  local named = {}
  for _, place in ipairs(places) do named[lease.members[place + 1]] = true end
  local suspected, others = split(entries, function(entry) return named[entry.member] end)
  if #others > 0 then
    suspects.add(s, others, GROUP.FIRST, {ready_at = s.now, failures = lease.failures, attempts = lease.attempts - 1})
  end
  return suspected, #others
end

function suspects.quarantine(s, caller)
  return first_of(suspects.groups(s), function(group) return group.caller == caller end)
end

-- Number of callers that share the GPUs with the tier queues (at least one), and the number without this caller.
function suspects.callers(s, caller)
  local count, beside = 0, 0
  for _, group in ipairs(suspects.groups(s)) do
    if group.caller ~= '' then
      count = count + 1
      beside = beside + (group.caller ~= caller and 1 or 0)
    end
  end
  return math.max(count, 1), beside
end

function suspects.join(s, caller, entries, like)
  local quarantine = suspects.quarantine(s, caller)
    or suspects.add(s, {}, GROUP.QUARANTINE, {ready_at = like.ready_at, failures = 0, attempts = 0, caller = caller})
  quarantine.ready_at = math.min(quarantine.ready_at, like.ready_at)
  quarantine.failures = math.max(quarantine.failures, like.failures)
  quarantine.attempts = math.max(quarantine.attempts, math.min(like.attempts, QUARANTINED_ATTEMPTS))
  put(s, quarantine, entries)
  if #quarantine.members >= culprits.group_size(s, caller, s.q.max_batch) then quarantine.ready_at = -INF end
end

-- Move entries about which nothing is known any more to quarantine.
function suspects.unknown(s, entries, like)
  if #entries == 0 then return end
  local callers = culprits.callers_of(s, entries)
  for i = 2, #callers do
    if callers[i] ~= callers[1] then
      like = {ready_at = like.ready_at, failures = like.failures, attempts = like.attempts}
      return suspects.add(s, entries, GROUP.QUARANTINE, like)
    end
  end
  suspects.join(s, callers[1], entries, like)
end

-- Order entries, and choose where to divide them, if possible between two callers. Callers with the most entries come first.
local function cut(s, entries)
  local callers, counts, first, order = culprits.callers_of(s, entries), {}, {}, {}
  for i, caller in ipairs(callers) do
    counts[caller], first[caller], order[i] = (counts[caller] or 0) + 1, first[caller] or i, i
  end
  if counts[callers[1]] == #entries then return entries, math.floor(#entries / 2) end
  table.sort(order, function(i, j)
    local caller, other = callers[i], callers[j]
    if caller == other then return i < j end
    return counts[caller] > counts[other] or (counts[caller] == counts[other] and first[caller] < first[other])
  end)
  local sorted, best = {}, 0
  for at, i in ipairs(order) do
    sorted[at] = entries[i]
    local between = at < #entries and callers[i] ~= callers[order[at + 1]]
    if between and (best == 0 or math.abs(2 * at - #entries) < math.abs(2 * best - #entries)) then best = at end
  end
  return sorted, best
end

-- Search entries that include a culprit, by running one half of them or the only one. `like` is the same as for `add`, and is modified.
function suspects.halve(s, entries, like)
  if #entries > 1 then
    local sorted, size = cut(s, entries)
    local left, right = {}, {}
    for i, entry in ipairs(sorted) do
      local into = i <= size and left or right
      into[#into + 1] = entry
    end
    local rest = {ready_at = INF, failures = like.failures, attempts = like.attempts, hung = like.hung}
    like.rest, like.alone = suspects.add(s, right, GROUP.REST, rest).id, 0
    entries = left
  end
  suspects.add(s, entries, GROUP.HALF, like)
end

local function find_group(s, id)
  return id ~= 0 and first_of(suspects.groups(s), function(group) return group.id == id end)
end

-- Release the entries that were waiting for the first half to finish.
function suspects.let_go(s, id)
  local group = find_group(s, id)
  if not group then return {} end
  remove_group(s, group)
  return wanted(s, group.members)
end

-- Take a group's members for one run, as many as the slot can run.
function suspects.take(s, group, limit)
  local taken, left, others, weight, shape = {}, {}, {}, 0, shape_of(group.members[1])
  for _, member in ipairs(group.members) do
    local into = others
    if shape_of(member) == shape then
      weight = weight + weight_of(s, member)
      into = #taken < limit and (#taken == 0 or weight <= s.most_weight) and taken or left
    end
    into[#into + 1] = member
  end
  for i = 1, #others do left[#left + 1] = others[i] end
  local rest = #left > 0 and find_group(s, group.rest)
  if rest then
    for i = #left, 1, -1 do table.insert(rest.members, 1, left[i]) end
    touch(s, rest)
    left = {}
  end
  group.members = left
  touch(s, group)
  if #left == 0 then
    remove_group(s, group)
  elseif group.kind == GROUP.QUARANTINE then  -- Other groups go before the rest of this one.
    remove_group(s, group)
    append(s, group)
    touch(s, group)
  end
  return wanted(s, taken)
end

-- A member's group, and the member's position in it.
function suspects.group_of(s, member)
  for _, group in ipairs(suspects.groups(s)) do
    local found, at = first_of(group.members, function(other) return other == member end)
    if found then return group, at end
  end
end

-- Remove an entry from its group, if it has one.
function suspects.drop(s, member)
  local group, i = suspects.group_of(s, member)
  if not group then return end
  table.remove(group.members, i)
  touch(s, group)
  if #group.members == 0 then
    remove_group(s, group)
    suspects.unknown(s, suspects.let_go(s, group.rest), group)  -- The culprit may have left.
  end
end

-- What a worker may take: a group that goes first, or the group whose turn it is. Also the time to check again.
function suspects.choose(s, worker)
  local half, quarantine, again = nil, nil, INF
  for _, group in ipairs(suspects.groups(s)) do
    local opens = suspects.opens_at(s, group, worker)
    if opens > s.now then
      again = math.min(again, opens)
    elseif group.kind == GROUP.FIRST then
      return group, nil, again
    elseif group.kind == GROUP.HALF then
      half = half or group
    else
      quarantine = quarantine or group
    end
  end
  if quarantine and (not half or s.q.lean > 0) then return nil, quarantine, again end
  return nil, half, again
end

-- Credit the groups for the GPU seconds that the tier queues, with this many tenants, used before them.
function suspects.earn(s, seconds, tenants, full)
  local share = math.max(seconds, LEAST_COST) * suspects.callers(s) / math.max(tenants, 1)
  s.touched[SELDOM] = true
  s.q.credit = math.min(s.q.credit + share, MOST_CREDIT * math.max(full, LEAST_COST))
end

-- Price of a group's GPU second. It is higher if its caller has sent culprits.
function suspects.price(s, group)
  if s.q.apart > 0 then
    local entries = wanted(s, {group.members[1]})
    if #entries > 0 and culprits.ride_apart(s, culprits.callers_of(s, entries)[1]) then return APART_PRICE end
  end
  return 1
end

-- Charge a turn for the seconds by which it exceeded its estimate.
function suspects.overrun(s, seconds)
  s.q.credit, s.touched[SELDOM] = s.q.credit - math.max(seconds, 0) * APART_PRICE, true
end

-- Charge a group for its turn. Each second costs `price` in credit.
function suspects.pay(s, kind, seconds, full, price)
  local q, cost = s.q, math.max(seconds, LEAST_COST)
  s.touched[SELDOM] = true
  q.credit = q.credit - cost * price
  local most = MOST_CREDIT * math.max(full, LEAST_COST)
  q.lean = math.max(-most, math.min(most, q.lean + (kind == GROUP.QUARANTINE and -cost or cost * SEARCH_PRICE)))
end
end

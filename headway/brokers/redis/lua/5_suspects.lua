-- Entries that wait apart from the tier queues: as `core.suspects`. The groups are read once in a step, when they are needed, and
-- those that have changed are written when it saves.

local suspects = {}
local GROUP = GROUP_KINDS

do

local FIELDS = {
  'members', 'ready_at', 'kind', 'failures', 'attempts', 'alone', 'caller', 'rest', 'avoid', 'avoid_until', 'hung',
}

local function flush(s)
  for id, group in pairs(s.changed) do
    local packed = {}
    for _, name in ipairs(FIELDS) do
      packed[name] = group[name]
    end
    redis.call('HSET', s.prefix .. 's', exact(id), cmsgpack.pack(packed))
  end
  if next(s.changed) then
    lasting(s, 's')
  end
  s.changed = {}
end

function suspects.groups(s)
  if not s.groups then
    s.groups, s.changed, s.flush = {}, {}, flush
    if s.q.groups > 0 then
      local all = redis.call('HGETALL', s.prefix .. 's')
      for i = 1, #all, 2 do
        local group = cmsgpack.unpack(all[i + 1])
        group.id = tonumber(all[i])
        s.groups[#s.groups + 1] = group
      end
      table.sort(s.groups, function(one, other) return one.id < other.id end)
    end
  end
  return s.groups
end

function suspects.opens_at(s, group, worker)
  if s.q.slots > 1 and worker == group.avoid then
    return group.avoid_until
  end
  return group.ready_at
end

-- One that never ran keeps its queue deadline.
function suspects.last_moment(entry, attempts)
  return attempts > 0 and entry.due or entry.queue_due
end

local function touch(s, group)
  s.changed[group.id] = group
end

local function count_members(s, count)
  s.q.suspects = s.q.suspects + count
  s.touched[SELDOM] = true
end

local function put(s, group, entries)
  local q = s.q
  for _, entry in ipairs(entries) do
    q.suspects_due = math.min(q.suspects_due, suspects.last_moment(entry, group.attempts))
  end
  count_members(s, #entries)
  touch(s, group)
end

local function members_of(entries)
  local members = {}
  for i, entry in ipairs(entries) do
    members[i] = entry.member
  end
  return members
end

local function append(s, group)
  local q, groups = s.q, suspects.groups(s)
  q.group = q.group + 1
  q.groups = q.groups + 1
  s.touched[SELDOM] = true
  group.id = q.group
  groups[#groups + 1] = group
end

local function remove_group(s, group)
  local groups = suspects.groups(s)
  for i, found in ipairs(groups) do
    if found == group then
      table.remove(groups, i)
      break
    end
  end
  redis.call('HDEL', s.prefix .. 's', exact(group.id))
  s.changed[group.id] = nil
  s.q.groups = s.q.groups - 1
  s.touched[SELDOM] = true
end

-- Let entries wait. `like` has the instant, the failures and the attempts.
function suspects.add(s, entries, kind, like)
  local group = {
    members = members_of(entries), kind = kind, ready_at = like.ready_at, failures = like.failures, attempts = like.attempts,
    alone = like.alone or 0, caller = '', rest = like.rest or 0, avoid = like.avoid or '', avoid_until = like.avoid_until or -INF,
    hung = like.hung or nil,
  }
  append(s, group)
  put(s, group, entries)
  return group
end

function suspects.quarantine(s, caller)
  for _, group in ipairs(suspects.groups(s)) do
    if group.caller == caller then
      return group
    end
  end
  return nil
end

-- Callers that share the GPUs with the tier queues, at least one; and how many of them are not this one.
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
  if not quarantine then
    quarantine = {members = {}, kind = GROUP.QUARANTINE, ready_at = like.ready_at, failures = 0, attempts = 0, alone = 0, caller = caller,
      rest = 0, avoid = '', avoid_until = -INF}
    append(s, quarantine)
  end
  quarantine.ready_at = math.min(quarantine.ready_at, like.ready_at)
  quarantine.failures = math.max(quarantine.failures, like.failures)
  quarantine.attempts = math.max(quarantine.attempts, math.min(like.attempts, QUARANTINED_ATTEMPTS))
  for _, entry in ipairs(entries) do
    quarantine.members[#quarantine.members + 1] = entry.member
  end
  if #quarantine.members >= culprits.group_size(s, caller, s.q.max_batch) then
    quarantine.ready_at = -INF
  end
  put(s, quarantine, entries)
end

-- Nothing is known of these entries any more.
function suspects.unknown(s, entries, like)
  if #entries == 0 then
    return
  end
  local callers = culprits.callers_of(s, entries)
  for i = 2, #callers do
    if callers[i] ~= callers[1] then
      suspects.add(s, entries, GROUP.QUARANTINE, {ready_at = like.ready_at, failures = like.failures, attempts = like.attempts})
      return
    end
  end
  suspects.join(s, callers[1], entries, like)
end

-- Where to halve: between two callers while there are several, those with most entries first.
local function cut(s, entries)
  local callers, counts, order = culprits.callers_of(s, entries), {}, {}
  for i, caller in ipairs(callers) do
    if not counts[caller] then
      counts[caller] = {count = 0, first = i, caller = caller}
      order[#order + 1] = counts[caller]
    end
    counts[caller].count = counts[caller].count + 1
  end
  if #order == 1 then
    return entries, math.floor(#entries / 2)
  end
  table.sort(order, function(one, other)
    return one.count > other.count or (one.count == other.count and one.first < other.first)
  end)
  local sorted, best, at = {}, 0, 0
  for _, group in ipairs(order) do
    for i, caller in ipairs(callers) do
      if caller == group.caller then
        sorted[#sorted + 1] = entries[i]
      end
    end
    at = at + group.count
    if at < #entries and (best == 0 or math.abs(2 * at - #entries) < math.abs(2 * best - #entries)) then
      best = at
    end
  end
  return sorted, best
end

-- These entries hold a culprit: run one half, or the only one.
function suspects.halve(s, entries, like)
  local rest, alone = 0, like.alone
  if #entries > 1 then
    local sorted, size = cut(s, entries)
    local left, right = {}, {}
    for i, entry in ipairs(sorted) do
      local into = i <= size and left or right
      into[#into + 1] = entry
    end
    rest = suspects.add(s, right, GROUP.REST, {ready_at = INF, failures = like.failures, attempts = like.attempts, hung = like.hung}).id
    entries, alone = left, 0
  end
  suspects.add(s, entries, GROUP.HALF, {ready_at = like.ready_at, failures = like.failures, attempts = like.attempts, alone = alone,
    rest = rest, avoid = like.avoid, avoid_until = like.avoid_until, hung = like.hung})
end

local function find_group(s, id)
  if id ~= 0 then
    for _, group in ipairs(suspects.groups(s)) do
      if group.id == id then
        return group
      end
    end
  end
  return nil
end

-- The entries that waited for a half, which has ended.
function suspects.let_go(s, id)
  local group = find_group(s, id)
  if not group then
    return {}
  end
  remove_group(s, group)
  count_members(s, -#group.members)
  return wanted(s, group.members)
end

-- Members of a group for one run: all, unless the slot takes fewer.
function suspects.take(s, group, limit)
  local taken, left, weight = {}, {}, 0
  for i, member in ipairs(group.members) do
    weight = weight + weight_of(s, member)
    local fits = i <= limit and (i == 1 or weight <= s.most_weight)
    local into = fits and taken or left
    into[#into + 1] = member
  end
  count_members(s, -#taken)
  local rest = #left > 0 and find_group(s, group.rest)
  if rest then
    for i = #left, 1, -1 do
      table.insert(rest.members, 1, left[i])
    end
    touch(s, rest)
    left = {}
  end
  group.members = left
  if #left == 0 then
    remove_group(s, group)
  elseif group.kind == GROUP.QUARANTINE then  -- Others have their turn before what is left of it.
    remove_group(s, group)
    append(s, group)
    touch(s, group)
  else
    touch(s, group)
  end
  return wanted(s, taken)
end

-- Take one entry out of the group it waits in; true when it was in one.
function suspects.drop(s, member)
  for _, group in ipairs(suspects.groups(s)) do
    for i, found in ipairs(group.members) do
      if found == member then
        table.remove(group.members, i)
        count_members(s, -1)
        if #group.members == 0 then
          remove_group(s, group)
          suspects.unknown(s, suspects.let_go(s, group.rest), group)  -- The culprit may have left.
        else
          touch(s, group)
        end
        return true
      end
    end
  end
  return false
end

-- What a worker may take: a group that goes first, or one that takes its turn; and the instant to look again.
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
  if quarantine and (not half or s.q.lean > 0) then
    return nil, quarantine, again
  end
  return nil, half, again
end

-- The tier queues went first for so many seconds of a GPU, while groups waited beside so many tenants.
function suspects.earn(s, seconds, tenants, full)
  local share = math.max(seconds, LEAST_COST) * suspects.callers(s) / math.max(tenants, 1)
  s.touched[SELDOM] = true
  s.q.credit = math.min(s.q.credit + share, MOST_CREDIT * math.max(full, LEAST_COST))
end

-- What a second of a group costs: more where its caller has sent culprits.
function suspects.price(s, group)
  if s.q.apart > 0 then
    local entries = wanted(s, {group.members[1]})
    if #entries > 0 and culprits.ride_apart(s, culprits.callers_of(s, entries)[1]) then
      return APART_PRICE
    end
  end
  return 1
end

-- A group takes its turn for so many seconds, of which each costs `price` in credit.
function suspects.pay(s, kind, seconds, full, price)
  local q, cost = s.q, math.max(seconds, LEAST_COST)
  s.touched[SELDOM] = true
  q.credit = q.credit - cost * price
  local most = MOST_CREDIT * math.max(full, LEAST_COST)
  q.lean = math.max(-most, math.min(most, q.lean + (kind == GROUP.QUARANTINE and -cost or cost * SEARCH_PRICE)))
end

end

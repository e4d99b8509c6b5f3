-- When a batch leaves: as `core.departure.decide` with the rule of the last claim.

local function decide(s)
  local q, now = s.q, s.now
  if q.fresh == 0 then
    return nil, INF
  end
  local full_from = q.fresh >= q.size and q.schedule - q.lead or INF
  if now >= full_from then
    return 'full'
  end
  local leave_by = q.due - q.service - LEEWAY
  if now >= leave_by then
    return 'deadline'
  end
  local window_ends = q.oldest + q.window
  if now >= window_ends then
    return 'window'
  end
  local again = math.min(leave_by, window_ends, full_from)
  if q.headway >= 0 then
    if q.headway == 0 then
      return 'early'
    end
    local gathered = math.min(q.oldest + q.gather, q.newest + q.quiet)
    local spaced = math.max(q.last_departure + q.headway, gathered)
    if now >= spaced then
      return 'headway'
    end
    again = math.min(again, spaced)
  elseif q.rule_rate * (again - now) < 1 then
    return 'early'
  end
  return nil, again
end

local function read_groups(s)
  local groups = {}
  if s.q.groups > 0 then
    local all = redis.call('HGETALL', s.prefix .. 's')
    for i = 1, #all, 2 do
      local group = cmsgpack.unpack(all[i + 1])
      group.id = tonumber(all[i])
      groups[#groups + 1] = group
    end
    table.sort(groups, function(one, other) return one.id < other.id end)
  end
  return groups
end

local function opens_at(s, group, worker)
  if s.q.slots > 1 and worker == group.avoid then
    return group.avoid_until
  end
  return group.ready_at
end

local function store_group(s, group)
  redis.call('HSET', s.prefix .. 's', exact(group.id), cmsgpack.pack({
    members = group.members, ready_at = group.ready_at, failures = group.failures, attempts = group.attempts,
    avoid = group.avoid, avoid_until = group.avoid_until,
  }))
  lasting(s, 's')
end

local function remove_group(s, group)
  redis.call('HDEL', s.prefix .. 's', exact(group.id))
  s.q.groups = s.q.groups - 1
end

-- One that never ran keeps its queue deadline.
local function last_moment(entry, attempts)
  return attempts > 0 and entry.due or entry.queue_due
end

-- Let entries wait until they run again by themselves.
local function set_apart(s, entries, group)
  local q, members = s.q, {}
  for i, entry in ipairs(entries) do
    members[i] = entry.member
    q.suspects_due = math.min(q.suspects_due, last_moment(entry, group.attempts))
  end
  q.group = q.group + 1
  q.groups = q.groups + 1
  q.suspects = q.suspects + #members
  group.id, group.members = q.group, members
  store_group(s, group)
end

-- Take one entry out of the group it waits in; true when it was in one.
local function drop_suspect(s, member, groups)
  for _, group in ipairs(groups) do
    for place, found in ipairs(group.members) do
      if found == member then
        table.remove(group.members, place)
        s.q.suspects = s.q.suspects - 1
        if #group.members == 0 then
          remove_group(s, group)
        else
          store_group(s, group)
        end
        return true
      end
    end
  end
  return false
end

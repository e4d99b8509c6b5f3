-- Outcomes without an output.

-- Send entries without an output to their gateways. `kind` is late, dead or spent, and `failure` is why the batch failed. Late entries are
-- `hung` if their last run was stopped at the GPU deadline.
local function send_failures(s, kind, entries, attempts, left_at, size, failure, hung)
  local of, shared = {}, {}
  for _, entry in ipairs(entries) do
    local answer = {entry.key, exact((left_at or s.now) - entry.arrived), attempts, s.now >= entry.queue_due, entry.nonce, hung or false}
    if entry.gateway ~= '' then
      of[entry.gateway] = of[entry.gateway] or {}
      table.insert(of[entry.gateway], answer)
    end
    if entry.shared then shared[#shared + 1] = answer end
  end
  for gateway, list in pairs(of) do
    send(s, gateway, unpack(failure_fields(s, kind, list, left_at, size, failure)))
  end
  local worth = kind == 'dead' and not BLAMELESS[cmsgpack.unpack(failure)[1]] and VERDICT or WORTHLESS
  for _, answer in ipairs(shared) do
    local fields = failure_fields(s, kind, {answer}, left_at, size, failure)
    conclude(s, {fields = fields, worth = worth}, {whose(answer[1], '', false, false)}, kind == 'late')
  end
  mark(s, entries)
end

-- Dead letters. See `brokers.memory.dead_letters`. If they exceed the maximum number or bytes, the tenant with the most loses its oldest.
local dead = {}
do
-- Letter without input and parameters, to keep lists fast.
local function cut(letter)
  local _, _, length, start = struct.unpack(LETTER_HEAD, letter)
  local payload = string.sub(letter, start + length)
  local members, others_at = culprits.members_in(payload)
  members[INPUT_POSITION], members[PARAMETERS_POSITION] = '\160', '\196\0'
  return string.sub(letter, 1, start + length - 1) .. table.concat(members, '', 0) .. string.sub(payload, others_at)
end

-- Drop a letter. Returns false if there was none.
function dead.drop(prefix, key)
  local tenant, bytes = tenant_of(key), redis.call('HSTRLEN', prefix .. 'z', key)
  bytes = bytes + redis.call('STRLEN', prefix .. 'zp:' .. key)
  redis.call('UNLINK', prefix .. 'zp:' .. key)
  redis.call('ZREM', prefix .. 'o', key)
  redis.call('ZREM', prefix .. 'o:' .. tenant, key)
  redis.call('HDEL', prefix .. 'zl', key)
  if redis.call('HDEL', prefix .. 'z', key) == 0 then return false end
  tallies.add(prefix .. 'oc', tenant, -1)
  tallies.add(prefix .. 'ou', tenant, -bytes)
  return true
end

-- Drop a tenant's oldest letter, or the oldest of all if the tenant's list has expired.
local function drop_oldest(prefix, tenant)
  local oldest = redis.call('ZRANGE', prefix .. 'o:' .. tenant, 0, 0)[1] or redis.call('ZRANGE', prefix .. 'o', 0, 0)[1]
  return oldest and dead.drop(prefix, oldest)
end

-- Store a letter, along with the input that is stored separately under a token, if any. Replaces an earlier letter of the same entry.
function dead.keep(prefix, key, letter, token)
  local tenant = tenant_of(key)
  for _, queue in ipairs(siblings.with_letters(prefix)) do dead.drop(queue, key) end
  local apart = token and large.bury(prefix, token, key) or 0
  local number = redis.call('INCR', prefix .. 'on')
  local readable, listed = pcall(cut, letter)
  redis.call('HSET', prefix .. 'z', key, letter)
  redis.call('HSET', prefix .. 'zl', key, readable and listed or '')
  redis.call('ZADD', prefix .. 'o', number, key)
  redis.call('ZADD', prefix .. 'o:' .. tenant, number, key)
  tallies.add(prefix .. 'oc', tenant, 1)
  tallies.add(prefix .. 'ou', tenant, #letter + apart)
  for _, name in ipairs({'z', 'zl', 'o', 'on', 'oc', 'ou', 'o:' .. tenant}) do
    redis.call('EXPIRE', prefix .. name, LETTER_SECONDS)
  end
  for name, most in pairs({oc = LETTERS, ou = LETTER_BYTES}) do
    tallies.hold(prefix .. name, most, function(loser) return drop_oldest(prefix, loser) end)
  end
end
end

local function bury(s, entry, attempts, failure)
  local payload = redis.call('HGET', s.prefix .. 'p', entry.key)
  local letter = struct.pack(LETTER_HEAD, s.now, attempts, #failure) .. failure .. (payload or '')
  dead.keep(s.prefix, own_key(entry), letter, entry.token)
end

-- Expire entries that are waiting separately from the tier queues.
local function expire_suspects(s)
  local q, late, gone = s.q, {}, {}
  q.suspects_due, s.touched[SELDOM] = INF, true
  for _, group in ipairs(suspects.groups(s)) do
    local in_time, overdue = {}, {}
    for _, entry in ipairs(wanted(s, group.members)) do
      local moment = suspects.last_moment(entry, group.attempts)
      if moment > s.now then
        in_time[entry.member], q.suspects_due = true, math.min(q.suspects_due, moment)
      else
        overdue[#overdue + 1] = entry
      end
    end
    late[#late + 1] = {entries = overdue, attempts = group.attempts, hung = group.hung}
    for _, member in ipairs(group.members) do
      if not in_time[member] then gone[#gone + 1] = member end
    end
  end
  for _, member in ipairs(gone) do suspects.drop(s, member) end
  for _, group in ipairs(late) do send_failures(s, 'late', group.entries, group.attempts, nil, nil, nil, group.hung) end
end

-- Answer and remove overdue entries.
local function expire(s)
  local q, now = s.q, s.now
  if q.due <= now then
    local members, gone = {}, {}
    if q.odd > 0 then
      members = redis.call('ZRANGEBYSCORE', s.prefix .. 'd', '-inf', now)
      for _, member in ipairs(members) do gone[member] = true end
    end
    for tier = 1, s.tiers do
      if q.depth[tier] > 0 then
        walk(s, tier, gone, function(_, due, member)
          if due > now then return false end
          members[#members + 1] = member
          return true
        end)
      end
    end
    local late = wanted(s, members)
    for _, entry in ipairs(late) do drop_from_lane(s, entry) end
    table.sort(late, function(entry, other)
      return entry.queue_due < other.queue_due or (entry.queue_due == other.queue_due and entry.number < other.number)
    end)
    send_failures(s, 'late', late, 0)
    look_again(s)
  end
  if q.suspects_due <= now then expire_suspects(s) end
end

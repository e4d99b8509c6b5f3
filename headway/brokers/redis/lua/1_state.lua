-- The state of one queue: its keys, and its figures, which are read once and written once in each step.
--
-- Every key of a queue begins with the same hash-tagged prefix, so all of them lie on one node of a cluster:
--
--   q          string  the figures below, packed as doubles
--   e          hash    entry → header; '!', the nonce and the gateway once it has its outcome and that was not read yet
--   p          hash    entry → payload, as the gateway packed it
--   l<tier>    zset    lane: member → number of its round
--   a<tier>    list    lane: its line, see 4_lanes.lua
--   t<tier>    zset    tenant → the last round that its entries in the lane cost
--   tw         hash    tenant → its entries in the lanes
--   d          zset    member that is due sooner than one before it in its line → its queue deadline
--   x          hash    fence → lease
--   y          zset    fence → instant at which the lease ends
--   s          hash    group → suspects: members that wait apart from the lanes, see 5_suspects.lua
--   rb         hash    tenant → its retry budget, while it is not full
--   ca         hash    caller → what is known of it since one of its inputs failed alone
--   kc:<input> string  input of a tenant that failed alone, and the tenant itself → until when that is known
--   i          zset    idle slot → since when
--   f          string  the idle slot that is on watch
--   c          zset    slot that was woken and has not claimed yet → until when that is waited for
--   b:<process> list   the bell of a process: which of its slots should claim, or when
--   n          hash    slot → token of its last granted claim, and the fence it got
--   h          zset    healthy slot at home here → its last heartbeat
--   r:<gateway> stream replies
--   g          zset    gateway → when it was last heard of
--   m          string  the process that reaps
--   v          hash    flight → its leader and the digest, see 9_sharing.lua
--   v:<flight> zset    entry that follows → its number
--   vs         hash    entry that leads or follows → its shares
--   vd         zset    entry that follows → its deadline
--   k:<flight> string  outcome that is kept, see 18_kept.lua
--   z, o, on, u  hash, zset, strings  dead letters: key → letter, key → its number, the last number, bytes of all
--   o:<tenant> zset    dead letters of a tenant: key → its number
--   oc, ou     zset    tenant → less than nothing of its dead letters, and of their bytes
--
-- An entry's key is its tenant, a NUL, and its id. A member is an entry's number, in DIGITS hexadecimal digits, and its key;
-- so members sort by arrival. Numbers are never used again: a key that is enqueued anew is a new member. There are more
-- digits than needed, for a member of 64 bytes or less would let sorted sets be stored as lists, which are searched from
-- end to end. An entry that went on for others when nobody waited for it itself any more is found by its member instead of
-- its key, which is free for another.
--
-- Rate limits have a key of their own, see 11_limits.lua.

-- Globals are out of reach while a library loads, `math` among them.
local INF = 1 / 0

local PLAIN = {
  'born', 'seq', 'fence', 'group', 'fresh', 'suspects', 'groups', 'suspects_due', 'odd', 'oldest', 'due',
  'last_departure', 'schedule', 'newest', 'slots', 'known_slots', 'batch_seconds', 'gate_at',
  'busy', 'utilisation', 'busy_at', 'wait', 'departures', 'budgets', 'credit', 'lean', 'apart', 'known_until', 'generation',
  'w', 'n', 'l', 'nn', 'nl', 'off', 'largest', 'alpha', 'beta', 'deviation',
  'limit', 'max_batch', 'size', 'headway', 'window', 'rule_rate', 'service', 'pace', 'lead', 'gather', 'quiet', 'rule_at',
  'coming_until', 'armed', 'idle', 'reaper_until', 'swept_at', 'latest', 'last_tenant', 'mixed_at',
}
local TIERED = {'depth', 'next', 'rough', 'last_due', 'rate_last', 'rate_sum', 'rate_unseen', 'drain'}

local START = {
  suspects_due = INF, oldest = INF, due = INF, last_departure = -INF, schedule = -INF, newest = -INF,
  known_slots = 1, gate_at = -INF, known_until = -INF, headway = -1, window = INF, lead = INF, rule_at = -INF,
  coming_until = -INF, armed = INF, reaper_until = -INF, swept_at = -INF, latest = -INF,
  mixed_at = -INF,
}

-- Instants among the figures that are of use only beside others: they move when the clock is put back.
local RELATIVE = {
  'oldest', 'last_departure', 'schedule', 'newest', 'gate_at', 'busy_at', 'rule_at', 'coming_until', 'armed',
  'reaper_until', 'swept_at', 'mixed_at',
}
local TIER_START = {depth = 0, next = 1, rough = 0, last_due = -INF, rate_last = -INF, rate_sum = 0, rate_unseen = 1, drain = 0}

-- Arguments that every step begins with.
local CLOCK, TIERS, MAX_BATCH, SHARE, MAX_QUEUE, LEASE, SHED_LAST, SHED_REST, LIMITS, KEPT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
local HEAD = 10

local function exact(number)
  return string.format('%.17g', number)
end

-- `unpack` and the stack take a few thousand values; longer lists go in parts.
local PART = 1000

local function call_all(command, key, list)
  for first = 1, #list, PART do
    redis.call(command, key, unpack(list, first, math.min(first + PART - 1, #list)))
  end
end

local function call_each(command, key, list)
  local found = {}
  for first = 1, #list, PART do
    local part = redis.call(command, key, unpack(list, first, math.min(first + PART - 1, #list)))
    for i = 1, #part do
      found[first + i - 1] = part[i]
    end
  end
  return found
end

local function clock(text)
  if text ~= '' then
    return tonumber(text)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

-- Everything that is stored has an end, should all processes go. Whatever a step may have made gets one, unless the step
-- knows that it was there; the sweep renews the ends of all, see 15_fleet.lua.
local function lasting(s, ...)
  for _, name in ipairs({...}) do
    redis.call('EXPIRE', s.prefix .. name, LIFE_SECONDS)
  end
end

local function fresh_figures(now, tiers, max_batch)
  local q = {}
  for _, name in ipairs(PLAIN) do
    q[name] = START[name] or 0
  end
  q.born = now
  q.max_batch = max_batch
  q.limit = max_batch
  q.size = max_batch
  for _, name in ipairs(TIERED) do
    q[name] = {}
    for tier = 1, tiers do
      q[name][tier] = TIER_START[name]
    end
  end
  return q
end

-- The figures as they were last saved: reading them takes longer than comparing them. Not there while a step runs, so
-- that what a step has begun to change and did not save is not used.
local kept = {}

local function read_figures(prefix, packed, tiers)
  local last = kept[prefix]
  kept[prefix] = nil
  if last and last.packed == packed then
    return last.q
  end
  local stored = struct.unpack('<d', packed)
  local values = {struct.unpack('<' .. string.rep('d', 1 + #PLAIN + stored * #TIERED), packed)}
  local q, at = {}, 2
  for i = 1, #PLAIN do
    q[PLAIN[i]] = values[at]
    at = at + 1
  end
  for _, name in ipairs(TIERED) do
    local list = {}
    for tier = 1, stored do
      list[tier] = values[at]
      at = at + 1
    end
    for tier = stored + 1, tiers do
      list[tier] = TIER_START[name]
    end
    q[name] = list
  end
  return q
end

local function save(s)
  if s.flush then
    s.flush(s)
  end
  local q, values = s.q, {s.tiers}
  for i = 1, #PLAIN do
    values[i + 1] = q[PLAIN[i]]
  end
  for _, name in ipairs(TIERED) do
    local list = q[name]
    for tier = 1, s.tiers do
      values[#values + 1] = list[tier]
    end
  end
  local packed = struct.pack('<' .. string.rep('d', #values), unpack(values))
  redis.call('SET', s.prefix .. 'q', packed, 'EX', FIGURES_SECONDS)
  kept[s.prefix] = {packed = packed, q = q}
end

-- The server's clock was put back. What was noted for instants that are to come once more would hold everything up until
-- then. The deadlines of entries stay as they are: gateways have their own, and withdraw what is overdue.
local function move_back(s, seconds)
  for _, name in ipairs(RELATIVE) do
    s.q[name] = s.q[name] - seconds
  end
  for tier, last in ipairs(s.q.rate_last) do
    s.q.rate_last[tier] = last - seconds
  end
  for _, name in ipairs({'y', 'h'}) do
    local all = redis.call('ZRANGE', s.prefix .. name, 0, -1, 'WITHSCORES')
    for i = 1, #all, 2 do
      redis.call('ZADD', s.prefix .. name, exact(tonumber(all[i + 1]) - seconds), all[i])
    end
  end
  s.q.latest = s.now
  save(s)
  kept[s.prefix] = nil
end

-- The names of what belongs to the figures, and is nothing without them.
local function belongings(s)
  local names = {'e', 'p', 'd', 'x', 'y', 's', 'i', 'f', 'c', 'n', 'h', 'g', 'm', 'v', 'vs', 'vd', 'rb', 'ca', 'tw'}
  for tier = 1, s.tiers do
    for _, name in ipairs({'l', 'a', 't'}) do
      names[#names + 1] = name .. tier
    end
  end
  return names
end

-- The queue is born. What is left of one whose figures have ended is not to be believed.
local function forget_former_life(s)
  for _, name in ipairs(belongings(s)) do
    redis.call('UNLINK', s.prefix .. name)
  end
end

-- The state at the beginning of a step. Instants are seconds on the server's clock.
local function open(keys, args, looks_only)
  local s = {
    prefix = keys[1],
    now = clock(args[CLOCK]),
    tiers = tonumber(args[TIERS]),
    share = tonumber(args[SHARE]),
    max_queue = tonumber(args[MAX_QUEUE]),
    lease_seconds = tonumber(args[LEASE]),
    shed_last = tonumber(args[SHED_LAST]),
    shed_rest = tonumber(args[SHED_REST]),
    limits = args[LIMITS],
    kept = args[KEPT],
  }
  local packed = redis.call('GET', s.prefix .. 'q')
  if packed then
    s.q = read_figures(s.prefix, packed, s.tiers)
    s.tiers = #s.q.depth
    if s.now < s.q.latest - CLOCK_STEP and not looks_only then
      move_back(s, s.q.latest - s.now)
    end
  else
    s.q, s.unknown = fresh_figures(s.now, s.tiers, tonumber(args[MAX_BATCH])), true
    if not looks_only then
      forget_former_life(s)
    end
  end
  if s.now > s.q.latest + SWEEP_SECONDS then
    s.q.swept_at = s.now  -- Nobody was there, or the clock was put forward: nobody is gone before being asked.
  end
  s.q.latest = s.now
  return s
end

-- Headers: tier, number, arrival, queue deadline, deadline, nonce, then the gateway's name: none when nobody waits for the
-- entry itself any more. SHARED is added to the tier of one that has shares.
local HEADER = '>Bddddd'
local HEADER_BYTES = 41
local SHARED = 64

local function pack_header(tier, seq, arrived, queue_due, due, nonce, gateway)
  return struct.pack(HEADER, tier, seq, arrived, queue_due, due, nonce) .. gateway
end

local function read_header(header)
  local tier, seq, arrived, queue_due, due, nonce = struct.unpack(HEADER, header)
  local shared = tier > SHARED
  return {
    tier = shared and tier - SHARED or tier, shared = shared, seq = seq, arrived = arrived, queue_due = queue_due, due = due,
    nonce = nonce, gateway = string.sub(header, HEADER_BYTES + 1),
  }
end

local DIGITS = 32
local NUMBER = '%0' .. DIGITS .. 'x'

local function member_of(seq, key)
  return string.format(NUMBER, seq) .. key
end

local function seq_of(member)
  return tonumber(string.sub(member, 1, DIGITS), 16)
end

local function key_of(member)
  return string.sub(member, DIGITS + 1)
end

local function tenant_of(key)
  return string.match(key, '^(.*)%z')
end

local function is_answered(header)
  return string.sub(header, 1, 1) == '!'
end

-- A submission's name is its nonce, in eight bytes, and the entry's key. The mark of an entry that has its outcome is its
-- nonce and its gateway.
local submissions = {}

function submissions.read_name(name)
  return struct.unpack('>d', name), string.sub(name, 9)
end

function submissions.mark(entry)
  return '!' .. struct.pack('>d', entry.nonce) .. entry.gateway
end

function submissions.read_mark(header)
  return struct.unpack('>d', header, 2), string.sub(header, 10)
end

-- The entries of these members that are still wanted: not cancelled, not answered, not enqueued anew since.
local function wanted(s, members)
  local keys = {}
  for i = 1, #members do
    keys[i] = key_of(members[i])
  end
  local headers, found, missing = call_each('HMGET', s.prefix .. 'e', keys), {}, {}
  for i = 1, #members do
    local header = headers[i]
    local entry = header and not is_answered(header) and read_header(header)
    if entry and entry.seq == seq_of(members[i]) then
      found[i], entry.key = entry, keys[i]
    else
      missing[#missing + 1] = members[i]
    end
  end
  headers = call_each('HMGET', s.prefix .. 'e', missing)
  local entries, at = {}, 0
  for i = 1, #members do
    local entry = found[i]
    if not entry then
      at = at + 1
      entry = headers[at] and read_header(headers[at])
    end
    if entry then
      entry.key, entry.member, entry.place = entry.key or members[i], members[i], i
      entries[#entries + 1] = entry
    end
  end
  return entries
end

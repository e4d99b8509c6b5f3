-- The state of one queue: its keys, and its figures, which are read once and written once in each step.
--
-- Every key of a queue begins with the same hash-tagged prefix, so all of them lie on one node of a cluster:
--
--   q          string  the figures below, packed as doubles
--   e          hash    entry → header; '!', the nonce and the gateway once it has its outcome and that was not read yet
--   p          hash    entry → payload, as the gateway packed it
--   l<tier>    zset    tier queue: member → number of its round
--   a<tier>    list    tier queue: its line, see 4_tier_queues.lua
--   t<tier>    zset    tenant → the last round that its entries in the tier queue cost
--   tw         hash    tenant → its entries in the tier queues, while they are counted, see 7_intake.lua
--   d          zset    member that is due sooner than one before it in its line → its queue deadline
--   x          hash    fence → lease
--   y          zset    fence → instant at which the lease ends
--   s          hash    group → suspects: members that wait apart from the tier queues, see 5_suspects.lua
--   rb         hash    tenant → its retry budget, while it is not full
--   ca         hash    caller → what is known of it since one of its inputs failed alone
--   kc:<input> string  input of a tenant that failed alone, and the tenant itself → until when that is known
--   i          zset    idle slot → since when
--   f          string  the idle slot that is on watch
--   c          string  slot that was woken last; it is waited for until `coming_until`, or until it claims
--   b:<process> list   the wake-ups of a process: which of its slots should claim, or when
--   n          hash    slot → token of its last granted claim, and the fence it got
--   h          zset    healthy slot at home here → its last heartbeat
--   r:<gateway> stream replies
--   g          zset    gateway → when it was last heard of
--   m          string  the process that reaps
--   v          hash    flight → its original and the digest, see 9_dedup.lua
--   v:<flight> zset    entry that follows → its number
--   vs         hash    original or follower → its dedup keys
--   vd         zset    entry that follows → its deadline
--   k:<flight> string  outcome that is kept, see 18_kept.lua
--   z, zl, o, on, u  hashes, zset, strings  dead letters: key → letter, key → what is listed of it, key → its number, the
--                      last number, bytes of all
--   o:<tenant> zset    dead letters of a tenant: key → its number
--   oc, ou     zset    tenant → less than nothing of its dead letters, and of their bytes
--
-- An entry's key is its tenant, a NUL, and its id. A member is an entry's number and its weight, in DIGITS hexadecimal digits,
-- and its key; so members sort by arrival. Numbers are never used again: a key that is enqueued anew is a new member. There are more
-- digits than needed, for a member of 64 bytes or less would let sorted sets be stored as lists, which are searched from
-- end to end. An entry that went on for others when nobody waited for it itself any more is found by its member instead of
-- its key, which is free for another.
--
-- Rate limits have a key of their own, see 11_limits.lua.

-- Globals are out of reach while a library loads, `math` among them.
local INF = 1 / 0

-- The library puts in the names of the figures, FIGURES and those of each tier, TIERED; how both are packed; and as lists of
-- expressions EACH_FIGURE of `q`, and EACH_OF_TIER.
local START = {
  suspects_due = INF, oldest = INF, due = INF, last_departure = -INF, schedule = -INF, newest = -INF,
  known_slots = 1, gate_at = -INF, known_until = -INF, headway = -1, window = INF, tolerance = INF, rule_at = -INF,
  coming_until = -INF, armed = INF, reaper_until = -INF, swept_at = -INF, latest = -INF,
  mixed_at = -INF,
}

-- Instants among the figures that are of use only beside others: they move when the clock is put back.
local RELATIVE = {
  'oldest', 'last_departure', 'schedule', 'newest', 'gate_at', 'busy_at', 'rule_at', 'coming_until', 'armed',
  'reaper_until', 'swept_at', 'mixed_at',
}
local TIER_START = {depth = 0, weight = 0, mean = 0, next = 1, rough = 0, last_due = -INF, rate_last = -INF, rate_sum = 0, rate_unseen = 1, drain = 0}

-- Arguments that every step begins with.
local CLOCK, SETTINGS = 1, 2
local HEAD = 2

local function exact(number)
  return string.format('%.17g', number)
end

-- `unpack` and the stack take a few thousand values; longer lists go in parts.
local PART = 1000

local function as_doubles(numbers)
  if #numbers <= PART then
    return struct.pack('<' .. string.rep('d', #numbers), unpack(numbers))
  end
  local parts = {}
  for first = 1, #numbers, PART do
    local last = math.min(first + PART - 1, #numbers)
    parts[#parts + 1] = struct.pack('<' .. string.rep('d', last - first + 1), unpack(numbers, first, last))
  end
  return table.concat(parts)
end

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
  for _, name in ipairs(FIGURES) do
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

-- By queue, what earlier steps have done or found out, so that not every step does so again. None of it is state: it may be
-- lost at any time.
local remembered = {}

local function memory_of(s)
  local memory = remembered[s.prefix]
  if not memory then
    memory = {heard = {}, renewed = {}}
    remembered[s.prefix] = memory
  end
  return memory
end

-- The figures as they were last saved: reading them takes longer than comparing them. Not there while a step runs, so
-- that what a step has begun to change and did not save is not used.
local kept = {}

-- Nil for those of a release that has others.
local function read_figures(prefix, packed, tiers)
  local last = kept[prefix]
  kept[prefix] = nil
  if last and last.packed == packed then
    return last.q
  end
  local q, stored, at = {}, nil, nil
  for _, name in ipairs(TIERED) do
    q[name] = {}
  end
  stored = struct.unpack('<d', packed)
  if #packed ~= 8 * (#PLAIN_FORMAT + stored * #TIER_FORMAT - 1 - stored) then
    return nil
  end
  stored, EACH_FIGURE, at = struct.unpack(PLAIN_FORMAT, packed)
  for tier = 1, math.max(stored, tiers) do
    if tier <= stored then
      EACH_OF_TIER, at = struct.unpack(TIER_FORMAT, packed, at)
    else
      for _, name in ipairs(TIERED) do
        q[name][tier] = TIER_START[name]
      end
    end
  end
  return q
end

local function save(s)
  if s.flush then
    s.flush(s)
  end
  local q, parts = s.q, {}
  parts[1] = struct.pack(PLAIN_FORMAT, s.tiers, EACH_FIGURE)
  for tier = 1, s.tiers do
    parts[tier + 1] = struct.pack(TIER_FORMAT, EACH_OF_TIER)
  end
  local packed = table.concat(parts)
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

-- What the caller knows of the queue: one text, which is read once, as it hardly ever changes.
local settings, settings_known = {}, 0

local function read_settings(text)
  if settings_known >= MOST_SETTINGS then
    settings, settings_known = {}, 0
  end
  local tiers, max_batch, share, max_queue, max_weight, unit, round_weight, lease, shed_last, shed_rest, budgets, limits =
    string.match(text, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (.*)$')
  local known = {
    weighed = tonumber(max_weight) > 0, unit = tonumber(unit), round_weight = tonumber(round_weight),
    tiers = tonumber(tiers), max_batch = tonumber(max_batch), share = tonumber(share), max_queue = tonumber(max_queue),
    lease_seconds = tonumber(lease), shed_last = tonumber(shed_last), shed_rest = tonumber(shed_rest), kept = budgets,
    limits = limits,
  }
  settings[text], settings_known = known, settings_known + 1
  return known
end

-- The state at the beginning of a step. Instants are seconds on the server's clock.
local function open(keys, args, looks_only)
  local known = settings[args[SETTINGS]] or read_settings(args[SETTINGS])
  local s = {
    prefix = keys[1], now = clock(args[CLOCK]), tiers = known.tiers, max_batch = known.max_batch, share = known.share,
    max_queue = known.max_queue, lease_seconds = known.lease_seconds, shed_last = known.shed_last,
    shed_rest = known.shed_rest, limits = known.limits, kept = known.kept, weighed = known.weighed, unit = known.unit,
    round_weight = known.round_weight,
  }
  local packed = redis.call('GET', s.prefix .. 'q')
  s.q = packed and read_figures(s.prefix, packed, s.tiers)
  if s.q then
    s.tiers = #s.q.depth
    if s.now < s.q.latest - CLOCK_STEP and not looks_only then
      move_back(s, s.q.latest - s.now)
    end
  else
    s.q, s.unknown = fresh_figures(s.now, s.tiers, s.max_batch), true
    if not looks_only then
      forget_former_life(s)
      remembered[s.prefix] = nil
    end
  end
  if s.now > s.q.latest + SWEEP_SECONDS then
    s.q.swept_at = s.now  -- Nobody was there, or the clock was put forward: nobody is gone before being asked.
  end
  s.q.latest = s.now
  return s
end

-- Headers: tier, number, arrival, queue deadline, deadline, nonce, weight, then the gateway's name: none when nobody waits for the
-- entry itself any more. SHARED is added to the tier of one that has dedup keys.
local HEADER = '>BdddddI4'
local HEADER_BYTES = 45
local SHARED = 64

local function pack_header(entry, tier, gateway)
  return struct.pack(HEADER, tier, entry.seq, entry.arrived, entry.queue_due, entry.due, entry.nonce, entry.weight) .. gateway
end

-- The entry of a header, of which more may be known.
local function read_header(header, key, member, position)
  local tier, seq, arrived, queue_due, due, nonce, weight = struct.unpack(HEADER, header)
  local shared = tier > SHARED
  return {
    tier = shared and tier - SHARED or tier, shared = shared, seq = seq, arrived = arrived, queue_due = queue_due, due = due,
    nonce = nonce, weight = weight, gateway = string.sub(header, HEADER_BYTES + 1), key = key, member = member, position = position,
  }
end

local DIGITS = 32
local SEQ_DIGITS = 24
local NUMBER = '%0' .. SEQ_DIGITS .. 'x%0' .. DIGITS - SEQ_DIGITS .. 'x'

local function member_of(entry)
  return string.format(NUMBER, entry.seq, entry.weight) .. entry.key
end

local function seq_of(member)
  return tonumber(string.sub(member, 1, SEQ_DIGITS), 16)
end

local function weight_of(member)
  return tonumber(string.sub(member, SEQ_DIGITS + 1, DIGITS), 16)
end

-- Weight of all these.
local function weight_of_all(members)
  local sum = 0
  for _, member in ipairs(members) do
    sum = sum + weight_of(member)
  end
  return sum
end

-- As `QueueLimits.size`.
local function size_of(s, count, weight)
  return math.max(count, weight / s.unit)
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

-- The entry's key, and the mark that it has if a gateway is to read this submission's outcome.
function submissions.marked(name, gateway)
  return string.sub(name, 9), '!' .. string.sub(name, 1, 8) .. gateway
end

function submissions.read_mark(header)
  return struct.unpack('>d', header, 2), string.sub(header, 10)
end

-- The entries of these members that are still wanted: not cancelled, not answered, not enqueued anew since.
local function wanted(s, members)
  local keys, sub = {}, string.sub
  for i = 1, #members do
    keys[i] = sub(members[i], DIGITS + 1)
  end
  local headers, found, missing = call_each('HMGET', s.prefix .. 'e', keys), {}, {}
  for i = 1, #members do
    local header, member = headers[i], members[i]
    local entry = header and not is_answered(header) and read_header(header, keys[i], member, i)
    if entry and entry.seq == seq_of(member) then
      found[i] = entry
    else
      missing[#missing + 1] = member
    end
  end
  if #missing == 0 then
    return found
  end
  headers = call_each('HMGET', s.prefix .. 'e', missing)
  local entries, at = {}, 0
  for i = 1, #members do
    local entry = found[i]
    if not entry then
      at = at + 1
      entry = headers[at] and read_header(headers[at], missing[at], missing[at], i)
    end
    if entry then
      entries[#entries + 1] = entry
    end
  end
  return entries
end

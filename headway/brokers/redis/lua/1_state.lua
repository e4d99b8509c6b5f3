-- State of one queue: its keys and its figures (numbers). A step reads the figures once, and writes the sections that it changed once.
--
-- All keys of a queue begin with its prefix, whose hash tag keeps them, and those of its sibling queues, on one cluster node:
--
--   q          string  figures, packed as doubles in sections; see function_library.py
--   e          hash    entry → header or, if it has an outcome that wasn't read yet, '!', nonce and gateway
--   p          hash    entry → payload, as the gateway packed it
--   P:<token>  string  large input, stored separately from its payload; see 2_large.lua
--   R:<token>  string  large output, stored separately from its reply
--   Q:<token>, K:<token>  sets  submissions that have yet to read a shared output, and keys that keep it; see 8_outputs.lua
--   b          zset    tally of the bytes of large entries without an outcome; see 1_tallies.lua and 2_large.lua
--   l<tier>    zset    tier queue: member → number of its round
--   a<tier>    list    line of the tier queue; see 4_tier_queues.lua
--   t<tier>    zset    tenant → last round that its entries in the tier queue paid for
--   u, ua      zsets   bulk entries: member → number of its round; those that run separately, in order of arrival
--   ut         zset    tenant → last round that its bulk entries paid for
--   tw         hash    tenant → number of its entries in the tier queues, while they are counted; see 7_intake.lua
--   d          zset    member that is due sooner than one ahead of it in the line → its queue deadline
--   x          hash    fence → lease
--   y          zset    fence → time at which the lease expires
--   ys         zset    fence → size of the batch
--   s          hash    group → suspects: members that wait separately from the tier queues; see 5_suspects.lua
--   rb         zset    tenant → time at which its retry budget is full again; see 11_retry_budgets.lua
--   ca         string  records of callers whose inputs failed alone; see 5_culprits.lua
--   kc:<input> string  input of a tenant that failed alone, or the tenant itself → until when this is remembered
--   hf         hash    healthy home slot → its speed factor; see 3_slot_factors.lua
--   hp         hash    healthy home slot → its share of a GPU, if that is less than 1
--   hc, hd, hn hashes, string  codes of the slots; see 2_codes.lua
--   i          zset    idle slot → since when it is idle; the fastest first
--   f          string  idle slot on watch
--   c          string  slot that was woken last. It is expected until it claims, or until `coming_until`
--   b:<process> list   wake-ups of a process: which of its slots should claim, and when
--   n          hash    slot → token and fence of its last granted claim
--   h          zset    healthy home slot → time of its last heartbeat, plus the seconds by which the next may be later than usual
--   r:<gateway> stream replies
--   g          zset    gateway → when it last made a call
--   m          string  process that reaps
--   v          hash    flight → its original and the digest; see 9_dedup.lua
--   v:<flight> zset    follower → its number
--   vs         hash    original or follower → its dedup keys
--   vd         zset    follower → its deadline
--   k:<flight> string  kept outcome; see 18_kept.lua
--   z, zl, o, on  hashes, zset, string  dead letters: key → letter, key → what a list shows, key → its number, last number
--   o:<tenant> zset    dead letters of a tenant: key → its number
--   zp:<key>   string  large input of a dead letter
--   oc, ou     zset    tallies of the dead letters and of their bytes
--   qs         zset    queue of the model → until when it may hold data; only for the queue for any version, like ql
--   ql         set     queue of the model that may have dead letters
--
-- The key of an entry is its tenant, a NUL and its id. A member is the entry's number, shape and weight in DIGITS hexadecimal digits,
-- followed by its key. So members sort by arrival. Numbers are never reused: a key that is enqueued again is a new member. There are more
-- digits than needed, because Redis stores sorted sets whose members have up to 64 bytes as lists, and scans those from end to end. An
-- entry that only runs for its followers is stored under its member, so that its key is free.
--
-- Rate limits have a separate key; see 11_limits.lua.

-- `math` and other globals can't be used while a library loads.
local INF = 1 / 0

-- Positions of the first arguments of every step.
local CLOCK, SETTINGS, PATIENCE, HEAD = 1, 2, 3, 3

local function exact(number) return string.format('%.17g', number) end

-- Usual result of a step: the current time, and when the queue's state was created.
local function instants(s) return struct.pack('<dd', s.now, s.q.born) end

-- `unpack` and the stack are limited to a few thousand values, so longer lists are processed in parts.
local PART = 1000

local function as_doubles(numbers)
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
  if #list > 0 and #list <= PART then return redis.call(command, key, unpack(list)) end
  local results = {}
  for first = 1, #list, PART do
    local part = redis.call(command, key, unpack(list, first, math.min(first + PART - 1, #list)))
    for i = 1, #part do results[first + i - 1] = part[i] end
  end
  return results
end

local function clock(text)
  if text ~= '' then return tonumber(text) end
  local time = redis.call('TIME')
  return time[1] + time[2] / 1e6
end

-- Set an expiry on keys that a step may have created, because everything that is stored must expire once all processes are gone. The
-- sweep in 15_fleet.lua renews it. A step with many entries sets each expiry only once, when it saves.
local function lasting(s, ...)
  for i = 1, select('#', ...) do
    if s.later then
      s.later[select(i, ...)] = true
    else
      redis.call('EXPIRE', s.prefix .. select(i, ...), LIFE_SECONDS_TEXT)
    end
  end
end

local memory_of, save, leave, shift, belongings, open
do  -- A library may have only 200 local names.
-- Figures, except those of tiers. What `gate` computes is only valid for a moment, and isn't stored.
local function no_figures()
  local q = {gate_at = -INF, batch_seconds = 0, drain = {}}
  for name in pairs(TIER_START) do q[name] = {} end
  return q
end

local function add_tiers(q, first, last)
  for tier = first, last do
    q.drain[tier] = 0
    for name, start in pairs(TIER_START) do q[name][tier] = start end
  end
  q.tiers = last
end

local function order_of(tiers)
  local order = {}
  for section = 1, BEFORE_TIERS do order[section] = section end
  for tier = 1, tiers do order[#order + 1] = TIERS + tier end
  for section = BEFORE_TIERS + 1, TIERS do order[#order + 1] = section end
  return order
end

local function fresh_figures(now, tiers, max_batch)
  local q = no_figures()
  for name, start in pairs(START) do q[name] = start end
  q.born, q.steps = now, now
  q.max_batch = max_batch
  q.limit = max_batch
  q.size = max_batch
  add_tiers(q, 1, tiers)
  return {q = q, parts = {}, order = order_of(tiers)}
end

-- Cache for each queue of what earlier steps wrote or read. It may be lost at any time, and is cleared when it grows too large.
--
-- `figures` are those that were last saved. They consist of `q`, `parts` with the packed sections in `order`, `first` with the stored first
-- part, which differs after every step, and `renewed_at`, when their expiry was set. They are nil during a step, in case it fails midway.
local remembered, memories = {}, 0

function memory_of(s)
  local memory = remembered[s.prefix]
  if not memory then
    if memories >= MOST_REMEMBERED then remembered, memories = {}, 0 end
    memory, memories = {heard = {}, renewed = {}}, memories + 1
    remembered[s.prefix] = memory
  end
  return memory
end

-- Returns nil if the figures are from another release.
local function unpack_figures(packed, tiers)
  local plain = 0
  for section = 1, TIERS do plain = plain + SECTION_BYTES[section] end
  local stored, at = (#packed - plain) / TIER_BYTES, 1
  if stored < 1 or stored ~= math.floor(stored) then return nil end
  local q, parts, order = no_figures(), {}, order_of(stored)
  for i, section in ipairs(order) do
    local bytes = section <= TIERS and SECTION_BYTES[section] or TIER_BYTES
    parts[i] = string.sub(packed, at, at + bytes - 1)
    at = at + bytes
    if section <= TIERS then
      unpack_section[section](q, parts[i])
    else
      q.drain[section - TIERS] = 0
      unpack_tier(q, section - TIERS, parts[i])
    end
  end
  if q.tiers ~= stored then return nil end
  if tiers <= stored then return {q = q, parts = parts, order = order, first = parts[1]} end
  add_tiers(q, stored + 1, tiers)
  return {q = q, parts = {}, order = order_of(tiers)}
end

local function read_figures(s)
  local key, memory = s.prefix .. 'q', s.memory
  local first, figures = redis.call('GETRANGE', key, '0', LAST_OF_STEP_TEXT), memory.figures
  memory.figures = nil
  if figures and figures.first == first then return figures end
  return first ~= '' and unpack_figures(redis.call('GET', key), s.tiers) or nil
end

-- Write the sections that the step touched. Write all of them if they were never stored in this form, or need a new expiry.
function save(s)
  if s.flush then s.flush(s) end
  if s.later then
    for name in pairs(s.later) do redis.call('EXPIRE', s.prefix .. name, LIFE_SECONDS_TEXT) end
    s.later = nil
  end
  local q, figures, touched, key = s.q, s.figures, s.touched, s.prefix .. 'q'
  local parts, order, last = figures.parts, figures.order, 1
  q.steps = q.steps + 1
  if figures.first then
    for section in pairs(touched) do
      local i = section <= BEFORE_TIERS and section or section + (section > TIERS and BEFORE_TIERS - TIERS or q.tiers)
      parts[i] = section <= TIERS and pack_section[section](q) or pack_tier(q, section - TIERS)
      last = i > last and i or last
    end
  else
    for i, section in ipairs(order) do
      parts[i] = section <= TIERS and pack_section[section](q) or pack_tier(q, section - TIERS)
    end
  end
  local renewed_at = figures.renewed_at
  if figures.first and renewed_at and renewed_at <= s.now and s.now < renewed_at + RENEW_SECONDS then
    redis.call('SETRANGE', key, '0', table.concat(parts, '', 1, last))
  else
    redis.call('SET', key, table.concat(parts), 'EX', FIGURES_SECONDS_TEXT)
    figures.renewed_at = s.now
  end
  -- A queue that isn't used isn't listed again, because processes learn about every listed queue; see `siblings` in 15_fleet.lua.
  if q.slots > 0 or q.fresh > 0 or q.suspects > 0 or q.running > 0 or q.bulk + q.bulk_apart > 0 then
    local listed_at = figures.listed_at
    if not (listed_at and listed_at <= s.now and s.now < listed_at + RENEW_SECONDS) then
      figures.listed_at = s.now
      siblings.list(s, LIFE_SECONDS)
    end
  end
  figures.first = parts[1]
  s.memory.figures = figures
end

-- End a step that changed no figures.
function leave(s)
  s.touched[STEP] = nil
  if s.figures.first and not next(s.touched) then s.memory.figures = s.figures end
end

-- Set all times in a sorted set back.
function shift(key, seconds)
  local all, moved = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES'), {}
  for i = 1, #all, 2 do moved[i], moved[i + 1] = tonumber(all[i + 1]) - seconds, all[i] end
  call_all('ZADD', key, moved)
end

-- Set times back along with the server's clock, because otherwise the queue would stall until they are reached again. Deadlines of entries
-- aren't changed, because gateways know them and withdraw overdue entries.
local function move_back(s, seconds)
  for _, name in ipairs(RELATIVE) do s.q[name] = s.q[name] - seconds end
  for tier, last in ipairs(s.q.rate_last) do s.q.rate_last[tier] = last - seconds end
  for _, name in ipairs({'y', 'h', 'rb'}) do shift(s.prefix .. name, seconds) end
  s.q.latest, s.q.gate_at = s.now, -INF
  s.figures.first = nil
  save(s)
  s.memory.figures = nil
end

-- Names of the keys that are meaningless without the figures.
function belongings(s)
  local names = {'e', 'p', 'b', 'd', 'x', 'y', 'ys', 's', 'i', 'f', 'c', 'n', 'h', 'hf', 'hp', 'hc', 'hd', 'hn', 'g', 'm', 'v', 'vs', 'vd', 'rb', 'ca', 'tw', 'u', 'ua', 'ut'}
  for tier = 1, s.tiers do
    for _, name in ipairs({'l', 'a', 't'}) do names[#names + 1] = name .. tier end
  end
  return names
end

-- Settings that the caller sends as one string. It rarely changes, so it is only parsed when it does.
local settings, settings_known = {}, 0

local function read_settings(text)
  if settings_known >= MOST_SETTINGS then settings, settings_known = {}, 0 end
  local known, words = {}, {string.match(text, SETTINGS_PATTERN)}
  for i, name in ipairs(SETTING_NAMES) do known[name] = tonumber(words[i]) or words[i] end
  known.weighed, known.of_step = known.max_weight > 0 or known.longest > 0, {__index = known}
  known.heaviest = known.max_weight > 0 and known.max_weight or INF
  settings[text], settings_known = known, settings_known + 1
  return known
end

-- Open the state for a step. Times are seconds on the server's clock. Code that changes a figure must mark its section in `touched`. Other
-- fields are the caller's settings.
--
-- Raises OVERDUE if the caller has stopped waiting, because it may have repeated the call and answered a client.
function open(keys, args, looks_only)
  local now, patience = clock(args[CLOCK]), tonumber(args[PATIENCE])
  if patience and now > patience then error(redis.error_reply('OVERDUE ' .. exact(now))) end
  local known = settings[args[SETTINGS]] or read_settings(args[SETTINGS])
  local s = setmetatable({
    prefix = keys[1], now = now, tiers = known.tiers, touched = {[STEP] = true}, memory = remembered[keys[1]], figures = nil, q = nil,
    later = nil, entered = nil, joined = nil,
  }, known.of_step)
  s.memory = s.memory or memory_of(s)
  s.figures = read_figures(s)
  if s.figures then
    s.q = s.figures.q
    s.tiers = s.q.tiers
    if s.now < s.q.latest - CLOCK_STEP and not looks_only then move_back(s, s.q.latest - s.now) end
  else
    s.unknown, s.figures = true, fresh_figures(s.now, s.tiers, s.max_batch)
    s.q = s.figures.q
    if not looks_only then
      for _, name in ipairs(belongings(s)) do  -- Keys that outlived the figures aren't reliable.
        redis.call('UNLINK', s.prefix .. name)
      end
      s.memory.heard, s.memory.renewed = {}, {}
    end
  end
  if not looks_only then
    if s.now > s.q.latest + SWEEP_SECONDS then
      s.q.swept_at = s.now  -- There were no calls or the clock jumped, so don't sweep yet.
      s.touched[FLEET] = true
    end
    s.q.latest = s.now
  end
  return s
end
end

-- Callers that sent inputs on which the model failed. See `core.suspects`.
--
-- A caller is a tenant, a NUL, and the caller in the payload. Its record has the time until which it rides separately, how many of its inputs
-- ran, how many runs failed, and the bytes of its largest output that was left out. Known inputs are keyed by tenant and SHA-1.
local culprits = {}
do
local UNTIL, RAN, BAD, LARGEST = 1, 2, 3, 4
local NO_CALLER = '\160'

-- Bytes of a msgpack value's length field, or of the entire value if it has none, by its first byte. The server's own decoder can't
-- distinguish bytes from strings.
local LENGTHS = {[0xc4] = 1, [0xc5] = 2, [0xc6] = 4, [0xd9] = 1, [0xda] = 2, [0xdb] = 4}
local SIZES = {[0xca] = 5, [0xcb] = 9, [0xcc] = 2, [0xcd] = 3, [0xce] = 5, [0xcf] = 9, [0xd0] = 2, [0xd1] = 3, [0xd2] = 5, [0xd3] = 9}

-- Position after the value that begins at a position.
local function after(text, at)
  local first = string.byte(text, at)
  if LENGTHS[first] then
    local length, begins = struct.unpack('>I' .. LENGTHS[first], text, at + 1)
    return begins + length
  end
  if first >= 0xa0 and first <= 0xbf then return at + 1 + first - 0xa0 end
  if first >= 0x90 and first <= 0x9f then  -- A short list.
    at = at + 1
    for _ = 1, first - 0x90 do at = after(text, at) end
    return at
  end
  return at + (SIZES[first] or 1)
end

-- Packed members of an entry's payload up to its caller, with the header of the list at index 0, and the position after them. Empty if the
-- payload isn't an entry.
function culprits.members_in(payload)
  local first = payload and string.byte(payload) or 0
  local count, at = first >= 0x90 and first <= 0x9f and first - 0x90 or 0, 2
  if first == 0xdc then count, at = struct.unpack('>I2', payload, 2) end
  local members = {[0] = string.sub(payload or '', 1, at - 1)}
  for i = 1, math.min(count, CALLER_POSITION) do
    local position = after(payload, at)
    members[i], at = string.sub(payload, at, position - 1), position
  end
  return members, at
end

function culprits.caller_in(key, payload)
  local entry = culprits.members_in(payload)
  return tenant_of(key) .. '\0' .. (entry[CALLER_POSITION] or NO_CALLER), entry
end

function culprits.callers_of(s, entries)
  local keys, callers = {}, {}
  for i, entry in ipairs(entries) do keys[i] = entry.key end
  local payloads = call_each('HMGET', s.prefix .. 'p', keys)
  for i, entry in ipairs(entries) do
    callers[i] = culprits.caller_in(entry.member and key_of(entry.member) or entry.key, payloads[i])
  end
  return callers
end

local function records(s)
  if not s.records then
    local packed = s.q.apart > 0 and redis.call('GET', s.prefix .. 'ca')
    s.records = packed and cmsgpack.unpack(packed) or {}
  end
  return s.records
end

local function store(s)
  s.q.apart, s.touched[SELDOM] = 0, true
  for _ in pairs(s.records) do s.q.apart = s.q.apart + 1 end
  if s.q.apart > 0 then
    redis.call('SET', s.prefix .. 'ca', cmsgpack.pack(s.records), 'EX', LIFE_SECONDS_TEXT)
  else
    redis.call('DEL', s.prefix .. 'ca')
  end
end

-- A caller's record, or nothing if it hasn't failed for long enough.
local function record_of(s, caller)
  local record = records(s)[caller]
  return record and record[UNTIL] > s.now and record
end

function culprits.ride_apart(s, caller) return record_of(s, caller) and true or false end

-- Drop the records of callers that haven't failed for long enough.
function culprits.tidy(s)
  for caller in pairs(records(s)) do
    if not record_of(s, caller) then
      s.records[caller] = nil
      store(s)
    end
  end
end

-- Record that this many inputs of a caller ran together, if nothing was known about them.
function culprits.ran(s, caller, count, clean)
  local record = record_of(s, caller)
  if record then
    record[RAN] = record[RAN] + count
    record[BAD] = record[BAD] + (clean and 0 or 1)
    if record[RAN] > MEMORY then record[RAN], record[BAD] = record[RAN] / 2, record[BAD] / 2 end
    store(s)
  end
end

function culprits.group_size(s, caller, limit, room)
  local record = record_of(s, caller)
  if not record then return limit end
  local q, share = s.q, math.max(record[BAD], 1) / record[RAN]
  local each = q.alpha > 0 and q.beta / q.alpha or q.beta > 0 and INF or 0
  local searched = share / math.log(2)
  local best = 2 / (searched + math.sqrt(searched * searched + 8 * share * each))  -- See `core.suspects.best_group`.
  if record[LARGEST] > 0 then limit = math.min(limit, math.floor((room or MOST_OUTPUT) / record[LARGEST])) end
  return math.max(1, math.min(limit, math.floor(best + 0.5)))
end

local function oldest_of(s)
  local oldest
  for caller, record in pairs(s.records) do
    if not oldest or record[UNTIL] < s.records[oldest][UNTIL] then oldest = caller end
  end
  return oldest
end

-- Make a caller ride separately from now on. Returns its record.
local function set_apart(s, caller)
  if not records(s)[caller] and s.q.apart >= MOST_APART then s.records[oldest_of(s)] = nil end
  local record = record_of(s, caller) or {s.now, PRIOR, 0, 0}
  record[UNTIL], s.records[caller] = s.now + APART_SECONDS, record
  return record
end

-- Record that a caller's output of this many bytes was left out.
function culprits.left_out(s, caller, size)
  local record = set_apart(s, caller)
  record[LARGEST] = math.max(record[LARGEST], size)
  store(s)
end

-- True if a caller rides separately because of large outputs.
function culprits.sends_large(s, caller)
  local record = record_of(s, caller)
  return record and record[LARGEST] > 0
end

-- Key for remembering an input. `asked` are the packed members of its payload.
local function known_key(s, tenant, entry, asked)
  local parameters = asked[PARAMETERS_POSITION] or ''
  if entry.token then
    local kind = string.sub(asked[INPUT_POSITION], 3, 3)  -- First letter of the first element of a list.
    return s.prefix .. 'kc:' .. tenant .. '\0' .. large.digest(s, entry) .. kind .. redis.sha1hex(parameters)
  end
  return s.prefix .. 'kc:' .. tenant .. '\0' .. redis.sha1hex(asked[INPUT_POSITION] .. parameters)
end

local function know(s, key, generation, error)
  local known = struct.pack('<dd', s.now + KNOWN_SECONDS, generation) .. string.sub(error, 1, ERROR_BYTES)
  redis.call('SET', key, known, 'PX', math.ceil(KNOWN_SECONDS * 1000))
end

-- Record that an input failed alone with this error, in a run that began at `left_at`. `killed` means that it ended its worker several times.
function culprits.found(s, entry, killed, error, left_at)
  local q, key = s.q, key_of(entry.member)
  local caller, asked = culprits.caller_in(key, redis.call('HGET', s.prefix .. 'p', entry.key))
  set_apart(s, caller)
  store(s)
  if asked[INPUT_POSITION] then
    q.known_until = s.now + KNOWN_SECONDS
    know(s, s.prefix .. 'kc:' .. tenant_of(key), ALL_GENERATIONS, '')
    if killed or left_at >= q.generation - SAME_INSTANT then
      know(s, known_key(s, tenant_of(key), entry, asked), killed and ALL_GENERATIONS or q.generation, error)
    end
  end
end

-- Error that is remembered under a key, or false.
local function is_known(s, key)
  local packed = redis.call('GET', key)
  if not packed then return false end
  local instant, generation, rest = struct.unpack('<dd', packed)
  return instant > s.now and (generation == s.q.generation or generation == ALL_GENERATIONS) and string.sub(packed, rest)
end

-- Packed members of an entry's payload if an input of its tenant recently failed alone and the entry may repeat it, otherwise false.
function culprits.may_know(s, entry, payload)
  if s.q.known_until <= s.now or not is_known(s, s.prefix .. 'kc:' .. tenant_of(entry.key)) then
    return false
  end
  local asked = culprits.members_in(payload)
  return (asked[CALLER_POSITION] or NO_CALLER) ~= NO_CALLER and asked
end

-- Error with which the same input from the same tenant recently failed alone, or false.
function culprits.knows(s, entry, payload)
  local asked = culprits.may_know(s, entry, payload)
  return asked and is_known(s, known_key(s, tenant_of(entry.key), entry, asked))
end
end

-- Entries as stored: headers, members and names of submissions.
--
-- A number is the entry's number in its queue, its shape and its weight, in DIGITS hexadecimal digits. A header is the number, tier (plus
-- SHARED if it has dedup keys), arrival, queue deadline, deadline, nonce, PLAIN, and the gateway's name. The name is empty once nobody is
-- waiting for the entry itself. In place of PLAIN, a large entry has a plus sign, its bytes and the token of its input. Headers have more
-- than 64 bytes, because otherwise Redis would store the hash as a list and scan it from end to end.
local SHARED, DIGITS, PLAIN_AT, SEQ_DIGITS, WEIGHT_AT = 64, 32, 66, 14, 25
local pack_header, read_header
local numbers = {fixed = '>Bddd'}  -- Format of the part of a header between number and nonce.
do  -- A library may have only 200 local names.
local READ, ARRIVED_AT, PLAIN, LARGE, NO_TOKEN, LAST_DIGITS = '>Bdddd', DIGITS + 2, '-', '>d', '-----------', {}
local high, high_from, tail, tail_weight, tail_shape = '', -1, '', nil, nil

-- Parts of the numbers of entries with this weight and shape: beginning, end, the sequence number before which both are valid,
-- and the digits in between by sequence number modulo 256.
function numbers.parts(seq, weight, shape)
  local from = seq - seq % 256
  if from ~= high_from then
    high_from, high = from, string.format('%0' .. SEQ_DIGITS - 2 .. 'x', from / 256)
    for last = 0, #LAST_DIGITS == 0 and 255 or -1 do LAST_DIGITS[last] = string.format('%02x', last) end
  end
  if weight ~= tail_weight or shape ~= tail_shape then
    tail_weight, tail_shape = weight, shape
    tail = string.format('%0' .. WEIGHT_AT - 1 - SEQ_DIGITS .. 'x%0' .. DIGITS + 1 - WEIGHT_AT .. 'x', shape, weight)
  end
  return high, tail, from + 256, LAST_DIGITS
end

function numbers.next(seq, weight, shape)
  local first, last = numbers.parts(seq, weight, shape)
  return first .. LAST_DIGITS[seq % 256] .. last
end

function pack_header(entry, tier, gateway)
  local header = entry.number .. struct.pack(numbers.fixed, tier, entry.arrived, entry.queue_due, entry.due) .. struct.pack(NONCE, entry.nonce)
  if entry.bytes > 0 or entry.token then
    return header .. '+' .. struct.pack(LARGE, entry.bytes) .. (entry.token or NO_TOKEN) .. gateway
  end
  return header .. PLAIN .. gateway
end

local function read_rest(entry)
  local header, number, sub = entry.header, entry.number, string.sub
  local tier, _, queue_due, _, nonce = struct.unpack(READ, header, DIGITS + 1)
  local shared = tier > SHARED
  entry.tier, entry.shared, entry.queue_due, entry.nonce = shared and tier - SHARED or tier, shared, queue_due, nonce
  entry.weight, entry.gateway, entry.bytes = tonumber(sub(number, WEIGHT_AT), 16), sub(header, PLAIN_AT + 1), 0
  entry.shape = tonumber(sub(number, SEQ_DIGITS + 1, WEIGHT_AT - 1), 16)
  if string.byte(header, PLAIN_AT) == 43 then
    local token = sub(header, PLAIN_AT + 9, PLAIN_AT + 19)
    entry.gateway = sub(header, PLAIN_AT + 20)
    entry.bytes, entry.token = struct.unpack(LARGE, header, PLAIN_AT + 1), token ~= NO_TOKEN and token or nil
  end
end

-- A claim needs few fields of each entry, so the others are parsed on first access.
local UNREAD = {__index = function(entry, name)
  setmetatable(entry, nil)
  read_rest(entry)
  return entry[name]
end}

-- Create an entry from its header.
function read_header(header, key, member, position)
  local arrived, _, due = struct.unpack('>ddd', header, ARRIVED_AT)
  return setmetatable({
    header = header, number = string.sub(header, 1, DIGITS), arrived = arrived, due = due, key = key, member = member,
    position = position,
  }, UNREAD)
end
end

local function member_of(entry) return entry.number .. entry.key end

-- Weight that counts for an entry. See `QueueLimits.weight`.
local function counted_weight(s, weight)
  if not s.weighed or weight < s.heaviest then return weight end
  return s.heaviest
end

local function weight_of(s, member)
  return counted_weight(s, tonumber(string.sub(member, WEIGHT_AT, DIGITS), 16))
end

-- Shape of a member. Only members of the same shape share a batch.
local function shape_of(member) return string.sub(member, SEQ_DIGITS + 1, WEIGHT_AT - 1) end

local function weight_of_all(s, members)
  local sum = 0
  for _, member in ipairs(members) do sum = sum + weight_of(s, member) end
  return sum
end

-- See `QueueLimits.size`.
local function size_of(s, count, weight)
  local places = weight / s.unit
  return places > count and places or count
end

local function key_of(member) return string.sub(member, DIGITS + 1) end

-- Key of an entry as its client knows it, even if the entry is stored under its member.
local function own_key(entry) return entry.gateway == '' and key_of(entry.key) or entry.key end
local function tenant_of(key) return string.match(key, '^(.*)%z') end

-- Split a list into the elements that pass a test, and the others.
local function split(list, passes)
  local passing, others = {}, {}
  for _, element in ipairs(list) do
    local into = passes(element) and passing or others
    into[#into + 1] = element
  end
  return passing, others
end

local function is_answered(header)
  return string.byte(header) == 33  -- An exclamation mark.
end

-- A submission's name is its nonce in eight bytes and the entry's key. The mark of an answered entry is its nonce and gateway.
local submissions = {}

function submissions.read_name(name) return struct.unpack(NONCE, name), string.sub(name, 9) end
function submissions.name(nonce, key) return struct.pack(NONCE, nonce) .. key end
function submissions.mark(entry) return '!' .. struct.pack(NONCE, entry.nonce) .. entry.gateway end

-- Mark and gateway of an entry, if it still has this member, has no dedup keys, isn't large, and somebody is waiting for it.
function submissions.mark_of_plain(header, member)
  local sub, byte = string.sub, string.byte
  if not header or sub(header, 1, DIGITS) ~= sub(member, 1, DIGITS) then return nil end
  local tier, kind = byte(header, DIGITS + 1), byte(header, PLAIN_AT)
  local gateway = sub(header, PLAIN_AT + 1)
  if tier > SHARED or kind ~= 45 or gateway == '' then return nil end
  return '!' .. sub(header, PLAIN_AT - 8, PLAIN_AT - 1) .. gateway, gateway
end

function submissions.read_mark(header) return struct.unpack(NONCE, header, 2), string.sub(header, 10) end

-- Entries of the members that are still wanted: those that weren't cancelled, answered or enqueued again.
local function wanted(s, members)
  local keys, sub = {}, string.sub
  for i = 1, #members do keys[i] = sub(members[i], DIGITS + 1) end
  local headers, by_position, missing = call_each('HMGET', s.prefix .. 'e', keys), {}, {}
  for i = 1, #members do
    local header, member = headers[i], members[i]
    if header and sub(header, 1, DIGITS) == sub(member, 1, DIGITS) then  -- A mark begins with something else.
      by_position[i] = read_header(header, keys[i], member, i)
    else
      missing[#missing + 1] = member
    end
  end
  if #missing == 0 then return by_position end
  headers = call_each('HMGET', s.prefix .. 'e', missing)
  local entries, at = {}, 0
  for i = 1, #members do
    local entry = by_position[i]
    if not entry then
      at = at + 1
      entry = headers[at] and read_header(headers[at], missing[at], missing[at], i)
    end
    if entry then entries[#entries + 1] = entry end
  end
  return entries
end

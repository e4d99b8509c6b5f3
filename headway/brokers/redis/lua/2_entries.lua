-- Entries as they are stored: their headers, their members, and the names of submissions.

-- Headers: tier, number, arrival, queue deadline, deadline, nonce, weight, PADDING, then the gateway's name: none when nobody waits
-- for the entry itself any more. SHARED is added to the tier of one that has dedup keys. There is padding, for a hash whose values
-- have 64 bytes or less would be stored as a list, which is searched from end to end. A large entry has in its place a plus, its
-- bytes, and the token of its input where that is apart.
local SHARED = 64

local pack_header, read_header

do  -- A library has room for 200 local names.

local HEADER = '>BdddddI4'
local PADDING = '--------------------'
local PADDING_AT = 46
local HEADER_BYTES = 65
local LARGE = '>d'
local NO_TOKEN = '-----------'

function pack_header(entry, tier, gateway)
  local header = struct.pack(HEADER, tier, entry.seq, entry.arrived, entry.queue_due, entry.due, entry.nonce, entry.weight)
  if entry.bytes > 0 or entry.token then
    return header .. '+' .. struct.pack(LARGE, entry.bytes) .. (entry.token or NO_TOKEN) .. gateway
  end
  return header .. PADDING .. gateway
end

-- The entry of a header, of which more may be known.
function read_header(header, key, member, position)
  local tier, seq, arrived, queue_due, due, nonce, weight = struct.unpack(HEADER, header)
  local shared = tier > SHARED
  local entry = {
    tier = shared and tier - SHARED or tier, shared = shared, seq = seq, arrived = arrived, queue_due = queue_due, due = due,
    nonce = nonce, weight = weight, gateway = string.sub(header, HEADER_BYTES + 1), key = key, member = member, position = position,
    bytes = 0,
  }
  if string.byte(header, PADDING_AT) == 43 then
    local token = string.sub(header, PADDING_AT + 9, HEADER_BYTES)
    entry.bytes, entry.token = struct.unpack(LARGE, header, PADDING_AT + 1), token ~= NO_TOKEN and token or nil
  end
  return entry
end

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

-- Weight with which an entry counts, as `QueueLimits.weight`.
local function counted_weight(s, weight)
  if not s.weighed or weight < s.heaviest then
    return weight
  end
  return s.heaviest
end

local function weight_of(s, member)
  return counted_weight(s, tonumber(string.sub(member, SEQ_DIGITS + 1, DIGITS), 16))
end

-- Weight of all these.
local function weight_of_all(s, members)
  local sum = 0
  for _, member in ipairs(members) do
    sum = sum + weight_of(s, member)
  end
  return sum
end

-- As `QueueLimits.size`.
local function size_of(s, count, weight)
  local places = weight / s.unit
  return places > count and places or count
end

local function key_of(member)
  return string.sub(member, DIGITS + 1)
end

-- The key that an entry has for its client. One that goes on when nobody waits for it itself any more is found under its member.
local function own_key(entry)
  return entry.gateway == '' and key_of(entry.key) or entry.key
end

local function tenant_of(key)
  return string.match(key, '^(.*)%z')
end

local function is_answered(header)
  return string.byte(header) == 33  -- An exclamation mark.
end

-- A submission's name is its nonce, in eight bytes, and the entry's key. The mark of an entry that has its outcome is its
-- nonce and its gateway.
local submissions = {}

function submissions.read_name(name)
  return struct.unpack(NONCE, name), string.sub(name, 9)
end

function submissions.name(nonce, key)
  return struct.pack(NONCE, nonce) .. key
end

function submissions.mark(entry)
  return '!' .. struct.pack(NONCE, entry.nonce) .. entry.gateway
end

-- The entry's key, and the mark that it has if a gateway is to read this submission's outcome.
function submissions.marked(name, gateway)
  return string.sub(name, 9), '!' .. string.sub(name, 1, 8) .. gateway
end

function submissions.read_mark(header)
  return struct.unpack(NONCE, header, 2), string.sub(header, 10)
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

-- Large entries: the memory that they take (see `core.queue_limits`), and their inputs, which are stored separately from the payloads.
--
-- Each queue tallies the bytes of its entries by tenant. On a single server all queues share the room, and the set `bq`, next to the key of
-- the limits, lists the queues with large entries. In a cluster each queue has separate room, because a step can't access other nodes.
--
-- An input is stored under a token before its entry is enqueued, and dropped in the step that ends the entry. It also expires some time
-- after the entry's deadline, in case the entry is never enqueued.
local large = {}
do
local function rooms(s) return string.sub(s.limits, 1, -2) .. 'bq' end

local function join_room(s)
  redis.call('SADD', rooms(s), s.prefix)
  redis.call('EXPIRE', rooms(s), LIFE_SECONDS_TEXT)
end

-- Return true if there is room for a new entry of its tenant, considering all queues.
function large.fits(s, entry)
  if entry.bytes == 0 then return true end
  local own, all = 0, 0
  for _, prefix in ipairs(redis.call('SMEMBERS', rooms(s))) do
    local of_tenant, of_all = tallies.of(prefix .. 'b', entry.tenant)
    own, all = own + of_tenant, all + of_all
    if of_all == 0 then redis.call('SREM', rooms(s), prefix) end
  end
  return own + entry.bytes <= s.room - all
end

-- Count an entry's bytes until `let_go` is called.
function large.take(s, entry)
  if entry.bytes > 0 then
    local _, all = tallies.add(s.prefix .. 'b', entry.tenant, entry.bytes)
    if all == entry.bytes then
      join_room(s)
      lasting(s, 'b')
    end
  end
end

function large.let_go(s, entry)
  if entry.bytes > 0 then tallies.add(s.prefix .. 'b', tenant_of(own_key(entry)), -entry.bytes) end
  large.drop(s, entry)
end

-- Drop the input of an entry that wasn't admitted, or had been admitted before.
function large.drop(s, entry)
  if entry.token then redis.call('UNLINK', s.prefix .. 'P:' .. entry.token) end
end

-- Bytes of an entry's payload and its input in total.
function large.length(s, entry, payload)
  return #payload + (entry.token and redis.call('STRLEN', s.prefix .. 'P:' .. entry.token) or 0)
end

-- Bytes of the separately stored input of the entry waiting under a name, or nil if it has none.
function large.apart_of(s, name)
  local header = redis.call('HGET', s.prefix .. 'e', name)
  local token = header and not is_answered(header) and read_header(header).token
  return token and redis.call('STRLEN', s.prefix .. 'P:' .. token)
end

function large.is_there(s, entry)
  return not entry.token or redis.call('EXISTS', s.prefix .. 'P:' .. entry.token) == 1
end

function large.digest(s, entry)
  return entry.digest or redis.sha1hex(redis.call('GET', s.prefix .. 'P:' .. entry.token) or '')
end

-- Move an entry's input to its dead letter. Returns its bytes.
function large.bury(prefix, token, key)
  local from, into = prefix .. 'P:' .. token, prefix .. 'zp:' .. key
  if redis.call('EXISTS', from) == 0 then return 0 end
  redis.call('RENAME', from, into)
  redis.call('EXPIRE', into, LETTER_SECONDS)
  return redis.call('STRLEN', into)
end

-- Renew the queue's place in the room.
function large.renew(s)
  if redis.call('EXISTS', s.prefix .. 'b') == 1 then join_room(s) end
end
end

-- Large entries: the room that they take, as `core.memory_room`, and their inputs, where those are apart from the payloads.
--
-- Each queue counts the bytes of its own entries, by tenant. On one server all queues share one room: `bq`, a set beside the
-- key of the limits, names those that have large entries. In a cluster, where a step cannot leave its node, each has a room of
-- its own.
--
-- An input that is apart was stored ahead of its entry, under a token. It goes when the entry does, in the same step. It has
-- an end of its own besides, beyond the entry's deadline, for an entry that never came.

local large = {}

do

local function rooms(s) return string.sub(s.limits, 1, -2) .. 'bq' end

local function join_room(s)
  redis.call('SADD', rooms(s), s.prefix)
  redis.call('EXPIRE', rooms(s), LIFE_SECONDS_TEXT)
end

-- Whether a new entry's tenant may have so much more, beside what large entries have in all queues of the room.
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

-- An entry takes its room, until it is let go of.
function large.take(s, entry)
  if entry.bytes > 0 then
    local _, all = tallies.add(s.prefix .. 'b', entry.tenant, entry.bytes)
    if all == entry.bytes then
      join_room(s)
      lasting(s, 'b')
    end
  end
end

-- An entry has come to its end.
function large.let_go(s, entry)
  if entry.bytes > 0 then
    tallies.add(s.prefix .. 'b', tenant_of(own_key(entry)), -entry.bytes)
  end
  large.drop(s, entry)
end

-- Drop the input of an entry that is not let in, or was already.
function large.drop(s, entry)
  if entry.token then redis.call('UNLINK', s.prefix .. 'P:' .. entry.token) end
end

-- Bytes of an entry's payload and of its input apart.
function large.length(s, entry, payload)
  return #payload + (entry.token and redis.call('STRLEN', s.prefix .. 'P:' .. entry.token) or 0)
end

-- Bytes of an input that is apart, of an entry that waits under a name; nil when none is.
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

-- Keep the input of an entry as that of its dead letter. Returns its bytes.
function large.bury(prefix, token, key)
  local from, into = prefix .. 'P:' .. token, prefix .. 'zp:' .. key
  if redis.call('EXISTS', from) == 0 then return 0 end
  redis.call('RENAME', from, into)
  redis.call('EXPIRE', into, LETTER_SECONDS)
  return redis.call('STRLEN', into)
end

-- Somebody is there: the queue goes on having its room.
function large.renew(s)
  if redis.call('EXISTS', s.prefix .. 'b') == 1 then join_room(s) end
end

end

-- Replies are added to the stream of the waiting gateway. Their entries stay marked until the replies have been read.
local STREAM_CAP = '100000'

local function send(s, gateway, ...)
  local key = s.prefix .. 'r:' .. gateway
  redis.call('XADD', key, 'MAXLEN', '~', STREAM_CAP, '*', 'v', SCHEMA_TEXT, ...)
  local renewed = memory_of(s).renewed
  if s.now >= (renewed[gateway] or INF) + RENEW_SECONDS or s.now < (renewed[gateway] or INF) then
    redis.call('EXPIRE', key, STREAM_SECONDS_TEXT)
    -- A gateway that hasn't made a call for a long time either reads this, or is swept later.
    redis.call('ZADD', s.prefix .. 'g', 'XX', s.now, gateway)
    renewed[gateway] = s.now
  end
end

-- Mark entries as answered. Drop those that nobody is waiting for.
local function mark(s, entries)
  local keys, marks, unwanted = {}, {}, {}
  for i, entry in ipairs(entries) do
    keys[i] = entry.key
    large.let_go(s, entry)
    if entry.gateway == '' then
      unwanted[#unwanted + 1] = entry.key
    else
      marks[#marks + 1], marks[#marks + 2] = entry.key, submissions.mark(entry)
    end
  end
  if #keys > 0 then
    call_all('HSET', s.prefix .. 'e', marks)
    call_all('HDEL', s.prefix .. 'e', unwanted)
    call_all('HDEL', s.prefix .. 'p', keys)
  end
end

-- Stream fields for entries without an output. `kind` is late, dead, spent or refused, `list` contains the entries with details, and
-- `failure` is why their batch failed. The slots of other shards count, because the entry was waiting for them as well.
local function failure_fields(s, kind, list, left_at, size, failure)
  return {'k', kind, 'd', cmsgpack.pack(list), 't', exact(left_at or s.now), 'e', exact(s.now), 'n', size or 0,
    's', math.max(s.q.slots, s.served), 'f', failure or ''}
end

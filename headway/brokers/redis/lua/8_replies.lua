-- Replies go to the stream of the waiting gateway, and their entries stay marked until they were read.
local STREAM_CAP = '100000'

local function send(s, gateway, ...)
  local key = s.prefix .. 'r:' .. gateway
  redis.call('XADD', key, 'MAXLEN', '~', STREAM_CAP, '*', 'v', SCHEMA_TEXT, ...)
  local renewed = memory_of(s).renewed
  if s.now >= (renewed[gateway] or INF) + RENEW_SECONDS or s.now < (renewed[gateway] or INF) then
    redis.call('EXPIRE', key, STREAM_SECONDS_TEXT)
    -- A gateway that was silent for long either reads this, or is swept away later.
    redis.call('ZADD', s.prefix .. 'g', 'XX', s.now, gateway)
    renewed[gateway] = s.now
  end
end

-- Mark entries as answered. One that nobody waits for is dropped.
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

-- Stream fields for entries without an output. `kind` is late, dead, spent or refused, `list` names the entries with details, and
-- `failure` is why their batch failed. Slots of other shards count, because the entry waited for those too.
local function failure_fields(s, kind, list, left_at, size, failure)
  return {'k', kind, 'd', cmsgpack.pack(list), 't', exact(left_at or s.now), 'e', exact(s.now), 'n', size or 0,
    's', math.max(s.q.slots, s.served), 'f', failure or ''}
end

-- The departure board. Its keys have the fleet's prefix. The first argument is the clock.
--
--   board        stream  notices of the last few minutes: t is the time, n the notice
--   notice_size  string  recent mean size of a notice in bytes, used to trim the stream
--   row:STEP     hash    counts and numbers of the entire fleet in one step, kept for half an hour
--   born         string  1 if the broker had lost an earlier board, otherwise 0, and when the board began
--   recorder     string  process that records the numbers of the fleet, and until when
--   watched      string  until when the board counts as watched
local NOTICE_OVERHEAD = 100  -- Bytes of a stream entry in addition to the notice.
local SIZE_WEIGHT = 0.02  -- Weight of the latest notice in the mean.

local function keep(prefix, now, notice)
  local size = tonumber(redis.call('GET', prefix .. 'notice_size')) or #notice
  size = size + (#notice - size) * SIZE_WEIGHT
  redis.call('SET', prefix .. 'notice_size', string.format('%.1f', size), 'EX', RECENT_SECONDS)
  local most = string.format('%.0f', RECENT_BYTES / (size + NOTICE_OVERHEAD))
  redis.call('XADD', prefix .. 'board', 'MAXLEN', '~', most, '*', 't', exact(now), 'n', notice)
  redis.call('XTRIM', prefix .. 'board', 'MINID', '~',
    string.format('%.0f', (tonumber(redis.call('TIME')[1]) - RECENT_SECONDS) * 1000))
  redis.call('EXPIRE', prefix .. 'board', RECENT_SECONDS)
end

-- Return when the board began, after a 1 if an earlier board was lost. A process that knows the earlier one reveals this.
local function birth(prefix, now, known)
  local born = redis.call('GET', prefix .. 'born')
  if born and (known == '' or known == string.sub(born, 2) or string.sub(born, 1, 1) == '1') then
    return born
  end
  born = (known == '' and '0' or '1') .. (born and string.sub(born, 2) or exact(now))
  redis.call('SET', prefix .. 'born', born, 'EX', LIFE_SECONDS)
  return born
end

-- post: 1 if somebody is watching, 1 if this process records the numbers of the fleet, and when the board began (see `birth`). It may fail if
-- memory is short. Arguments: process, notice, when the board began as far as the process knows, number of arguments for counts; then counts
-- and numbers, each after its name.
together.register('post', function(keys, args)
  local prefix, now = keys[1], clock(args[1])
  if args[3] ~= '' then keep(prefix, now, args[3]) end
  if args[6] then
    local row, figures = prefix .. 'row:' .. string.format('%.0f', math.floor(now / HISTORY_STEP)), 6 + tonumber(args[5])
    for i = 6, figures - 1, 2 do redis.call('HINCRBY', row, args[i], args[i + 1]) end
    if args[figures] then redis.call('HSET', row, unpack(args, figures)) end
    redis.call('EXPIRE', row, HISTORY_SECONDS)
  end
  local records = held_for(prefix .. 'recorder', now, args[2], RECORD_SECONDS) == 0
  if records then redis.call('EXPIRE', prefix .. 'born', LIFE_SECONDS) end
  local until_then = redis.call('GET', prefix .. 'watched')
  local watched = until_then and struct.unpack('<d', until_then) - now or 0
  return {watched > 0 and watched <= WATCH_SECONDS + CLOCK_STEP and 1 or 0, records and 1 or 0, birth(prefix, now, args[4])}
end, {})

-- watch: record that somebody is watching. Returns when the board began; see `birth`.
redis.register_function{function_name = VERSION .. '_watch', flags = {'allow-oom'}, callback = function(keys, args)
  redis.call('SET', keys[1] .. 'watched', struct.pack('<d', clock(args[1]) + WATCH_SECONDS), 'EX', LIFE_SECONDS)
  return redis.call('GET', keys[1] .. 'born') or ''
end}

-- history: rows, each after its step, from a step on ('' for the oldest); the next step, or '' after the last row; and the id of the last
-- notice that is included in the rows. Arguments after the clock: step, maximum number of rows.
redis.register_function{function_name = VERSION .. '_history', flags = {'no-writes', 'allow-oom'}, callback = function(keys, args)
  local newest = math.floor(clock(args[1]) / HISTORY_STEP)
  local first = tonumber(args[2]) or newest - HISTORY_SECONDS / HISTORY_STEP
  local last = math.min(first + tonumber(args[3]) - 1, newest)
  local rows = {}
  for step = first, last do
    local name = string.format('%.0f', step)
    local row = redis.call('HGETALL', keys[1] .. 'row:' .. name)
    if row[1] then rows[#rows + 1], rows[#rows + 2] = name, row end
  end
  local notice = redis.call('XREVRANGE', keys[1] .. 'board', '+', '-', 'COUNT', 1)[1]
  return {rows, last < newest and string.format('%.0f', last + 1) or '', notice and notice[1] or '0-0'}
end}

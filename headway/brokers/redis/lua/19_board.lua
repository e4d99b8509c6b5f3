-- The departure board: its key is the fleet's. Arguments begin with the clock.
--
--   board     stream  whole notices of some minutes: t is the instant, n the notice
--   history   stream  their counts and figures, of half an hour
--   recorder  string  the process that records the figures of the fleet, and until when
--   watched   string  until when the board counts as looked at

local function keep(key, now, notice, most, seconds)
  redis.call('XADD', key, 'MAXLEN', '~', most, '*', 't', exact(now), 'n', notice)
  redis.call('XTRIM', key, 'MINID', '~', string.format('%.0f', (tonumber(redis.call('TIME')[1]) - seconds) * 1000))
  redis.call('EXPIRE', key, seconds)
end

-- Seconds that are left until the instant at the beginning of a string.
local function left(value, now)
  return value and struct.unpack('<d', value) - now or 0
end

-- post: whether somebody looks, and whether this process records the figures of the fleet. It may fail for want of memory.
redis.register_function{function_name = VERSION .. '_post', callback = function(keys, args)
  local now = clock(args[1])
  if args[3] ~= '' then
    keep(keys[1] .. 'board', now, args[3], RECENT_NOTICES, RECENT_SECONDS)
  end
  if args[4] ~= '' then
    keep(keys[1] .. 'history', now, args[4], HISTORY_NOTICES, HISTORY_SECONDS)
  end
  local recorder = redis.call('GET', keys[1] .. 'recorder')
  local rest = left(recorder, now)
  local records = rest <= 0 or rest > RECORD_SECONDS + CLOCK_STEP or string.sub(recorder, 9) == args[2]
  if records then
    redis.call('SET', keys[1] .. 'recorder', struct.pack('<d', now + RECORD_SECONDS) .. args[2], 'EX', LIFE_SECONDS)
  end
  local watched = left(redis.call('GET', keys[1] .. 'watched'), now)
  return {watched > 0 and watched <= WATCH_SECONDS + CLOCK_STEP and 1 or 0, records and 1 or 0}
end}

redis.register_function{function_name = VERSION .. '_watch', flags = {'allow-oom'}, callback = function(keys, args)
  redis.call('SET', keys[1] .. 'watched', struct.pack('<d', clock(args[1]) + WATCH_SECONDS), 'EX', LIFE_SECONDS)
  return 1
end}

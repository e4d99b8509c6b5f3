-- Large outputs that are shared or kept. An output stays as long as somebody has yet to read it or may ask for it.
--
--   Q:<token>  set  names of the submissions that have yet to read it; '' while a step collects them
--   K:<token>  set  keys that keep it
--
-- The output of a single entry is in neither set, and is deleted once the reply has been read. All outputs also expire, because a reader may
-- be gone, and because reply and output are written separately.
do
local function last(key, seconds)
  if redis.call('TTL', key) < seconds then redis.call('EXPIRE', key, math.ceil(seconds)) end
end

-- Record which submissions have yet to read an output.
function large.lend(s, token, names)
  call_all('SADD', s.prefix .. 'Q:' .. token, names)
  last(s.prefix .. 'Q:' .. token, OUTPUT_SECONDS)
  last(s.prefix .. 'R:' .. token, OUTPUT_SECONDS)
end

local function let_go(prefix, token)
  local output, kept = prefix .. 'R:' .. token, redis.call('EXISTS', prefix .. 'K:' .. token) == 1
  if kept then
    return
  elseif redis.call('EXISTS', prefix .. 'Q:' .. token) == 0 then
    redis.call('UNLINK', output)
  elseif redis.call('TTL', output) > OUTPUT_SECONDS then
    redis.call('EXPIRE', output, OUTPUT_SECONDS)
  end
end

-- Record that submissions have read an output.
function large.read(s, token, names)
  call_all('SREM', s.prefix .. 'Q:' .. token, names)
  let_go(s.prefix, token)
end

-- Keep an output under a key for this many seconds.
function large.keep(s, token, key, seconds)
  redis.call('SADD', s.prefix .. 'K:' .. token, key)
  last(s.prefix .. 'K:' .. token, seconds + OUTPUT_SECONDS)
  last(s.prefix .. 'R:' .. token, seconds + OUTPUT_SECONDS)
end

-- Stop keeping an output under a key of this or another queue.
function large.forget(prefix, token, key)
  redis.call('SREM', prefix .. 'K:' .. token, key)
  let_go(prefix, token)
end
end

-- Large outputs that several entries have in common, or that are kept. One stays as long as somebody has yet to read it, or may ask for it.
--
--   Q:<token>  set  those who have yet to read it, by the names of their submissions; '' while a step finds out who they are
--   K:<token>  set  the keys under which it is kept
--
-- An output that only its own entry has is in neither, and goes when that one's reply was read. Each has an end besides: reply and output
-- are two writes, and who was to read it may be gone.

do

local function last(key, seconds)
  if redis.call('TTL', key) < seconds then redis.call('EXPIRE', key, math.ceil(seconds)) end
end

-- These have yet to read an output.
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

-- Submissions of these names have read an output.
function large.read(s, token, names)
  call_all('SREM', s.prefix .. 'Q:' .. token, names)
  let_go(s.prefix, token)
end

-- An output is kept under a key for so many seconds.
function large.keep(s, token, key, seconds)
  redis.call('SADD', s.prefix .. 'K:' .. token, key)
  last(s.prefix .. 'K:' .. token, seconds + OUTPUT_SECONDS)
  last(s.prefix .. 'R:' .. token, seconds + OUTPUT_SECONDS)
end

-- It is kept under that key no longer. The queue may be another than that of the step.
function large.forget(prefix, token, key)
  redis.call('SREM', prefix .. 'K:' .. token, key)
  let_go(prefix, token)
end

end

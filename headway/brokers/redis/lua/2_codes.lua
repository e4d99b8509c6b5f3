-- Codes of this queue: digests of the targets of healthy home slots, then those of cold ones. See `Dedup.serve`.
--
--   hc  hash    healthy home slot → its code
--   hd  hash    cold home slot → its code
--   hn  string  these codes, those of healthy slots first, each group newest first, each followed by a newline. Kept while there are no slots
local codes = {}
do
-- Codes in a hash that aren't in `others`, newest first.
local function ordered(s, hash, others)
  local there, ordered_codes = {}, {}
  for _, code in ipairs(redis.call('HVALS', s.prefix .. hash)) do there[code .. '\n'] = true end
  for _, code in ipairs(others) do there[code] = nil end
  for code in string.gmatch(redis.call('GET', s.prefix .. 'hn') or '', '[^\n]*\n') do
    if there[code] then ordered_codes[#ordered_codes + 1], there[code] = code, nil end
  end
  for code in pairs(there) do table.insert(ordered_codes, 1, code) end
  return ordered_codes
end

local function order(s)
  local ordered_codes = ordered(s, 'hc', {})
  for _, code in ipairs(ordered(s, 'hd', ordered_codes)) do ordered_codes[#ordered_codes + 1] = code end
  if ordered_codes[1] then redis.call('SET', s.prefix .. 'hn', table.concat(ordered_codes), 'EX', LIFE_SECONDS_TEXT) end
end

function codes.note(s, worker, code, hash, other)
  if redis.call('HGET', s.prefix .. hash, worker) ~= code then
    redis.call('HSET', s.prefix .. hash, worker, code)
    redis.call('HDEL', s.prefix .. other, worker)
    lasting(s, hash)
    order(s)
  end
end

function codes.leave(s, worker)
  if redis.call('HDEL', s.prefix .. 'hc', worker) + redis.call('HDEL', s.prefix .. 'hd', worker) > 0 then
    order(s)
  end
end

-- Forget the inputs that the model rejected with an exception. See `Culprits.renew`.
function codes.renew(s)
  s.q.generation, s.touched[FLEET] = math.max(s.now, s.q.generation + GENERATION_STEP), true
end

-- The newest code, or '' if none is known. Slots that only help out here don't count.
local function newest(s)
  local code = s.code
  if not code then
    local known = s.served == 0 or redis.call('EXISTS', s.prefix .. 'hc') == 1
    code = known and string.match(redis.call('GET', s.prefix .. 'hn') or '', '^[^\n]*') or ''
    s.code = code
  end
  return code
end

-- Append the newest code to the flights of identical requests.
function codes.date(s, shares)
  for _, share in ipairs(shares) do
    if share[KIND] == SAME then share[FLIGHT] = string.match(share[FLIGHT], '^(.*#)') .. newest(s) end
  end
end

-- Return true if an outcome matches the code and one of the versions in the name of a flight of identical requests. `ran` is the version
-- and the code that produced the outcome.
function codes.of_flight(flight, ran)
  local version, code = string.match(ran, '^(.*)#(.-)$')
  if string.match(flight, '#([^#]*)$') ~= code then return false end
  local asked = string.match(flight, '@([^@%z]*)#[^#]*$') or ''
  return version == '' or string.find(',' .. asked .. ',', ',' .. version .. ',', 1, true) ~= nil
end
end

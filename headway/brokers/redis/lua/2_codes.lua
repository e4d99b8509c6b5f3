-- Which code answers here: digests of the targets of the healthy slots at home, then those of cold ones, as `Dedup.serve` has them.
--
--   hc  hash    healthy slot at home here → its code
--   hd  hash    cold slot at home here → its code
--   hn  string  these codes, those of healthy slots before the others, of both the newest first, each with a newline behind it; the last ones while no slot is there
local codes = {}

do

-- Codes that a hash has and `others` has not, the newest first.
local function ordered(s, hash, others)
  local there, found = {}, {}
  for _, code in ipairs(redis.call('HVALS', s.prefix .. hash)) do
    there[code .. '\n'] = true
  end
  for _, code in ipairs(others) do there[code] = nil end
  for code in string.gmatch(redis.call('GET', s.prefix .. 'hn') or '', '[^\n]*\n') do
    if there[code] then found[#found + 1], there[code] = code, nil end
  end
  for code in pairs(there) do table.insert(found, 1, code) end
  return found
end

local function order(s)
  local found = ordered(s, 'hc', {})
  for _, code in ipairs(ordered(s, 'hd', found)) do found[#found + 1] = code end
  if found[1] then
    redis.call('SET', s.prefix .. 'hn', table.concat(found), 'EX', LIFE_SECONDS_TEXT)
  end
end

local function note(s, hash, other, worker, code)
  if redis.call('HGET', s.prefix .. hash, worker) ~= code then
    redis.call('HSET', s.prefix .. hash, worker, code)
    redis.call('HDEL', s.prefix .. other, worker)
    lasting(s, hash)
    order(s)
  end
end

function codes.serve(s, worker, code) note(s, 'hc', 'hd', worker, code) end

function codes.rest(s, worker, code) note(s, 'hd', 'hc', worker, code) end

function codes.leave(s, worker)
  if redis.call('HDEL', s.prefix .. 'hc', worker) + redis.call('HDEL', s.prefix .. 'hd', worker) > 0 then
    order(s)
  end
end

-- Inputs on which the model only raised are known no more: as `Culprits.renew`.
function codes.renew(s)
  s.q.generation, s.touched[FLEET] = math.max(s.now, s.q.generation + GENERATION_STEP), true
end

-- The newest code; '' while none is known. Slots that are at home in another shard, and help here, are not known.
local function newest(s)
  local code = s.code
  if not code then
    local known = s.served == 0 or redis.call('EXISTS', s.prefix .. 'hc') == 1
    code = known and string.match(redis.call('GET', s.prefix .. 'hn') or '', '^[^\n]*') or ''
    s.code = code
  end
  return code
end

-- Have the flights of identical requests end with the newest code.
function codes.date(s, shares)
  for _, share in ipairs(shares) do
    if share[KIND] == SAME then
      share[FLIGHT] = string.match(share[FLIGHT], '^(.*#)') .. newest(s)
    end
  end
end

-- Whether an outcome is of the code, and of one of the versions, that a flight of identical requests ends with. `ran` is the version
-- and the code that have run.
function codes.of_flight(flight, ran)
  local version, code = string.match(ran, '^(.*)#(.-)$')
  if string.match(flight, '#([^#]*)$') ~= code then return false end
  local asked = string.match(flight, '@([^@%z]*)#[^#]*$') or ''
  return version == '' or string.find(',' .. asked .. ',', ',' .. version .. ',', 1, true) ~= nil
end

end

-- Kept outcomes and their budgets. See `core.retention`. On a single server all queues share an account. In a cluster each queue has its own,
-- because a step can't access other nodes. The keys of an account are next to those of the limits:
--
--   kb          zset    tally of bytes; see 1_tallies.lua
--   kn          string  number of the last kept outcome
--   kd          zset    outcome → its expiry
--   ko:<tenant> zset    outcome → its number; outcomes of identical requests are dropped first
--
-- An outcome's name is its bytes, then a dot and a token if its output is stored separately, and its key. The server expires the keys, and
-- their bytes are removed from the account in the next step that keeps something or reaps.
do
local LAST = 2 ^ 52
local MOST = 200  -- Maximum number of expired outcomes that one step removes from the account.

local function account(s) return string.sub(s.limits, 1, -2) end

local function name_of(key, outcome)
  return string.format('%d', outcome.weight or FAILURE_BYTES) .. (outcome.token and '.' .. outcome.token or '') .. ' ' .. key
end

local function take_off(base, name)
  if redis.call('ZREM', base .. 'kd', name) == 0 then return end
  local weight, tenant = string.match(name, '^(%d+)%S* .*:k:%a+%z(.*)%z')
  redis.call('ZREM', base .. 'ko:' .. tenant, name)
  local _, all = tallies.add(base .. 'kb', tenant, -weight)
  if all <= 0 then redis.call('DEL', base .. 'kn') end  -- Nothing is kept, so numbers may start over.
end

local function drop(base, name)
  local token, key = string.match(name, '^%d+%.?(%S*) (.*)$')
  redis.call('DEL', key)
  take_off(base, name)
  if token ~= '' then large.forget(string.match(key, '^(.-:)k:%a+%z'), token, key) end
end

local function drop_oldest(base, tenant)
  local oldest = redis.call('ZRANGE', base .. 'ko:' .. tenant, 0, 0)[1]
  if oldest then drop(base, oldest) end
  return oldest
end

function forget_outcome(s, flight)
  if s.kept_read then s.kept_read[flight] = nil end
  local key = s.prefix .. 'k:' .. flight
  local packed = redis.call('GET', key)
  if packed then drop(account(s), name_of(key, cmsgpack.unpack(packed).outcome)) end
end

function forget_ended(s)
  local base = account(s)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', base .. 'kd', '-inf', s.now, 'LIMIT', 0, MOST)) do
    drop(base, name)
  end
end

function renew_account(s)
  local base = account(s)
  for _, name in ipairs({'kb', 'kn', 'kd'}) do redis.call('EXPIRE', base .. name, ACCOUNT_SECONDS) end
end

-- Keep an outcome, as returned by `kept_under`, and its separately stored output. A `spare` outcome is dropped before others of its tenant.
function keep_outcome(s, flight, spare, kept)
  if s.kept_read then s.kept_read[flight] = nil end
  forget_ended(s)
  local base, key, tenant = account(s), s.prefix .. 'k:' .. flight, string.match(flight, '^%a+%z(.*)%z')
  local seconds, outcome = kept.seconds, kept.outcome
  local weight, token = outcome.weight or FAILURE_BYTES, outcome.token
  local packed = redis.call('SET', key, cmsgpack.pack(kept), 'PX', math.ceil(seconds * 1000), 'GET')
  if packed then
    local before = cmsgpack.unpack(packed).outcome
    take_off(base, name_of(key, before))
    if before.token and before.token ~= token then large.forget(s.prefix, before.token, key) end
  end
  if token then large.keep(s, token, key, seconds) end
  local name, number = name_of(key, outcome), redis.call('INCR', base .. 'kn') + (spare and 0 or LAST)
  redis.call('ZADD', base .. 'kd', s.now + seconds, name)
  redis.call('ZADD', base .. 'ko:' .. tenant, number, name)
  redis.call('EXPIRE', base .. 'ko:' .. tenant, ACCOUNT_SECONDS)
  local own, all = tallies.add(base .. 'kb', tenant, weight)
  if own == weight then renew_account(s) end
  local total, most = string.match(s.kept, '^(%d+),(%d+)')
  total, most = tonumber(total), tonumber(most)
  if own > most or all > total then
    local function lose(loser) return drop_oldest(base, loser) end
    tallies.hold(base .. 'kb', most, lose, tenant)
    tallies.hold(base .. 'kb', total, lose)
  end
end
end

-- What the queue learns: arrival rates, the cost of batches, the busy share. See `core.service_model` and `core.queue`.

-- Share of a tier's rate that is left since it was last updated.
local function decay_of(q, tier, now)
  local elapsed = now - q.rate_last[tier]
  return elapsed > 0 and math.exp(-elapsed / RATE_TIME) or 1
end

local function start_clock(s, tier)
  s.q.rate_last[tier] = s.now
  s.touched[TIERS + tier] = true
end

local function observe_arrival(s, tier, weight)
  local q, now = s.q, s.now
  local mean = q.mean[tier]
  s.touched[TIERS + tier] = true
  q.mean[tier] = mean + (counted_weight(s, weight) - mean) * (mean == 0 and 1 or MEAN_WEIGHT)
  local last = q.rate_last[tier]
  if last == now then  -- One of several in this step.
    q.rate_sum[tier] = q.rate_sum[tier] + 1 / RATE_TIME
    return
  elseif last == -INF then
    return start_clock(s, tier)
  end
  local factor = decay_of(q, tier, now)
  q.rate_sum[tier] = q.rate_sum[tier] * factor + 1 / RATE_TIME
  q.rate_unseen[tier] = q.rate_unseen[tier] * factor
  q.rate_last[tier] = math.max(last, now)
end

local function rate_of(s, tier)
  local q = s.q
  if q.rate_last[tier] == -INF then start_clock(s, tier) end
  local factor = decay_of(q, tier, s.now)
  return q.rate_sum[tier] * factor / math.max(1 - q.rate_unseen[tier] * factor, LEAST_SEEN)
end

-- See `ArrivalRate.after_rest`.
local function rate_after_rest(s, tier) return s.q.rate_sum[tier] * decay_of(s.q, tier, s.now) end
local function batch_seconds(q, size) return q.alpha + q.beta * math.min(size, q.largest * REACH) end

local observe_batch
do  -- A library may have only 200 local names.
-- Seconds that count for a batch. See `ServiceModel._tamed`.
local function tamed(q, size, seconds)
  local expected = batch_seconds(q, size)
  local most = math.max(STRAY * expected, expected + STRAY_DEVIATIONS * q.deviation)
  local strays = q.w >= STRAY_KNOWN and seconds > most
  local alone = strays and q.strays <= 0
  if STRAY * seconds < expected then
    q.strays = math.min(q.strays, 0) - 1
  else
    q.strays = strays and 1 or 0
  end
  return alone and most or seconds
end

function observe_batch(s, size, seconds)
  local q = s.q
  s.touched[LEARNT] = true
  seconds = tamed(q, size, seconds)
  local decay = q.strays > -FASTER and DECAY or FORGETTING
  q.largest = math.max(size, q.largest * DECAY)
  q.w = q.w * decay + 1
  q.n = q.n * decay + size
  q.l = q.l * decay + seconds
  q.nn = q.nn * decay + size * size
  q.nl = q.nl * decay + size * seconds
  local mean_n, mean_l = q.n / q.w, q.l / q.w
  local variance = q.nn / q.w - mean_n * mean_n
  if variance > SPREAD then q.beta = math.max(0, (q.nl / q.w - mean_n * mean_l) / variance) end
  q.alpha = mean_l - q.beta * mean_n
  if q.alpha < 0 then q.alpha, q.beta = 0, mean_l / mean_n end
  q.off = q.off * decay + math.abs(seconds - q.alpha - q.beta * size)
  q.deviation = NORMAL * q.off / q.w
end
end

local function note_busy(s)
  local q, now = s.q, s.now
  s.touched[DEPARTED] = true
  local share = q.slots > 0 and math.min(1, q.busy / q.slots) or 0
  local weight = 1 - math.exp(-math.max(0, now - q.busy_at) / BUSY_TIME)
  q.utilisation = q.utilisation + (share - q.utilisation) * weight
  q.busy_at = now
end

-- Load that policies are based on: the time, when the queue's state was created, and the fields of `core.departure.Load`.
local function load_of(s)
  local q, now, rate, sizes = s.q, s.now, 0, 0
  for tier = 1, s.tiers do
    local arriving = rate_of(s, tier)
    rate, sizes = rate + arriving, sizes + arriving * size_of(s, 1, q.mean[tier])
  end
  local entry_size = sizes > rate and sizes / rate or 1
  return struct.pack(LOAD_FORMAT, EACH_OF_LOAD)
end

-- Count the healthy slots, and sum their shares of GPUs. Returns true if the number of slots changed.
local function count_slots(s)
  local q, since = s.q, '(' .. exact(s.now - DEGRADED_AFTER)
  local healthy = redis.call('ZCOUNT', s.prefix .. 'h', since, '+inf')
  local whole = healthy
  if q.shared > 0 then
    whole = 0
    for _, worker in ipairs(redis.call('ZRANGEBYSCORE', s.prefix .. 'h', since, '+inf')) do
      whole = whole + tonumber(redis.call('HGET', s.prefix .. 'hp', worker) or 1)
    end
  end
  if healthy > 0 and whole ~= q.known_slots then
    q.known_slots = whole
    q.gate_at = -INF
    s.touched[FLEET] = true
  end
  if healthy == q.slots then return false end
  s.touched[FLEET] = true
  codes.renew(s)
  q.slots = healthy
  q.gate_at = -INF
  return true
end

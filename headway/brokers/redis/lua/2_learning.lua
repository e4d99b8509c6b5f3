-- What is learnt: arrival rates, the cost of batches, the busy share. As `core.service_model` and `core.queue`.

local function decay_rate(q, tier, now)
  local last = q.rate_last[tier]
  if last == -INF then
    q.rate_last[tier] = now
    return
  end
  local elapsed = now - last
  if elapsed <= 0 then
    return
  end
  local factor = math.exp(-elapsed / RATE_TIME)
  q.rate_sum[tier] = q.rate_sum[tier] * factor
  q.rate_unseen[tier] = q.rate_unseen[tier] * factor
  q.rate_last[tier] = now
end

local function observe_arrival(q, tier, now, weight)
  local mean = q.mean[tier]
  q.mean[tier] = mean + (weight - mean) * (mean == 0 and 1 or MEAN_WEIGHT)
  local count = q.rate_last[tier] == -INF and 0 or 1
  decay_rate(q, tier, now)
  q.rate_sum[tier] = q.rate_sum[tier] + count / RATE_TIME
end

local function rate_of(q, tier, now)
  decay_rate(q, tier, now)
  return q.rate_sum[tier] / math.max(1 - q.rate_unseen[tier], LEAST_SEEN)
end

local function size_rate(s, tier)
  return rate_of(s.q, tier, s.now) * size_of(s, 1, s.q.mean[tier])
end

local function observe_batch(q, size, seconds)
  q.largest = math.max(size, q.largest * DECAY)
  q.w = q.w * DECAY + 1
  q.n = q.n * DECAY + size
  q.l = q.l * DECAY + seconds
  q.nn = q.nn * DECAY + size * size
  q.nl = q.nl * DECAY + size * seconds
  local mean_n, mean_l = q.n / q.w, q.l / q.w
  local variance = q.nn / q.w - mean_n * mean_n
  if variance > SPREAD then
    q.beta = math.max(0, (q.nl / q.w - mean_n * mean_l) / variance)
  end
  q.alpha = mean_l - q.beta * mean_n
  if q.alpha < 0 then
    q.alpha, q.beta = 0, mean_l / mean_n
  end
  q.off = q.off * DECAY + math.abs(seconds - q.alpha - q.beta * size)
  q.deviation = NORMAL * q.off / q.w
end

local function batch_seconds(q, size)
  return q.alpha + q.beta * math.min(size, q.largest * REACH)
end

local function note_busy(q, now)
  local share = q.slots > 0 and math.min(1, q.busy / q.slots) or 0
  local weight = 1 - math.exp(-math.max(0, now - q.busy_at) / BUSY_TIME)
  q.utilisation = q.utilisation + (share - q.utilisation) * weight
  q.busy_at = now
end

-- What policies go by, in the order of `core.departure.Load`, after the instant and the queue's birth.
local function load_of(s)
  local q, now, rate, sizes = s.q, s.now, 0, 0
  for tier = 1, s.tiers do
    rate = rate + rate_of(q, tier, now)
    sizes = sizes + size_rate(s, tier)
  end
  return struct.pack('<dddddddddddddd', now, q.born, rate, q.alpha, q.beta, q.slots, q.limit, q.fresh, q.utilisation, q.wait,
    q.departures, q.deviation, q.largest, sizes > rate and sizes / rate or 1)
end

-- Healthy slots, from heartbeats; true when they have changed.
local function count_slots(s)
  local q = s.q
  local healthy = redis.call('ZCOUNT', s.prefix .. 'h', '(' .. exact(s.now - DEGRADED_AFTER), '+inf')
  if healthy == q.slots then
    return false
  end
  if healthy > q.slots then
    q.generation = q.generation + 1
  end
  q.slots = healthy
  if healthy > 0 then
    q.known_slots = healthy
  end
  q.gate_at = -INF
  return true
end

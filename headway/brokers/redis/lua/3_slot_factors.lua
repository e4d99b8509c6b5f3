-- Speed of slots relative to each other. See `core.slot_factors`.

-- Multiplier that ranks a slot above any idle time.
local LONGER_THAN_IDLE = 1e10

local begin_factor, forget_factor, standing_of, rank_of, observe_run
do
-- Record of a healthy home slot: its measured factor, its number of batches, the position of its factor, and how many batches had left when
-- its last batch returned.
local SLOT = '<dddd'

local function count(s, position, change)
  local q = s.q
  if position ~= USUAL_PACE then
    q[PACES[position]] = q[PACES[position]] + change
    q.differ = q.differ + change
    s.touched[FLEET] = true
  end
end

local function scale_of(q)
  if q.differ == 0 or q.slots <= 0 then return 1 end
  local inverse = 0
  for position, factor in ipairs(FACTORS) do inverse = inverse + q[PACES[position]] / factor end
  return (inverse + math.max(q.slots - q.differ, 0)) / math.max(q.slots, q.differ)
end

local function known_of(s, worker)
  local packed = redis.call('HGET', s.prefix .. 'hf', worker)
  if packed then return struct.unpack(SLOT, packed) end
  return nil, 0, USUAL_PACE, s.q.departures
end

local function worker_of(slot) return string.match(slot, '%z(.*)$') end

-- Store a slot's share of its GPU, unless the share is 1.
local function set_share(s, worker, share)
  local q, change = s.q, 0
  if share < 1 then
    change = redis.call('HSET', s.prefix .. 'hp', worker, exact(share))
    lasting(s, 'hp')
  elseif q.shared > 0 then
    change = -redis.call('HDEL', s.prefix .. 'hp', worker)
  end
  if change ~= 0 then
    q.shared = q.shared + change
    s.touched[FLEET] = true
  end
end

function begin_factor(s, worker, share)
  set_share(s, worker, share)
  redis.call('HSETNX', s.prefix .. 'hf', worker, struct.pack(SLOT, 1, 0, USUAL_PACE, s.q.departures))
end

function forget_factor(s, worker)
  set_share(s, worker, 1)
  local _, _, position = known_of(s, worker)
  count(s, position, -1)
  redis.call('HDEL', s.prefix .. 'hf', worker)
end

-- Factor of a slot and, if the rule needs it, the number of batches that have left since it last returned one.
function standing_of(s, slot)
  if s.q.team == 0 then return 1, 0 end
  local _, _, position, ran_at = known_of(s, worker_of(slot))
  return FACTORS[position] * scale_of(s.q), s.q.departures - ran_at
end

-- Rank of a slot among idle slots.
function rank_of(s, slot)
  if s.q.differ == 0 or s.q.headway < 0 then return USUAL_PACE end
  local _, _, position = known_of(s, worker_of(slot))
  return position
end

local function weight_of(deviation, batches)
  local ratio = (FACTOR_ERROR / math.max(deviation, LEAST_DEVIATION)) ^ 2
  return math.max(1 / (batches + FACTOR_PRIOR), math.min(FACTOR_MOST_WEIGHT, 2 * ratio / (1 + ratio)))
end

local function position_of(raw)
  return math.min(math.max(math.floor(math.log(raw) / FACTOR_STEP + 0.5) + USUAL_PACE, 1), MOST_PACE)
end

-- Learn from a run: the cost of batches and, unless the batch was `parted`, the speed of the slot.
function observe_run(s, slot, size, seconds, parted)
  local q, worker = s.q, worker_of(slot)
  local raw, batches, before, ran_at = known_of(s, worker)
  local factor, foretold = FACTORS[before] * scale_of(q), batch_seconds(q, size)
  if raw and foretold > 0 and seconds > 0 and not parted then
    local ratio = math.min(math.max(seconds / foretold, raw / FACTOR_STRAY), raw * FACTOR_STRAY)
    local deviation = (s.longest > 0 and PADDED_DOUBT or 1) * q.deviation / foretold
    local weight = weight_of(deviation, batches)
    raw = raw + (ratio - raw) * weight
    local begins = q.departures < FACTOR_UNSURE_FOR * q.slots
    local unsure = begins and math.abs(raw - 1) < FACTOR_UNSURE * deviation * math.sqrt(weight)
    local position = unsure and USUAL_PACE or position_of(raw)
    if position ~= before then
      count(s, before, -1)
      count(s, position, 1)
    end
    redis.call('HSET', s.prefix .. 'hf', worker, struct.pack(SLOT, raw, batches + 1, position, q.departures))
  end
  observe_batch(s, size, seconds / factor)
end
end

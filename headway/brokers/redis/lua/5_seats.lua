-- Bulk entries, which take empty seats and idle GPUs. See `core.bulk`. Their tier comes after the last configured tier.
local bulk = {}
local SEATS, WHOLE = 's', 'w'  -- What they occupy in a lease: some of its seats, or all of them.
do
function bulk.waits(s) return s.q.bulk + s.q.bulk_apart > 0 end

function bulk.has(s, member)
  return redis.call('ZSCORE', s.prefix .. 'u', member) or redis.call('ZSCORE', s.prefix .. 'ua', member)
end

-- True if there are already enough bulk entries.
function bulk.enough(s)
  return s.q.bulk + s.q.bulk_apart >= BATCHES_WAITING * s.max_batch * math.max(s.q.slots, 1)
end

local function rides_apart(entry, bytes) return entry.shape > 0 or bytes > PAGE end

-- Enqueue a new entry with this many payload bytes.
function bulk.push(s, entry, bytes)
  local q, p = s.q, s.prefix
  if q.bulk_used == 0 then q.bulk_credit = FIRST_CREDIT end
  q.bulk_used, s.touched[BULK] = 1, true
  if rides_apart(entry, bytes) then
    redis.call('ZADD', p .. 'ua', q.seq, entry.member)
    q.bulk_apart = q.bulk_apart + 1
    return lasting(s, 'ua')
  end
  local tenant = tenant_of(key_of(entry.member))
  local latest = math.max(tonumber(redis.call('ZSCORE', p .. 'ut', tenant) or 0), q.bulk_next - 1)
  redis.call('ZADD', p .. 'u', math.floor(latest) + 1, entry.member)
  redis.call('ZADD', p .. 'ut', latest + cost_of(s, entry.weight, bytes), tenant)
  q.bulk = q.bulk + 1
  lasting(s, 'u', 'ut')
end

-- Requeue entries that never ran, ahead of all others.
function bulk.hand_back(s, entries)
  local q, p = s.q, s.prefix
  q.bulk_back, s.touched[BULK] = q.bulk_back - #entries, true
  for i, entry in ipairs(entries) do
    local apart = rides_apart(entry, bytes_of(s, entry.member))
    redis.call('ZADD', p .. (apart and 'ua' or 'u'), q.bulk_back + i, entry.member)
    q.bulk, q.bulk_apart = q.bulk + (apart and 0 or 1), q.bulk_apart + (apart and 1 or 0)
    lasting(s, apart and 'ua' or 'u')
  end
end

-- Remove a waiting entry and refund its tenant. Returns false if it wasn't there.
function bulk.drop(s, entry)
  local q, p = s.q, s.prefix
  s.touched[BULK] = true
  if redis.call('ZREM', p .. 'ua', entry.member) == 1 then
    q.bulk_apart = q.bulk_apart - 1
    return true
  end
  local round = tonumber(redis.call('ZSCORE', p .. 'u', entry.member) or INF)
  if redis.call('ZREM', p .. 'u', entry.member) == 0 then return false end
  local tenant = tenant_of(key_of(entry.member))
  local latest = round <= 0 and 0 or tonumber(redis.call('ZSCORE', p .. 'ut', tenant) or 0)
  if latest > q.bulk_next - 1 then
    redis.call('ZADD', p .. 'ut', latest - cost_of(s, entry.weight, bytes_of(s, entry.member)), tenant)
  end
  q.bulk = q.bulk - 1
  if q.bulk == 0 then redis.call('DEL', p .. 'ut') end
  return true
end

-- Take entries in turn, up to this number and total weight. If `first` is set, one entry may exceed the weight.
local function take(s, count, weight, first)
  local q, p, members = s.q, s.prefix, {}
  count = math.min(count, q.bulk)
  if count < 1 or (weight <= 0 and not first) then return members end
  local waiting, last = redis.call('ZRANGE', p .. 'u', 0, count - 1, 'WITHSCORES'), nil
  for i = 1, #waiting, 2 do
    local member = waiting[i]
    local heavy = s.weighed and weight_of(s, member) or 1
    if not (first and i == 1) and (weight <= 0 or (s.weighed and heavy > weight)) then break end
    members[#members + 1], last = member, tonumber(waiting[i + 1])
    weight = weight - heavy
  end
  s.touched[BULK] = true
  if #members == 0 then
    q.bulk = #waiting > 0 and q.bulk or 0
    return members
  end
  redis.call('ZREMRANGEBYRANK', p .. 'u', 0, #members - 1)
  q.bulk, q.bulk_next = q.bulk - #members, math.max(q.bulk_next, last + 1)
  if q.bulk <= 0 then
    q.bulk = 0
    redis.call('DEL', p .. 'ut')
  elseif redis.call('ZCARD', p .. 'ut') > q.bulk + FORGET_ABOVE then
    redis.call('ZREMRANGEBYSCORE', p .. 'ut', '-inf', q.bulk_next - 1)
  end
  return members
end

-- Sort the next entries in turn: those up to a weight come first, the heaviest of them first. See `core.bulk.BulkClass._by_nearness`.
local function by_nearness(s, weight, limit)
  local waiting, lighter, heavier = redis.call('ZRANGE', s.prefix .. 'u', 0, NEAR_BATCHES * limit - 1, 'WITHSCORES'), {}, {}
  for i = 1, #waiting, 2 do
    local own = weight_of(s, waiting[i])
    local into = own > weight and heavier or lighter
    into[#into + 1] = {member = waiting[i], weight = own, distance = math.abs(own - weight), turn = i, bytes = 0, again = tonumber(waiting[i + 1]) <= 0}
  end
  nearest.sort(lighter)
  nearest.sort(heavier)
  for _, line in ipairs(heavier) do lighter[#lighter + 1] = line end
  return lighter
end

-- Take entries out of turn. Each costs its tenant the padded weight. Returns their members.
local function take_early(s, taken, weight)
  local q, p, members = s.q, s.prefix, {}
  for i, candidate in ipairs(taken) do members[i] = candidate.member end
  call_all('ZREM', p .. 'u', members)
  q.bulk, s.touched[BULK] = q.bulk - #members, true
  nearest.recharge(s, p .. 'ut', q.bulk_next - 1, split(taken, function(candidate) return not candidate.again end), weight)
  if q.bulk <= 0 or redis.call('ZCOUNT', p .. 'u', '(0', '+inf') == 0 then  -- Requeued entries have no turns.
    redis.call('DEL', p .. 'ut')
  end
  return members
end

-- Take the entries that are nearest in weight to the heaviest one in a batch. See `core.bulk.BulkClass.fill_near`.
local function fill_near(s, count, weight, members, heaviest, limit, padded)
  local taken = {}
  for _, candidate in ipairs(by_nearness(s, heaviest, limit)) do
    if #taken >= count or weight <= 0 then break end
    local fits = candidate.weight <= heaviest or (members + #taken + 1) * candidate.weight <= padded
    if fits and candidate.weight <= weight then taken[#taken + 1], weight = candidate, weight - candidate.weight end
  end
  return take_early(s, taken, heaviest)
end

-- Take an entire batch of entries with similar weight.
local function take_near(s, limit, weight)
  local members, padded = take(s, 1, weight, true), limit * s.longest
  if members[1] then
    local first = weight_of(s, members[1])
    local count = math.min(limit, math.floor(padded / first)) - 1
    for _, member in ipairs(fill_near(s, count, weight - first, 1, first, limit, padded)) do
      members[#members + 1] = member
    end
  end
  return members
end

-- Take entries that ride separately, in order, beginning with the first. The others must have the same shape and fit.
local function take_apart(s, count, weight)
  local q, p, members, shape, pages = s.q, s.prefix, {}, nil, MOST_PAGES
  for _, member in ipairs(redis.call('ZRANGE', p .. 'ua', 0, APART_AHEAD - 1)) do
    local heavy, own = s.weighed and weight_of(s, member) or 1, math.ceil(bytes_of(s, member) / PAGE)
    local large_one = own > 1
    if not shape or (shape == shape_of(member) and #members < count and weight > 0 and (not s.weighed or heavy <= weight) and (not large_one or own <= pages)) then
      shape = shape or shape_of(member)
      members[#members + 1] = member
      weight, pages = weight - heavy, large_one and pages - own or pages
    end
  end
  call_all('ZREM', p .. 'ua', members)
  q.bulk_apart = #members > 0 and q.bulk_apart - #members or 0
  s.touched[BULK] = true
  return members
end

-- Size up to which bulk entries may fill a batch. See `core.bulk.seats`.
local function seats(s, size, limit, waited, filled)
  local alpha, beta = s.q.alpha, s.q.beta
  if s.longest > 0 then  -- See `QueueLimits.line_at`.
    local each = (alpha + beta * s.max_batch) / (s.fixed + s.longest)
    alpha, beta = each * s.fixed, each * filled / s.max_batch
  end
  if alpha + beta * limit <= STRETCH * (alpha + beta * size) then return limit end
  return math.max(size, math.min(limit, (WITHIN * s.promise - waited - alpha) / beta))
end

-- Give a batch's empty seats to bulk entries. Returns how many took one.
function bulk.fill(s, entries, limit, size, waited)
  local q, before = s.q, #entries
  q.bulk_credit, s.touched[BULK] = math.min(q.bulk_credit + s.delayed * before, s.max_batch), true
  if before == 0 or entries[1].shape > 0 or q.bulk == 0 or s.parted then return 0 end
  local weight, heaviest = 0, 0
  for _, entry in ipairs(entries) do
    local own = counted_weight(s, entry.weight)
    weight, heaviest = weight + own, math.max(heaviest, own)
  end
  local most = s.longest > 0 and math.min(limit, limit * s.longest / heaviest) or limit
  local room = seats(s, size, most, waited, heaviest)
  local count, left = math.floor(math.min(room, limit)) - before, s.weighed and room * s.unit - weight or INF
  local riders
  if s.longest > 0 then
    riders = fill_near(s, count, left, before, heaviest, limit, 0)
    if #riders == 0 then  -- If all waiting entries are longer, they would block others.
      local padded = seats(s, size * heaviest, limit * s.longest, waited, 1)
      riders = fill_near(s, count, left, before, heaviest, limit, padded)
    end
  else
    riders = take(s, count, left)
  end
  for _, entry in ipairs(wanted(s, riders)) do entries[#entries + 1] = entry end
  return #entries - before
end

-- Take the entries of an entire batch.
function bulk.whole(s, limit)
  s.q.bulk_left, s.q.bulk_busy = s.now, s.q.bulk_busy + 1
  if s.now >= s.q.newest + QUIET then s.q.bulk_excused = s.now + 2 * (s.q.alpha + s.q.beta * s.q.limit) end
  local weight = s.weighed and limit * s.unit or INF
  return wanted(s, s.q.bulk_apart > 0 and take_apart(s, limit, weight) or s.longest > 0 and take_near(s, limit, weight) or take(s, limit, weight, true))
end

-- Number of other entries that arrive in this many seconds, and the probability that `left` GPUs are too few for their batches. See
-- `core.bulk._none_left`.
local function arrivals_in(s, seconds, left)
  local q, rate = s.q, 0
  for tier = 1, s.tiers do rate = rate + rate_of(s, tier) end
  local mean, gap = rate * seconds, q.headway > 0 and q.headway + q.gap_each * q.running or 0
  local coming = mean
  if gap > 0 then mean = math.min(mean, seconds / gap) end
  local term = math.exp(-mean)
  local total = term
  for count = 1, left - 1 do
    term = term * mean / count
    total = total + term
  end
  return coming, 1 - total
end

-- Return true if an entire batch of bulk entries may take the last GPU. See `core.bulk.BulkClass._may_begin`.
local function may_begin(s, coming)
  local q = s.q
  return q.bulk_busy == 0 and q.fresh == 0 and q.bulk_credit >= 1 and (coming <= 1 or s.now >= q.newest + SETTLED)
end

-- Seconds until an entire batch of bulk entries may take an idle GPU, if no others arrive. See `core.bulk.BulkClass.held`.
function bulk.held(s)
  local q = s.q
  if q.known_slots < q.slots then return INF end
  local left = q.slots - q.bulk_busy - 1
  local coming, too_few = arrivals_in(s, q.alpha + q.beta * q.limit, left)
  local affords = q.bulk_credit >= 1 and left > 0 and too_few <= s.delayed
  if affords or (q.bulk_apart > 0 and q.bulk_credit >= math.max(coming, 1)) or may_begin(s, coming) then
    return 0
  end
  return math.max(q.newest + QUIET - s.now, 0)
end

-- Earliest time at which an entire batch of bulk entries may take an idle GPU. If that isn't known yet, the time to check again. See
-- `core.bulk.BulkClass.opens_at`.
function bulk.opens_at(s)
  if not bulk.waits(s) then return INF end
  local q, held = s.q, bulk.held(s)
  if held <= 0 then return q.bulk_left + SPACING * (q.alpha + q.beta * q.limit) / math.max(q.slots, 1) end
  return held < INF and s.now + math.min(LOOK, held) or INF
end

-- Count the entries that leave now but would have left sooner if bulk entries had not taken entire batches. See `ModelQueue._charge_delay`.
function bulk.charge(s, slot, limit)
  local q, now, before = s.q, s.now, s.now - 2 * LEEWAY
  if (q.bulk_busy > 0 or now - q.bulk_ended <= LEEWAY) and q.busy >= q.slots - 1 and q.oldest <= before then
    s.now = before
    local reason = decide(s, slot)
    s.now = now
    if reason then
      local count = math.min(q.fresh, limit)
      q.bulk_delayed, s.touched[BULK] = q.bulk_delayed + count, true
      if now > q.bulk_excused then q.bulk_credit = math.max(q.bulk_credit - count, -s.max_batch) end
    end
  end
end

function bulk.back(s, lease)
  if lease.bulk == WHOLE then
    s.q.bulk_busy, s.q.bulk_ended, s.touched[BULK] = math.max(s.q.bulk_busy - 1, 0), s.now, true
  end
end

function bulk.parted(s, entries) return split(entries, function(entry) return entry.tier > s.tiers end) end
end

-- enqueue: admit or refuse entries, which 7_intake.lua writes. Arguments after the common ones:
-- - what the gateway has read: its name, id of the last stream entry, number of submissions, number of separately stored outputs, names of
--   the submissions, token and reader of each output;
-- - extras, or '': the limits; lists of their positions; for each entry the position of its list (from 0; empty if there is one list);
--   then, by the entries' positions: dedup keys, digests of chosen ids, position of the entry that is charged;
-- - for each entry its header and payload. A header is the entry's kind (its own length, tier, timeouts, weight, bytes if large, number of
--   inputs of the request, shape, gateway), nonce, lengths of the tenant and of the next item, token and digest of a separately stored
--   input, key.
-- Returns, packed, the time, when the queue's state was created, the headway, and the seconds until a slot is free; for each refused entry
-- its position, the wait and a RefusalCode of codes.py (for MOVED, the ending of the queue replaces the wait); and the debt of each limit, packed.
do
local ENTRY = 2

-- Record from time to time that a gateway exists, so that its replies aren't swept.
local function hear_of(s, gateway)
  local heard = memory_of(s).heard
  if not (heard[gateway] and heard[gateway] <= s.now and s.now < heard[gateway] + HEARD_SECONDS) then
    heard[gateway] = s.now
    redis.call('ZADD', s.prefix .. 'g', s.now, gateway)
    lasting(s, 'g')
  end
end

local function forget_read(s, args, at)
  local gateway, last, count, outputs = args[at], args[at + 1], tonumber(args[at + 2]), tonumber(args[at + 3])
  if gateway ~= '' then
    hear_of(s, gateway)
    if count > 0 then
      local answered, keys, sub = {}, {}, string.sub
      for i = 1, count do keys[i] = sub(args[at + 3 + i], 9) end
      local headers = call_each('HMGET', s.prefix .. 'e', keys)
      for i = 1, count do
        if headers[i] == '!' .. sub(args[at + 3 + i], 1, 8) .. gateway then  -- It may have been submitted again.
          answered[#answered + 1] = keys[i]
        end
      end
      call_all('HDEL', s.prefix .. 'e', answered)
    end
    local names_of = {}
    for i = at + 4 + count, at + 3 + count + outputs do
      local token = string.sub(args[i], 1, TOKEN_BYTES)
      names_of[token] = names_of[token] or {}
      table.insert(names_of[token], string.sub(args[i], TOKEN_BYTES + 1))
    end
    for token, names in pairs(names_of) do large.read(s, token, names) end
    if last ~= '' then
      -- Ids are two numbers; a-(b+1) follows a-b.
      local major, minor = string.match(last, '^(%d+)%-(%d+)$')
      redis.call('XTRIM', s.prefix .. 'r:' .. gateway, 'MINID', major .. '-' .. string.format('%.0f', tonumber(minor) + 1))
    end
  end
  return at + 4 + count + outputs
end

local function turn_away(refused, position, wait, why)
  local detail = (why == MOVED or why == CULPRIT) and wait or exact(wait)
  refused[#refused + 1], refused[#refused + 2], refused[#refused + 3] = position - 1, detail, why
end

-- Return true if an entry is known and already admitted, false if another submission with its key is waiting or running, and nil if the entry is
-- new: at most the outcome of another submission is stored.
local function is_known(header, gateway, nonce)
  if not header then return nil end
  if is_answered(header) then
    local answered, whose_answer = submissions.read_mark(header)
    return (answered == nonce and whose_answer == gateway) or nil
  end
  local entry = read_header(header)
  return entry.gateway == gateway and entry.nonce == nonce
end

-- Let a new entry run, or share another entry's answer. If it is refused, returns why, and the seconds until it would be admitted.
local function admit(s, intake, entry, payload, shares)
  local flight, share, why, free
  if not large.fits(s, entry) then return ROOM, ROOM_WAIT end
  if not large.is_there(s, entry) then return LOST, MIN_WAIT end
  if shares then
    codes.date(s, shares)
    why, flight, share, free = find_flight(s, shares)
    if why then return why, 0 end
  end
  local record = shares and {shares = shares, led = {}, follows = ''}
  if flight then
    s.joined = true
    large.take(s, entry)
    join(s, entry, record, flight, share, free, payload)
    return nil
  end
  if entry.token and not entry.digest and culprits.may_know(s, entry, payload) then return UNDIGESTED, 0 end
  local error = s.q.known_until > s.now and culprits.knows(s, entry, payload)
  if error then return CULPRIT, error end
  if not entry.observed then observe_arrival(s, entry.tier, entry.weight) end
  local apart = s.q.apart > 0 and caller_apart(s, entry.key, payload)
  local check = apart and admissible or refuse
  local wait, why = check(s, intake, entry, entry.queue_timeout, entry.timeout, apart)
  if wait then return why, wait end
  large.take(s, entry)
  if apart then
    redis.call('HSET', s.prefix .. 'e', entry.key, new_header(s, entry))
    redis.call('HSET', s.prefix .. 'p', entry.key, payload)
    wait_apart(s, entry, apart)
    s.joined = true
  else
    take_in(s, intake, entry, payload)
  end
  s.entered[entry.key] = true
  if shares then
    begin(s, entry.key, record, free)
    store_record(s, entry.key, record)
  end
end

local NOTHING = {}

local offer = {}

-- Fields that are common to entries whose headers begin with this string.
function offer.kind(s, text)
  local _, tier, queue_timeout, timeout, weight, bytes, count, shape = struct.unpack(ENTRY_KIND, text)
  local queue_due, due, gateway = s.now + math.min(queue_timeout, timeout), s.now + timeout, string.sub(text, ENTRY_KIND_BYTES + 1)
  return {
    text = text, tier = tier + 1, gateway = gateway, queue_timeout = queue_timeout, timeout = timeout, queue_due = queue_due,
    due = due, weight = weight, shape = shape, bytes = bytes, count = count, sure = 0,
  }
end

-- Parse the headers of a call's entries: kind, key, tenant, and name of the separately stored input of each.
function offer.heads(s, args, at)
  local kinds, names, tenants, aparts, known = some(), some(), some(), nil, {}
  local text, length, kind, byte, sub, position = nil, 0, nil, string.byte, string.sub, 0
  for i = at, #args, ENTRY do
    local head = args[i]
    position = position + 1
    if sub(head, 1, length) ~= text then
      local high, low = byte(head, 1, 2)
      length = high * 256 + low
      text = sub(head, 1, length)
      kind = known[text]
      if not kind then
        kind = offer.kind(s, text)
        known[text] = kind
      end
    end
    local high, low, of_apart = byte(head, length + 9, length + 11)
    local key = sub(head, length + 12 + of_apart)
    kinds[position], names[position], tenants[position] = kind, key, sub(key, 1, high * 256 + low)
    if of_apart > 0 then
      aparts = aparts or {}
      aparts[position] = sub(head, length + 12, length + 11 + of_apart)
    end
  end
  return {
    kinds = kinds, names = names, tenants = tenants, aparts = aparts, of_kinds = known, args = args, at = at, latest = {}, seen = {},
    refused = {}, turned_away = {}, intake = new_intake(), known = call_each('HMGET', s.prefix .. 'e', names),
    shares_of = NOTHING, digests = NOTHING, payers = NOTHING, book = nil, charged = nil, limits_of = nil, rare = nil, observed = 0,
  }
end

function offer.entry(call, i)
  local kind, apart = call.kinds[i], call.aparts and call.aparts[i]
  local entry = {
    key = call.names[i], tenant = call.tenants[i], gateway = kind.gateway, tier = kind.tier, queue_timeout = kind.queue_timeout,
    timeout = kind.timeout, queue_due = kind.queue_due, due = kind.due, weight = kind.weight, shape = kind.shape, shared = false, number = '',
    arrived = 0, observed = call.observed == i, nonce = struct.unpack(NONCE, call.args[call.at + (i - 1) * ENTRY], #kind.text + 1), bytes = kind.bytes, count = kind.count,
  }
  if apart then
    entry.token, entry.digest = string.sub(apart, 1, TOKEN_BYTES), #apart > TOKEN_BYTES and string.sub(apart, TOKEN_BYTES + 1) or nil
  end
  return entry
end

-- Estimated seconds until a slot is free. 0 if one is free.
local function free_in(s)
  local q = s.q
  if q.slots == 0 or q.busy < q.slots then return 0 end
  return math.max(q.last_departure + batch_seconds(q, q.running) / q.slots - s.now, 0)
end

-- Last round that a tenant's entries have paid for. The rounds of all tenants in the call are read together.
function offer.latest(s, call, tier, tenant)
  local of_tier = call.latest[tier]
  if not call.tenants[2] then
    return tonumber(redis.call('ZSCORE', s.prefix .. 't' .. tier, tenant) or 0)
  elseif not of_tier then
    local asked, latest_of = {}, {}
    for _, owner in ipairs(call.tenants) do
      if not latest_of[owner] then
        latest_of[owner] = 0
        asked[#asked + 1] = owner
      end
    end
    local scores = call_each('ZMSCORE', s.prefix .. 't' .. tier, asked)
    for i = 1, #asked do latest_of[asked[i]] = tonumber(scores[i] or 0) end
    call.latest[tier], of_tier = latest_of, latest_of
  end
  return of_tier[tenant]
end

-- Number of waiting entries up to which `refuse` would certainly admit entries of a kind. At most the current number if `refuse` must be called.
function offer.sure_until(s, intake, kind)
  local q, tier = s.q, kind.tier
  local most, ahead = math.floor(s.max_queue * GREED / (GREED + 1)), 0
  if tier > 1 and s.shed_last >= 0 then
    most = math.min(most, tier == s.tiers and s.shed_last or s.shed_rest)
  end
  for above = 1, tier do ahead = ahead + q.depth[above] end
  if q.fresh >= most then return 0 end
  if ahead == 0 then return q.fresh + 1 end
  gate(s)
  if q.batch_seconds <= 0 then return most end
  local bound = allowed_in_step(s, intake, tier, kind.queue_timeout, kind.timeout)
  return ahead < bound and math.min(most, q.fresh + math.ceil(bound - ahead)) or 0
end

-- Add `count` entries of a kind to the counts. The last one has the number `seq`.
function offer.count_in(s, kind, seq, count)
  if count == 0 then return end
  local q, tier, queue_due = s.q, kind.tier, kind.queue_due
  q.seq, q.newest, q.fresh = seq, s.now, q.fresh + count
  q.depth[tier], q.weight[tier] = q.depth[tier] + count, q.weight[tier] + count * kind.weight
  s.touched[INTAKE], s.touched[TIERS + tier] = true, true
  q.last_due[tier] = math.max(q.last_due[tier], queue_due)
  q.oldest, q.due = math.min(q.oldest, s.now), math.min(q.due, queue_due)
end

function offer.observe(s, tier, weight, count)
  if count > 1 and s.q.mean[tier] == weight then
    observe_arrival(s, tier, weight)
    if s.q.rate_last[tier] == s.now then
      s.q.rate_sum[tier] = s.q.rate_sum[tier] + (count - 1) / RATE_TIME
      return
    end
    count = count - 1
  end
  for _ = 1, count do observe_arrival(s, tier, weight) end
end

-- Admit plain entries of one kind, beginning at a position of the call, as long as they would certainly be admitted. Does in one pass what
-- `admit` does for each entry. Returns the next position.
function offer.take_alike(s, call, first)
  local q, intake, kind, names, tenants, args = s.q, call.intake, call.kinds[first], call.names, call.tenants, call.args
  if kind.bytes > 0 or kind.count > 1 then return first end
  local kinds, known, rare, book, limits_of, entered, sub = call.kinds, call.known, call.rare, call.book, call.limits_of, s.entered, string.sub
  local tier, weight, at, past_kind, nonce_at = kind.tier, kind.weight, call.at, #kind.text, #kind.text + 1
  local into = intake_of(intake, tier)
  local lane, line, headers, payloads, latest_of = into.tier_queue, into.line, intake.headers, intake.payloads, into.latest
  local seq, fresh, next_round, sure, taken, unseen, i = q.seq, q.fresh, q.next[tier], kind.sure, 0, 0, first
  local digits, tail_digits, until_seq, last_digits = numbers.parts(seq + 1, weight, kind.shape)
  local fixed, tail, stamp = struct.pack(numbers.fixed, tier, s.now, kind.queue_due, kind.due), '-' .. kind.gateway, struct.pack(STAMP, s.now, kind.queue_due)
  local odd = kind.queue_due < q.last_due[tier] and intake.odd
  while kinds[i] == kind do
    local key, payload, tenant, charged = names[i], args[at + i * ENTRY - 1], tenants[i], limits_of and limits_of[i] or call.charged
    if known[i] or entered[key] or rare and rare[i] or #payload > PAGE or charged and over_limit(book, charged) then
      break
    end
    if fresh + taken >= sure then
      offer.observe(s, tier, weight, unseen + 1)
      offer.count_in(s, kind, seq, taken)
      fresh, taken, unseen = q.fresh, 0, -1
      sure = offer.sure_until(s, intake, kind)
      kind.sure = sure
      if fresh >= sure then
        call.observed = i
        return i
      end
    end
    if charged then charge(book, charged) end
    seq, taken, unseen = seq + 1, taken + 1, unseen + 1
    if seq >= until_seq then digits, tail_digits, until_seq = numbers.parts(seq, weight, kind.shape) end
    local last = last_digits[seq % 256]
    local member, latest = digits .. last .. tail_digits .. key, latest_of[tenant] or offer.latest(s, call, tier, tenant)
    if latest < next_round - 1 then latest = next_round - 1 end
    local round = latest - latest % 1 + 1
    latest_of[tenant] = latest + 1
    if round == next_round then into.joined = into.joined + 1 end
    if tenant ~= intake.tenant then note_tenant(s, intake, tenant) end
    local header = digits .. last .. tail_digits .. fixed .. sub(args[at + (i - 1) * ENTRY], nonce_at, past_kind + 8) .. tail
    local heads, count = #headers, #line
    headers[heads + 1], headers[heads + 2], payloads[heads + 1], payloads[heads + 2] = key, header, key, payload
    lane[2 * count + 1], lane[2 * count + 2], line[count + 1] = round, member, stamp .. member
    if odd then odd[#odd + 1], odd[#odd + 2] = kind.queue_due, member end
    entered[key] = i
    i = i + 1
  end
  if unseen > 0 then offer.observe(s, tier, weight, unseen) end
  offer.count_in(s, kind, seq, taken)
  return i
end

function offer.judge(s, call, i, scarce)
  local key, header, before = call.names[i], call.known[i], nil
  local entry, seen, known_as = offer.entry(call, i), call.seen, s.entered[key]
  if not seen[key] and type(known_as) == 'number' then seen[key] = offer.entry(call, known_as).nonce end
  if seen[key] == entry.nonce then
    return
  elseif known_as then
    before = false
  elseif seen[key] then
    header = redis.call('HGET', s.prefix .. 'e', key)
  end
  if before == nil then before = is_known(header, entry.gateway, entry.nonce) end
  local why, wait = nil, 0
  if before == false then
    why = CONFLICT
  elseif before == nil then
    local shares, digest, charged = call.shares_of[i], call.digests[i], call.limits_of and call.limits_of[i] or call.charged
    local queue = (shares or digest) and elsewhere(s, key, shares, digest)
    local with = call.turned_away[call.payers[i]]
    if with then
      why, wait = with[1], with[2]
    elseif queue then
      why, wait = MOVED, queue
    elseif scarce then
      observe_arrival(s, entry.tier, entry.weight)
      why, wait = SCARCE, SCARCE_WAIT
    elseif charged then
      why, wait = over_limit(call.book, charged)
      why = why and OVER + why
    end
    if not why then
      local by_id = digest and submissions.share_of_id(s, key, digest)
      shares = by_id and {by_id, unpack(shares or NOTHING)} or shares
      entry.shared = shares ~= nil
      why, wait = admit(s, call.intake, entry, call.args[call.at + i * ENTRY - 1], shares)
      if (not why or why == CULPRIT) and charged then charge(call.book, charged) end
    end
  end
  if why then
    turn_away(call.refused, i, wait, why)
    call.turned_away[i] = {why, wait}
  else
    seen[key] = entry.nonce
  end
  if (why and why ~= UNDIGESTED) or (before and is_answered(header)) then large.drop(s, entry) end
end

-- Parse the extras; see above.
function offer.extras(s, call, text)
  if text == '' then return end
  local limits, of_limits, charged, shares_of, digests, payers = unpack(cmsgpack.unpack(text))
  if #limits > 0 then
    call.book, call.charged = open_book(s, limits), of_limits[1]
    if #of_limits > 1 then
      call.limits_of = {}
      for i = 1, #charged do call.limits_of[i] = of_limits[charged[i] + 1] end
    end
  end
  if next(shares_of) or next(digests) or next(payers) then
    call.shares_of, call.digests, call.payers, call.rare = shares_of, digests, payers, {}
    for _, those in ipairs({shares_of, digests, payers}) do
      for i in pairs(those) do call.rare[i] = true end
    end
  end
end

-- Judge the entries of a call. Those of the same kind are judged in one pass.
function offer.each(s, call, extras, scarce)
  offer.extras(s, call, extras)
  local plain, i = not (scarce or s.weighed or call.aparts) and s.q.known_until <= s.now and s.q.apart == 0, 1
  while i <= #call.names do
    i = plain and offer.take_alike(s, call, i) or i
    if i <= #call.names then
      offer.judge(s, call, i, scarce)
      i = i + 1
    end
  end
end

local function enqueue(keys, args, offer_each, scarce)
  local s = open(keys, args)
  s.entered, s.later = {}, {}
  local at = forget_read(s, args, HEAD + 1)
  local call = offer.heads(s, args, at + 1)
  offer_each(s, call, args[at], scarce)
  submissions.answer(s)
  if #call.intake.headers > 0 or s.joined then
    for _, kind in pairs(call.of_kinds) do hear_of(s, kind.gateway) end
    write_down(s, call.intake)
  end
  local owed = call.book and close_book(s, call.book) or ''
  ring(s)
  save(s)
  return {struct.pack('<dddd', s.now, s.q.born, s.q.headway, free_in(s)), call.refused, owed}
end

redis.register_function(VERSION .. '_enqueue', function(keys, args) return enqueue(keys, args, offer.each) end)

-- enqueue_known: like enqueue, but only admit entries that are already known, because memory is short.
redis.register_function{function_name = VERSION .. '_enqueue_known', flags = {'allow-oom'}, callback = function(keys, args)
  return enqueue(keys, args, offer.each, true)
end}

function offer.bulk(s, call, i)
  local key, header, payload, intake = call.names[i], call.known[i], call.args[call.at + i * ENTRY - 1], call.intake
  local entry, why = offer.entry(call, i), nil
  local before = is_known(header, entry.gateway, entry.nonce)
  if before == false or s.entered[key] then
    why = CONFLICT
  elseif before == nil then
    why = bulk.enough(s) and SHED or not large.fits(s, entry) and ROOM or not large.is_there(s, entry) and LOST or nil
    if not why then
      large.take(s, entry)
      local headers, payloads = intake.headers, intake.payloads
      headers[#headers + 1], headers[#headers + 2] = key, new_header(s, entry)
      payloads[#payloads + 1], payloads[#payloads + 2] = key, payload
      entry.member, s.entered[key] = member_of(entry), true
      bulk.push(s, entry, entry.token and large.length(s, entry, payload) or #payload)
    end
  end
  if why then turn_away(call.refused, i, MIN_WAIT, why) end
  if why or (before and is_answered(header)) then large.drop(s, entry) end
end

-- enqueue_bulk: add bulk entries, or refuse them if there are too many. Arguments and result are the same as for enqueue.
redis.register_function(VERSION .. '_enqueue_bulk', function(keys, args)
  return enqueue(keys, args, function(s, call)
    for i = 1, #call.names do offer.bulk(s, call, i) end
  end)
end)

-- acknowledge: only the first part of enqueue.
step('acknowledge', function(s, args) forget_read(s, args, HEAD + 1) end)

-- Drop an entry that has no outcome yet. If it is queued, it never reaches a GPU. If it is running, it gets no reply. It still runs for its
-- followers, or if it began a flight under a key and isn't `deleted`.
local function let_go_of(s, entry, key, deleted)
  entry.key = key
  entry.member = member_of(entry)
  if entry.shared then return withdraw(s, entry, deleted) end
  if entry.tier > s.tiers then
    bulk.drop(s, entry)
  elseif not drop_from_lane(s, entry) and s.q.groups > 0 then
    suspects.drop(s, entry.member)
  end
  redis.call('HDEL', s.prefix .. 'e', key)
  redis.call('HDEL', s.prefix .. 'p', key)
  large.let_go(s, entry)
end

-- withdraw: drop submissions that nobody is waiting for any more. Arguments after the common ones: their gateway, their names. Answered
-- entries, and other submissions with the same keys, aren't changed.
step('withdraw', function(s, args)
  local gateway, nonces, names = args[HEAD + 1], {}, {}
  for i = HEAD + 2, #args do nonces[#nonces + 1], names[#names + 1] = submissions.read_name(args[i]) end
  local headers, any = call_each('HMGET', s.prefix .. 'e', names), false
  for i, key in ipairs(names) do
    local entry = headers[i] and not is_answered(headers[i]) and read_header(headers[i])
    if entry and entry.shared then entry = live(s, key) end  -- An earlier withdrawal in this call may have ended it.
    if entry and entry.gateway == gateway and entry.nonce == nonces[i] then
      let_go_of(s, entry, key)
      any = true
    end
  end
  if any then look_again(s) end
end)

-- cancel_task: forget the task with a key, and tell those that are waiting for it. The task stays marked until its gateway has
-- read that, because the gateway may submit it again before.
step('cancel_task', function(s, args)
  local key = args[HEAD + 1]
  local flight = TASK .. '\0' .. key
  local entry = original_of(s, flight) == key and live(s, key)
  if entry then
    let_go_of(s, entry, key, true)
    if entry.gateway ~= '' then
      local list = {{key, '0', CANCELLED, exact(s.now - entry.arrived), entry.nonce}}
      send(s, entry.gateway, unpack(failure_fields(s, 'refused', list)))
      redis.call('HSET', s.prefix .. 'e', key, submissions.mark(entry))
      lasting(s, 'e')
    end
    look_again(s)
  end
  forget_outcome(s, flight)
end)
end

-- One answer for several entries of a tenant: as `core.dedup`. What is known under a dedup key is a flight: its original and
-- its followers, or the outcome that is kept.
--
-- A dedup key, here a share, is a list: KIND, FLIGHT, DIGEST, seconds to KEEP, whether it JOINS an original, whether it WAITS for
-- one only, whether it RENEWS what is kept. The record of an entry has its shares, the positions of those whose flights it began, the flight that it follows, or
-- '', and once
-- nobody waits for the entry itself, the gateway that did. An outcome has the fields that a stream has of it, and its
-- worth: ANSWER, VERDICT, or WORTHLESS to those who ask later. One with an output has its weight, and the version that ran it. One
-- whose output is apart has its token: the output is for all that get the outcome.

local live, member_found, original_of, kept_under, root_of, find_flight, begin, join, store_record, conclude, whose, late_outcome
local withdraw, expire_followers, elsewhere
local keep_outcome, forget_outcome, forget_ended, renew_account  -- of 18_kept.lua

do  -- A library has room for 200 local names, so what others have no use for ends with this.

local function record_of(s, key)
  local packed = redis.call('HGET', s.prefix .. 'vs', key)
  return packed and cmsgpack.unpack(packed)
end

function store_record(s, key, record)
  redis.call('HSET', s.prefix .. 'vs', key, cmsgpack.pack(record))
  lasting(s, 'vs')
end

-- The header of an entry that has no outcome yet, read.
function live(s, key)
  local header = redis.call('HGET', s.prefix .. 'e', key)
  if header and not is_answered(header) then return read_header(header, key) end
  return nil
end

-- The member of an entry that was found under a name.
function member_found(entry) return entry.gateway == '' and entry.key or member_of(entry) end

function original_of(s, flight)
  local packed = redis.call('HGET', s.prefix .. 'v', flight)
  if packed then
    local found = cmsgpack.unpack(packed)
    return found[1], found[2]
  end
  return nil
end

-- The outcome that is kept under a flight, with its digest, until when and for how many seconds it is, the kind of share by which
-- it came, and whether it had been kept before. Without its output, which was lost, it is nothing.
function kept_under(s, flight)
  s.kept_read = s.kept_read or {}
  if s.kept_read[flight] then return s.kept_read[flight] end
  local packed = redis.call('GET', s.prefix .. 'k:' .. flight)
  local found = packed and cmsgpack.unpack(packed)
  local over = found and (found.ends <= s.now or found.ends > s.now + found.seconds + CLOCK_STEP)
  if over or (found and found.outcome.token and redis.call('EXISTS', s.prefix .. 'R:' .. found.outcome.token) == 0) then
    forget_outcome(s, flight)
    return nil
  end
  s.kept_read[flight] = found or nil  -- All entries of a step may ask for it.
  return found
end

-- The share by which an entry whose client chose the id of a task that is kept gets that task's outcome.
function submissions.share_of_id(s, key, digest)
  local flight = TASK .. '\0' .. key
  return kept_under(s, flight) and {TASK, flight, digest, 0, true, false}
end

-- What is known under a share, if anything is. An original that ended unnoticed, in a process of another release, is
-- nothing; its followers get the next one's outcome.
local function flight_of(s, share)
  local original, digest = original_of(s, share[FLIGHT])
  if original and ((s.entered and s.entered[original]) or live(s, original)) then
    return {original = original, digest = digest}
  end
  if share[RENEWS] then
    forget_outcome(s, share[FLIGHT])
    return nil
  end
  local found = kept_under(s, share[FLIGHT])
  return found and {digest = found.digest, kept = found}
end

-- The entry that runs for another, or that one itself.
function root_of(s, key)
  while true do
    local record = record_of(s, key)
    local original = record and record.follows ~= '' and original_of(s, record.follows)
    if not original then return key end
    key = original
  end
end

-- Look for an answer in common with others: why an entry may not come in, or else the flight to join and its share.
-- None: it has to run. Also whether nobody is under them, by the positions of those that were looked at.
function find_flight(s, shares)
  local free = {}
  for position, share in ipairs(shares) do
    local flight = flight_of(s, share)
    if not flight then
      if share[WAITS] then return NO_TASK end
      free[position] = true
    else
      free[position] = false
      if flight.digest ~= share[DIGEST] and not share[WAITS] then
        return MISUSE
      elseif flight.kept or share[JOINS] then
        return nil, flight, share, free
      end
    end
  end
  return nil, nil, nil, free
end

-- The queue of the model in which one of these shares is known: '' for this one. Nil when there is none.
local function queue_with(s, shares)
  for _, share in ipairs(shares) do
    if flight_of(s, share) then return '' end
  end
  for queue, other in pairs(#shares > 0 and siblings.others(s) or {}) do
    for _, share in ipairs(shares) do
      if flight_of(other, share) then return queue end
    end
  end
  return nil
end

-- The other queue of the model in which one of these shares is known, or the id that a client has chosen: how its prefix goes on. Nil
-- when there is none, or a share or the id is known here. Identical requests have nothing in common with those of other versions.
function elsewhere(s, key, shares, chosen)
  if chosen then  -- An id decides before any share.
    local task = TASK .. '\0' .. key
    if kept_under(s, task) then return nil end
    for queue, other in pairs(siblings.others(s)) do
      if live(other, key) or kept_under(other, task) then return queue end
    end
  end
  local own, others = {}, {}
  for _, share in ipairs(shares or own) do
    if share[KIND] ~= SAME then
      table.insert(share[KIND] == TASK and not share[WAITS] and own or others, share)
    end
  end
  local queue = queue_with(s, own) or queue_with(s, others)  -- The id of a task decides before its key.
  return queue ~= '' and queue or nil
end

-- The entry is the first under those of its shares that nobody is under yet.
function begin(s, key, record, free)
  for position, share in ipairs(record.shares) do
    local looks = share[WAITS] or (share[KIND] == TASK and share[KEEP] <= 0)
    if not looks and (free[position] or (free[position] == nil and not flight_of(s, share))) then
      redis.call('HSET', s.prefix .. 'v', share[FLIGHT], cmsgpack.pack({key, share[DIGEST]}))
      record.led[#record.led + 1] = position
      lasting(s, 'v')
    end
  end
end

local function follow(s, entry, record, flight)
  record.follows = flight
  redis.call('ZADD', s.prefix .. 'v:' .. flight, tonumber(string.sub(entry.number, 1, SEQ_DIGITS), 16), entry.key)
  redis.call('ZADD', s.prefix .. 'vd', entry.due, entry.key)
  lasting(s, 'v:' .. flight, 'vd')
end

local function unfollow(s, key, flight)
  redis.call('ZREM', s.prefix .. 'v:' .. flight, key)
  redis.call('ZREM', s.prefix .. 'vd', key)
end

local function keep(s, share, outcome, one)
  local kind = share[KIND]
  local useful = kind == TASK or outcome.worth == ANSWER or (outcome.worth == VERDICT and kind == BY_KEY)
  if not useful or share[KEEP] <= 0 or (kind == SAME and (s.scarce or not codes.of_flight(share[FLIGHT], outcome.ran or '#'))) then
    return
  end
  if outcome.worth == ANSWER and outcome.weight > tonumber(string.match(s.kept, '(%d+)$')) then
    if kind ~= TASK then return end
    local fields = failure_fields(s, 'refused', {{one.key, exact(outcome.weight), TOO_LARGE, '0', 0}})
    outcome = {fields = fields, worth = WORTHLESS}
  end
  keep_outcome(s, share[FLIGHT], kind == SAME, {
    digest = share[DIGEST], ends = s.now + share[KEEP], seconds = share[KEEP], kind = one.kind, kept = one.kept, outcome = outcome,
  })
  if share[KEEP] > LIFE_SECONDS / 2 then  -- Else the figures have the queue listed for longer.
    siblings.list(s, share[KEEP])
  end
end

-- The followers of a flight, which ends.
local function take_followers(s, flight)
  redis.call('HDEL', s.prefix .. 'v', flight)
  local followers = redis.call('ZRANGE', s.prefix .. 'v:' .. flight, 0, -1)
  if #followers > 0 then
    redis.call('DEL', s.prefix .. 'v:' .. flight)
    call_all('ZREM', s.prefix .. 'vd', followers)
  end
  return followers
end

function whose(key, kind, kept, tell) return {key = key, kind = kind, kept = kept, tell = tell} end

-- All that follow, each before those that follow it, are to be offered anew. Who left is forgotten.
local function scatter(s, followers, anew)
  local loose, at = {followers}, 1
  while loose[at] do
    for _, key in ipairs(loose[at]) do
      local entry, record = live(s, key), record_of(s, key)
      if entry and record then
        for _, position in ipairs(record.led) do
          loose[#loose + 1] = take_followers(s, record.shares[position][FLIGHT])
        end
        redis.call('HDEL', s.prefix .. 'vs', key)
        if entry.gateway == '' then
          mark(s, {entry})
        else
          anew[#anew + 1] = {entry = entry, shares = record.shares}
        end
      end
    end
    at = at + 1
  end
end

local offer_anew

-- Entries have an outcome, and so have those that follow them. `ended` has for each its key, the kind of the share by which
-- it came, whether it was kept, and whether the gateway has to be told. `late`: only because their own time is over.
function conclude(s, outcome, ended, late)
  local told, answered, anew, at, token, readers = {}, {}, {}, 1, outcome.token, {}
  if token then large.lend(s, token, {''}) end
  while ended[at] do
    local one = ended[at]
    local entry = one.tell and live(s, one.key)
    if entry then
      answered[#answered + 1] = entry
      if entry.gateway ~= '' then
        told[entry.gateway] = told[entry.gateway] or {}
        table.insert(told[entry.gateway], {one.key, one.kind, one.kept, entry.nonce})
        readers[#readers + 1] = submissions.name(entry.nonce, one.key)
      end
    end
    local record = record_of(s, one.key)
    if record then
      redis.call('HDEL', s.prefix .. 'vs', one.key)
      for _, position in ipairs(record.led) do
        local share = record.shares[position]
        local followers = take_followers(s, share[FLIGHT])
        if late and share[KIND] ~= TASK then
          scatter(s, followers, anew)
        else
          for _, follower in ipairs(followers) do
            ended[#ended + 1] = whose(follower, share[KIND], false, true)
          end
        end
        keep(s, share, outcome, one)
      end
    end
    at = at + 1
  end
  if token then
    large.lend(s, token, readers)
    large.read(s, token, {''})
  end
  for gateway, list in pairs(told) do
    local fields = {unpack(outcome.fields)}
    fields[#fields + 1], fields[#fields + 2] = 'p', cmsgpack.pack(list)
    send(s, gateway, unpack(fields))
  end
  mark(s, answered)
  for _, one in ipairs(anew) do offer_anew(s, one) end
end

local function refused_outcome(s, key, wait, why, waited, error)
  local fields = failure_fields(s, 'refused', {{key, exact(wait), why, exact(waited), 0}}, nil, nil, error)
  return {fields = fields, worth = why == CULPRIT and VERDICT or WORTHLESS}
end

function late_outcome(s, entry, slots)
  local list = {{entry.key, exact(s.now - entry.arrived), 0, s.now >= entry.queue_due, entry.nonce}}
  local fields = failure_fields(s, 'late', list)
  fields[12] = slots or fields[12]
  return {fields = fields, worth = WORTHLESS}
end

local function end_alone(s, key, outcome) conclude(s, outcome, {whose(key, '', false, true)}, false) end

-- A new entry gets what is kept, with all others of this step that get the same. It is nowhere but in the reply and in its mark.
local function answer_later(s, entry, kind, outcome)
  s.answered = s.answered or {marks = {}}
  local of_gateway = s.answered[outcome]
  if not of_gateway then
    of_gateway = {}
    s.answered[outcome], s.answered[#s.answered + 1] = of_gateway, outcome
  end
  local list = of_gateway[entry.gateway] or {}
  of_gateway[entry.gateway], list[#list + 1] = list, {entry.key, kind, true, entry.nonce}
  local marks = s.answered.marks
  marks[#marks + 1], marks[#marks + 2] = entry.key, submissions.mark(entry)
end

-- Answer those that get what is kept.
function submissions.answer(s)
  if not s.answered then return end
  for _, outcome in ipairs(s.answered) do
    for gateway, list in pairs(s.answered[outcome]) do
      local fields = {unpack(outcome.fields)}
      fields[#fields + 1], fields[#fields + 2] = 'p', cmsgpack.pack(list)
      send(s, gateway, unpack(fields))
    end
  end
  call_all('HSET', s.prefix .. 'e', s.answered.marks)
  lasting(s, 'e')
end

-- An entry joins a flight: it gets what is kept, or follows the original. `payload`: of a new one.
function join(s, entry, record, flight, share, free, payload)
  begin(s, entry.key, record, free)
  local is_large = entry.bytes > 0 or entry.token
  if flight.kept and payload and #record.led == 0 and not is_large and not flight.kept.outcome.token then
    answer_later(s, entry, share[KIND], flight.kept.outcome)
    return
  end
  if payload then redis.call('HSET', s.prefix .. 'p', entry.key, payload) end
  redis.call('HSET', s.prefix .. 'e', entry.key, new_header(s, entry))
  lasting(s, 'e', 'p')
  if flight.kept then
    store_record(s, entry.key, record)
    conclude(s, flight.kept.outcome, {whose(entry.key, share[KIND], true, true)}, false)
  else
    follow(s, entry, record, share[FLIGHT])
    store_record(s, entry.key, record)
  end
end

-- A follower whose original was too late: it runs itself, or joins another, in the time that it has left.
offer_anew = function(s, one)
  local entry, record, why, wait, apart, error = one.entry, {shares = one.shares, led = {}, follows = ''}, nil, 0, nil, nil
  local left = entry.due - s.now
  local queue_timeout = math.min(entry.queue_due - entry.arrived, left)
  local outcome, free = left <= 0 and late_outcome(s, entry, 1), {}
  if not outcome then
    local flight, share
    codes.date(s, record.shares)
    why, flight, share, free = find_flight(s, record.shares)
    entry.queue_due, entry.tenant = s.now + queue_timeout, tenant_of(entry.key)
    if flight then
      join(s, entry, record, flight, share, free)
      return
    end
    local payload = not why and redis.call('HGET', s.prefix .. 'p', entry.key)
    error = payload and culprits.knows(s, entry, payload)
    why = why or (error and CULPRIT)
    if not why then
      observe_arrival(s, entry.tier, entry.weight)
      apart = s.q.apart > 0 and caller_apart(s, entry.key, payload)
      wait, why = admissible(s, new_intake(), entry, queue_timeout, left, apart)
    end
    outcome = why and refused_outcome(s, entry.key, wait, why, s.now - entry.arrived, error)
  end
  if not outcome and apart then
    redis.call('HSET', s.prefix .. 'e', entry.key, new_header(s, entry))
    wait_apart(s, entry, apart)
  elseif not outcome then
    local intake = new_intake()
    take_in(s, intake, entry)
    write_down(s, intake)
  end
  begin(s, entry.key, record, free or {})
  store_record(s, entry.key, record)
  if outcome then  -- If it is a task, that is its outcome.
    end_alone(s, entry.key, outcome)
  end
end

-- Take an entry out that is not to run any more.
local function drop(s, entry)
  entry.member = member_found(entry)
  if not drop_from_lane(s, entry) and s.q.groups > 0 then suspects.drop(s, entry.member) end
  look_again(s)
end

local function forget(s, key)
  for _, name in ipairs({'vs', 'e', 'p'}) do redis.call('HDEL', s.prefix .. name, key) end
end

local function has_followers(s, flight) return redis.call('EXISTS', s.prefix .. 'v:' .. flight) == 1 end

-- Let go of an entry that nobody waits for, unless others follow it or it is the first under a key, and of those that only ran
-- for it.
local function let_go(s, key)
  while true do
    local entry, record = live(s, key), record_of(s, key)
    if not entry or not record or entry.gateway ~= '' then return end
    for _, position in ipairs(record.led) do
      local share = record.shares[position]
      if share[KIND] == BY_KEY or has_followers(s, share[FLIGHT]) then return end
    end
    for _, position in ipairs(record.led) do
      redis.call('HDEL', s.prefix .. 'v', record.shares[position][FLIGHT])
    end
    forget(s, key)
    large.let_go(s, entry)
    if record.follows == '' then
      drop(s, entry)
      return
    end
    unfollow(s, key, record.follows)
    key = original_of(s, record.follows)
    if not key then return end
  end
end

-- Nobody waits for an entry with shares itself any more. Should it go on for others, or as its client may ask again by a key,
-- it does so under its member, and its key is free. A task of its own ends here, for those who wait for it, too. `deleted`: its
-- outcome is not wanted either.
function withdraw(s, entry, deleted)
  local p, key, member = s.prefix, entry.key, member_found(entry)
  local record, led = record_of(s, key) or {shares = {}, led = {}, follows = ''}, {}
  for _, position in ipairs(record.led) do
    local share = record.shares[position]
    if share[KIND] == TASK then
      for _, follower in ipairs(take_followers(s, share[FLIGHT])) do
        end_alone(s, follower, refused_outcome(s, follower, 0, NO_TASK, 0))
      end
    elseif deleted and share[KIND] == BY_KEY and not has_followers(s, share[FLIGHT]) then
      redis.call('HDEL', p .. 'v', share[FLIGHT])
    else
      led[#led + 1] = position
      redis.call('HSET', p .. 'v', share[FLIGHT], cmsgpack.pack({member, share[DIGEST]}))
    end
  end
  record.led = led
  if record.follows ~= '' then
    unfollow(s, key, record.follows)
    entry.key = member
    follow(s, entry, record, record.follows)
  end
  local payload = redis.call('HGET', p .. 'p', key)
  forget(s, key)
  redis.call('HSET', p .. 'e', member,
    pack_header(entry, entry.tier + SHARED, ''))
  redis.call('HSET', p .. 'p', member, payload or '')
  lasting(s, 'e', 'p', 'v')
  store_record(s, member, record)
  let_go(s, member)
end

-- Answer followers whose own time is over.
function expire_followers(s)
  for _, key in ipairs(redis.call('ZRANGEBYSCORE', s.prefix .. 'vd', '-inf', s.now)) do
    local entry, record = live(s, key), record_of(s, key)
    redis.call('ZREM', s.prefix .. 'vd', key)
    if entry and record and record.follows ~= '' then
      unfollow(s, key, record.follows)
      local original = original_of(s, record.follows)
      conclude(s, late_outcome(s, entry, 1), {whose(key, '', false, true)}, true)
      if original then let_go(s, original) end
    end
  end
end

end

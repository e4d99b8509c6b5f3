-- One answer for several entries of a tenant. See `core.dedup`. A flight is stored under a dedup key. It is an original with its followers, or
-- a kept outcome.
--
-- A share is a dedup key as a list: KIND, FLIGHT, DIGEST, seconds to KEEP, and whether it JOINS an original, only WAITS for one, or RENEWS
-- what is kept. An entry's record has its shares, the positions of those whose flights it began (`led`), and the flight that it follows, or
-- ''. An outcome has its stream fields, and how useful it is to later requests: ANSWER, VERDICT or WORTHLESS. If it has an output, it also has
-- the weight, the version that ran it and, if the output is stored separately, the token. All entries with this outcome then read the output.
local live, member_found, original_of, kept_under, root_of, find_flight, begin, join, store_record, conclude, whose, late_outcome
local withdraw, expire_followers, elsewhere, keep_outcome, forget_outcome, forget_ended, renew_account  -- The last four are in 18_kept.lua.
do  -- Locals that no other file needs end with this block, because a library may have only 200.
local function record_of(s, key)
  local packed = redis.call('HGET', s.prefix .. 'vs', key)
  return packed and cmsgpack.unpack(packed)
end

function store_record(s, key, record)
  redis.call('HSET', s.prefix .. 'vs', key, cmsgpack.pack(record))
  lasting(s, 'vs')
end

-- Entry with a name, if it has no outcome yet.
function live(s, key)
  local header = redis.call('HGET', s.prefix .. 'e', key)
  if header and not is_answered(header) then return read_header(header, key) end
end

-- Member of an entry that was found by name.
function member_found(entry) return entry.gateway == '' and entry.key or member_of(entry) end

function original_of(s, flight)
  local packed = redis.call('HGET', s.prefix .. 'v', flight)
  if packed then
    local flight_parts = cmsgpack.unpack(packed)
    return flight_parts[1], flight_parts[2]
  end
end

-- Kept outcome of a flight, with its digest, its expiry, its seconds, the kind of share that kept it, and whether it was kept before. Nothing if
-- its output was lost.
function kept_under(s, flight)
  s.kept_read = s.kept_read or {}
  if s.kept_read[flight] then return s.kept_read[flight] end
  local packed = redis.call('GET', s.prefix .. 'k:' .. flight)
  local kept = packed and cmsgpack.unpack(packed)
  local over = kept and (kept.ends <= s.now or kept.ends > s.now + kept.seconds + CLOCK_STEP)
  if over or (kept and kept.outcome.token and redis.call('EXISTS', s.prefix .. 'R:' .. kept.outcome.token) == 0) then
    forget_outcome(s, flight)
    return nil
  end
  s.kept_read[flight] = kept or nil  -- All entries of a step may need it.
  return kept
end

-- Share by which an entry gets the outcome of a kept task, if its client chose the id of that task.
function submissions.share_of_id(s, key, digest)
  local flight = TASK .. '\0' .. key
  return kept_under(s, flight) and {TASK, flight, digest, 0, true, false}
end

-- Flight of a share, if there is one. If a process of another release ended the original without updating the flight, it doesn't count, and its
-- followers get the outcome of the next original.
local function flight_of(s, share)
  local original, digest = original_of(s, share[FLIGHT])
  if original and ((s.entered and s.entered[original]) or live(s, original)) then
    return {original = original, digest = digest}
  end
  if share[RENEWS] then
    forget_outcome(s, share[FLIGHT])
    return nil
  end
  local kept = kept_under(s, share[FLIGHT])
  return kept and {digest = kept.digest, kept = kept}
end

-- Key of the entry that runs in place of this one, or its own key.
function root_of(s, key)
  while true do
    local record = record_of(s, key)
    local original = record and record.follows ~= '' and original_of(s, record.follows)
    if not original then return key end
    key = original
  end
end

-- Find an answer to share. Returns why the entry is refused, or nil, the flight to join, its share, and by position whether
-- each checked share is free. If there is no flight, the entry must run.
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

-- Ending of the model's queue that knows one of these shares, '' for this queue, or nil.
local function queue_with(s, shares)
  for _, share in ipairs(shares) do
    if flight_of(s, share) then return '' end
  end
  for queue, other in pairs(#shares > 0 and siblings.others(s) or {}) do
    for _, share in ipairs(shares) do
      if flight_of(other, share) then return queue end
    end
  end
end

-- Ending of the model's other queue that knows one of these shares or the chosen id. Nil if there is none, or if this queue knows one. Answers
-- to identical requests are never shared across versions.
function elsewhere(s, key, shares, chosen)
  if chosen then  -- An id takes precedence over shares.
    local task = TASK .. '\0' .. key
    if kept_under(s, task) then return nil end
    for queue, other in pairs(siblings.others(s)) do
      if live(other, key) or kept_under(other, task) then return queue end
    end
  end
  local shared = split(shares or {}, function(share) return share[KIND] ~= SAME end)
  local own, others = split(shared, function(share) return share[KIND] == TASK and not share[WAITS] end)
  local queue = queue_with(s, own) or queue_with(s, others)  -- A task's id takes precedence over its key.
  return queue ~= '' and queue or nil
end

-- Start a flight under each free share of an entry.
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

local function keep(s, share, outcome, ended)
  local kind = share[KIND]
  local useful = kind == TASK or outcome.worth == ANSWER or (outcome.worth == VERDICT and kind == BY_KEY)
  if not useful or share[KEEP] <= 0 or (kind == SAME and (s.scarce or not codes.of_flight(share[FLIGHT], outcome.ran or '#'))) then
    return
  end
  if outcome.worth == ANSWER and outcome.weight > tonumber(string.match(s.kept, '(%d+)$')) then
    if kind ~= TASK then return end
    local fields = failure_fields(s, 'refused', {{ended.key, exact(outcome.weight), TOO_LARGE, '0', 0}})
    outcome = {fields = fields, worth = WORTHLESS}
  end
  keep_outcome(s, share[FLIGHT], kind == SAME, {
    digest = share[DIGEST], ends = s.now + share[KEEP], seconds = share[KEEP], kind = ended.kind, kept = ended.kept, outcome = outcome,
  })
  if share[KEEP] > LIFE_SECONDS / 2 then siblings.list(s, share[KEEP]) end  -- For less time, the figures keep the queue listed.
end

-- Send an outcome to entries of one gateway.
local function send_outcome(s, gateway, outcome, list)
  local fields = {unpack(outcome.fields)}
  fields[#fields + 1], fields[#fields + 2] = 'p', cmsgpack.pack(list)
  send(s, gateway, unpack(fields))
end

-- End a flight. Returns its followers.
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

-- Collect all followers to be offered again, each before its own followers. Those that have left are dropped.
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

-- Give entries and their followers an outcome. `ended` lists the key, the kind of share, whether the outcome was kept, and whether the gateway
-- must be told. `late` means that only their own timeout has passed.
function conclude(s, outcome, ended, late)
  local lists, answered, anew, at, token, readers = {}, {}, {}, 1, outcome.token, {}
  if token then large.lend(s, token, {''}) end
  while ended[at] do
    local ending = ended[at]
    local entry = ending.tell and live(s, ending.key)
    if entry then
      answered[#answered + 1] = entry
      if entry.gateway ~= '' then
        lists[entry.gateway] = lists[entry.gateway] or {}
        table.insert(lists[entry.gateway], {ending.key, ending.kind, ending.kept, entry.nonce})
        readers[#readers + 1] = submissions.name(entry.nonce, ending.key)
      end
    end
    local record = record_of(s, ending.key)
    if record then
      redis.call('HDEL', s.prefix .. 'vs', ending.key)
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
        keep(s, share, outcome, ending)
      end
    end
    at = at + 1
  end
  if token then
    large.lend(s, token, readers)
    large.read(s, token, {''})
  end
  for gateway, list in pairs(lists) do send_outcome(s, gateway, outcome, list) end
  mark(s, answered)
  for _, follower in ipairs(anew) do offer_anew(s, follower) end
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

-- Answer a new entry with a kept outcome, together with others in this step. Only its reply and its mark are stored.
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

-- Send the answers collected by `answer_later`.
function submissions.answer(s)
  if not s.answered then return end
  for _, outcome in ipairs(s.answered) do
    for gateway, list in pairs(s.answered[outcome]) do send_outcome(s, gateway, outcome, list) end
  end
  call_all('HSET', s.prefix .. 'e', s.answered.marks)
  lasting(s, 'e')
end

-- Make an entry join a flight: it gets the kept outcome, or follows the original. `payload` is only set for a new entry.
function join(s, entry, record, flight, share, free, payload)
  begin(s, entry.key, record, free)
  local is_large = entry.bytes > 0 or entry.token
  if flight.kept and payload and #record.led == 0 and not is_large and not flight.kept.outcome.token then
    return answer_later(s, entry, share[KIND], flight.kept.outcome)
  end
  if payload then redis.call('HSET', s.prefix .. 'p', entry.key, payload) end
  redis.call('HSET', s.prefix .. 'e', entry.key, new_header(s, entry))
  lasting(s, 'e', 'p')
  if not flight.kept then follow(s, entry, record, share[FLIGHT]) end
  store_record(s, entry.key, record)
  if flight.kept then conclude(s, flight.kept.outcome, {whose(entry.key, share[KIND], true, true)}, false) end
end

-- Offer a follower again, with its remaining time, because its original timed out.
offer_anew = function(s, follower)
  local entry, record, why, wait, apart, error = follower.entry, {shares = follower.shares, led = {}, follows = ''}, nil, 0, nil, nil
  local left = entry.due - s.now
  local queue_timeout = math.min(entry.queue_due - entry.arrived, left)
  local outcome, free = left <= 0 and late_outcome(s, entry, 1), {}
  if not outcome then
    local flight, share
    codes.date(s, record.shares)
    why, flight, share, free = find_flight(s, record.shares)
    entry.queue_due, entry.tenant = s.now + queue_timeout, tenant_of(entry.key)
    if flight then return join(s, entry, record, flight, share, free) end
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
  if outcome then end_alone(s, entry.key, outcome) end  -- If it is a task, this is its outcome.
end

-- Remove an entry that must not run any more.
local function drop(s, entry)
  entry.member = member_found(entry)
  if not drop_from_lane(s, entry) and s.q.groups > 0 then suspects.drop(s, entry.member) end
  look_again(s)
end

local function forget(s, key)
  for _, name in ipairs({'vs', 'e', 'p'}) do redis.call('HDEL', s.prefix .. name, key) end
end

local function has_followers(s, flight) return redis.call('EXISTS', s.prefix .. 'v:' .. flight) == 1 end

-- Drop an entry that nobody is waiting for, unless others follow it or it began a flight under a key. Then do the same for its original.
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
    if record.follows == '' then return drop(s, entry) end
    unfollow(s, key, record.follows)
    key = original_of(s, record.follows)
    if not key then return end
  end
end

-- Record that nobody is waiting for this entry, which has shares. If it still runs, for others or for a key, it is stored under its member, so
-- that its key is free. A task ends here, even for those that are waiting for it. If it was `deleted`, its outcome isn't kept either.
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
  redis.call('HSET', p .. 'e', member, pack_header(entry, entry.tier + SHARED, ''))
  redis.call('HSET', p .. 'p', member, payload or '')
  lasting(s, 'e', 'p', 'v')
  store_record(s, member, record)
  let_go(s, member)
end

-- Answer followers whose own timeout has passed.
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

-- enqueue: admit entries or refuse them. Arguments after the head: what the gateway has read (its name, the id of the last
-- stream entry, how many submissions and outputs apart, their names, their tokens and who has read them), what counts and is shared (nothing, or the limits, for each entry the
-- positions of its limits, by position the dedup keys of those that have any, by position the digests of those whose clients chose the
-- id, and by position that of the one that pays for it), then for each entry its head (tier, lengths of the key and its tenant, queue timeout, timeout, nonce, weight, bytes if it is large, the
-- length of what is apart, key, token of an input apart and its digest, gateway) and its payload. Returns the instant, the queue's birth, the headway and the seconds until a slot is free, packed, for each refused one its position, the wait and why
-- (a RefusalCode of codes.py; of one that is MOVED in place of the wait the queue, as siblings.others names it), and the seconds owed to each limit, packed.

do

local ENTRY = 2

-- A gateway is there: nothing of its own is swept away. That is written down now and then.
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
      local answered, keys, marks, marked = {}, {}, {}, submissions.marked
      for i = 1, count do
        keys[i], marks[i] = marked(args[at + 3 + i], gateway)
      end
      local headers = call_each('HMGET', s.prefix .. 'e', keys)
      for i = 1, count do
        if headers[i] == marks[i] then  -- It may have been asked anew.
          answered[#answered + 1] = keys[i]
        end
      end
      call_all('HDEL', s.prefix .. 'e', answered)
    end
    local names_of, tokens = {}, {}
    for i = at + 4 + count, at + 3 + count + outputs do
      local token = string.sub(args[i], 1, TOKEN_BYTES)
      local names = names_of[token]
      if not names then
        names = {}
        names_of[token], tokens[#tokens + 1] = names, token
      end
      names[#names + 1] = string.sub(args[i], TOKEN_BYTES + 1)
    end
    for i = 1, #tokens do
      large.read(s, tokens[i], names_of[tokens[i]])
    end
    if last ~= '' then
      -- Ids are two numbers; the next after a-b is a-(b+1).
      local major, minor = string.match(last, '^(%d+)%-(%d+)$')
      redis.call('XTRIM', s.prefix .. 'r:' .. gateway, 'MINID', major .. '-' .. string.format('%.0f', tonumber(minor) + 1))
    end
  end
  return at + 4 + count + outputs
end

local function turn_away(refused, position, wait, why)
  refused[#refused + 1] = position - 1
  refused[#refused + 1] = (why == MOVED or why == CULPRIT) and wait or exact(wait)
  refused[#refused + 1] = why
end

-- One that is known: true when it is to be let in as it is; false when another submission's is live; nil when it is new after
-- all, as the outcome is another submission's.
local function is_known(header, gateway, nonce)
  if is_answered(header) then
    local answered, whose_answer = submissions.read_mark(header)
    return (answered == nonce and whose_answer == gateway) or nil
  end
  local entry = read_header(header)
  return entry.gateway == gateway and entry.nonce == nonce
end

-- Let a new entry run, or share another's answer. Returns why not, and the seconds until it would be let in.
local function admit(s, intake, entry, payload, shares)
  local flight, share, why, free
  local is_large = entry.bytes > 0 or entry.token
  if is_large then
    if not large.fits(s, entry) then
      return ROOM, ROOM_WAIT
    elseif not large.is_there(s, entry) then
      return LOST, MIN_WAIT
    end
  end
  if shares then
    why, flight, share, free = find_flight(s, shares)
    if why then
      return why, 0
    end
  end
  local record = shares and {shares = shares, led = {}, follows = ''}
  if flight then
    s.joined = true
    large.take(s, entry)
    redis.call('HSET', s.prefix .. 'p', entry.key, payload)
    join(s, entry, record, flight, share, free)
    return nil
  end
  if entry.token and not entry.digest and culprits.may_know(s, entry, payload) then
    return UNDIGESTED, 0
  end
  local error = s.q.known_until > s.now and culprits.knows(s, entry, payload)
  if error then
    return CULPRIT, error
  end
  observe_arrival(s, entry.tier, entry.weight)
  local apart = s.q.apart > 0 and caller_apart(s, entry.key, payload)
  local check = apart and admissible or refuse
  local wait, why = check(s, intake, entry, entry.queue_timeout, entry.timeout, apart)
  if wait then
    return why, wait
  end
  if is_large then
    large.take(s, entry)
  end
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
  return nil
end

-- The entries of a call, and their keys.
local function read_entries(s, args, at)
  local entries, names, read, sub = {}, {}, struct.unpack, string.sub
  for position = 1, (#args - at + 1) / ENTRY do
    local head = args[at + (position - 1) * ENTRY]
    local tier, length, of_tenant, queue_timeout, timeout, nonce, weight, bytes, of_apart, count = read(ENTRY_HEAD, head)
    local key, after = sub(head, ENTRY_HEAD_BYTES + 1, ENTRY_HEAD_BYTES + length), ENTRY_HEAD_BYTES + length + of_apart
    names[position] = key
    local entry = {
      key = key, tenant = sub(key, 1, of_tenant), gateway = sub(head, after + 1), tier = tier + 1,
      queue_timeout = queue_timeout, timeout = timeout,
      queue_due = s.now + (queue_timeout < timeout and queue_timeout or timeout),
      due = s.now + timeout, nonce = nonce, weight = weight, shared = false, seq = 0, bytes = bytes, count = count,
    }
    if of_apart > 0 then
      local apart = sub(head, after - of_apart + 1, after)
      entry.token, entry.digest = sub(apart, 1, TOKEN_BYTES), of_apart > TOKEN_BYTES and sub(apart, TOKEN_BYTES + 1) or nil
    end
    entries[position] = entry
  end
  return entries, names
end

-- Seconds until the next slot is free, as far as can be told; 0 while one is.
local function free_in(s)
  local q = s.q
  if q.slots == 0 or q.busy < q.slots then
    return 0
  end
  return math.max(q.last_departure + batch_seconds(q, q.running) / q.slots - s.now, 0)
end

local NO_EXTRAS = {}

local function enqueue(keys, args, scarce)
  local s = open(keys, args)
  s.entered, s.later = {}, {}
  local at = forget_read(s, args, HEAD + 1)
  local extras = args[at] ~= '' and cmsgpack.unpack(args[at])
  at = at + 1
  local entries, names = read_entries(s, args, at)
  local known = call_each('HMGET', s.prefix .. 'e', names)
  local book = extras and #extras[1] > 0 and open_book(s, extras[1])
  local limits_of, shares_of, digests, payers = NO_EXTRAS, NO_EXTRAS, NO_EXTRAS, NO_EXTRAS
  if extras then
    limits_of, shares_of, digests, payers = extras[2], extras[3], extras[4], extras[5] or NO_EXTRAS
  end
  local turned_away = {}
  local intake, seen, refused = new_intake(), {}, {}
  for i, entry in ipairs(entries) do
    local key = names[i]
    if seen[key] ~= entry.nonce then
      local before, header = nil, known[i]
      if s.entered[key] then
        before = false
      elseif seen[key] then
        header = redis.call('HGET', s.prefix .. 'e', key)
      end
      if before == nil and header then
        before = is_known(header, entry.gateway, entry.nonce)
      end
      local why, wait = nil, 0
      if before == false then
        why = CONFLICT
      elseif before == nil then
        local queue = (shares_of[i] or digests[i]) and elsewhere(s, key, shares_of[i], digests[i])
        local with = turned_away[payers[i]]
        if with then
          why, wait = with[1], with[2]
        elseif queue then
          why, wait = MOVED, queue
        elseif scarce then
          observe_arrival(s, entry.tier, entry.weight)
          why, wait = SCARCE, SCARCE_WAIT
        elseif limits_of[i] then
          why, wait = over_limit(book, limits_of[i])
          why = why and OVER + why
        end
        if not why then
          local by_id = digests[i] and submissions.share_of_id(s, key, digests[i])
          local shares = by_id and {by_id, unpack(shares_of[i] or {})} or shares_of[i]
          entry.shared = shares ~= nil
          why, wait = admit(s, intake, entry, args[at + (i - 1) * ENTRY + 1], shares)
          if (not why or why == CULPRIT) and limits_of[i] then
            charge(book, limits_of[i])
          end
        end
      end
      if why then
        turn_away(refused, i, wait, why)
        turned_away[i] = {why, wait}
      else
        seen[key] = entry.nonce
      end
      if (why and why ~= UNDIGESTED) or (before and is_answered(header)) then
        large.drop(s, entry)
      end
    end
  end
  if #intake.headers > 0 or s.joined then
    local last
    for i = 1, #entries do
      local gateway = entries[i].gateway
      if gateway ~= last then
        hear_of(s, gateway)
        last = gateway
      end
    end
    write_down(s, intake)
  end
  local owed = book and close_book(s, book) or ''
  ring(s)
  save(s)
  return {struct.pack('<dddd', s.now, s.q.born, s.q.headway, free_in(s)), refused, owed}
end

redis.register_function(VERSION .. '_enqueue', enqueue)

-- enqueue_known: the same when the server's memory runs out: only what is known already is let in.
redis.register_function{function_name = VERSION .. '_enqueue_known', flags = {'allow-oom'}, callback = function(keys, args)
  return enqueue(keys, args, true)
end}

-- acknowledge: the first part of enqueue alone.
redis.register_function{function_name = VERSION .. '_acknowledge', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  forget_read(s, args, HEAD + 1)
  save(s)
  return instants(s)
end}

-- Let go of a live entry: a queued one never reaches a GPU, a running one is not replied to. What others wait for goes on, and
-- what is the first under a key unless it was `deleted`.
local function let_go_of(s, entry, key, deleted)
  entry.key = key
  entry.member = member_of(entry)
  if entry.shared then
    withdraw(s, entry, deleted)
    return
  end
  if not drop_from_lane(s, entry) and s.q.groups > 0 then
    suspects.drop(s, entry.member)
  end
  redis.call('HDEL', s.prefix .. 'e', key)
  redis.call('HDEL', s.prefix .. 'p', key)
  large.let_go(s, entry)
end

-- withdraw: nobody waits for these submissions any more. Arguments after the head: the gateway whose they are, their names.
-- What has its outcome stays as it is, and what another submission or gateway has under the same key.
redis.register_function{function_name = VERSION .. '_withdraw', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  local gateway, nonces, names = args[HEAD + 1], {}, {}
  for i = HEAD + 2, #args do
    nonces[#nonces + 1], names[#names + 1] = submissions.read_name(args[i])
  end
  local headers, any = call_each('HMGET', s.prefix .. 'e', names), false
  for i, key in ipairs(names) do
    local entry = headers[i] and not is_answered(headers[i]) and read_header(headers[i])
    if entry and entry.shared then
      entry = live(s, key)  -- It may have come to its end with one before it.
    end
    if entry and entry.gateway == gateway and entry.nonce == nonces[i] then
      let_go_of(s, entry, key)
      any = true
    end
  end
  if any then
    look_again(s)
  end
  save(s)
  return instants(s)
end}

-- cancel_task: forget a task, by its key. Whoever waits for it is told; its gateway may offer it again until it has read that.
redis.register_function{function_name = VERSION .. '_cancel_task', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
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
  save(s)
  return instants(s)
end}

end

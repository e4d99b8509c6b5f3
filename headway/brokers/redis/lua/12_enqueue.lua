-- enqueue: admit entries or refuse them. Arguments after the head: what the gateway has read (its name, the id of the last
-- stream entry, how many keys, the keys), what counts and is shared (nothing, or the limits, for each entry the places of
-- its limits, and by place the shares of those that have any), then for each entry its head (tier, length of the key, queue
-- timeout, timeout, key, gateway) and its payload. Returns the instant, the queue's birth, the headway, for each refused one
-- its place, the wait and why (0 the queue is too long, 1 this tier's share of it, 2 memory, 3 another gateway's, 4 its
-- key was used for another request, 5 no such task, from OVER on the place of the limit among its own), and the seconds
-- owed to each limit.

do

local ENTRY = 2
local CONFLICT, CANCELLED, OVER = 3, 6, 16
local ENTRY_HEAD = '>BI2dd'
local ENTRY_HEAD_BYTES = 19

local function forget_read(s, args, at)
  local gateway, last, count = args[at], args[at + 1], tonumber(args[at + 2])
  if gateway ~= '' then
    if redis.call('ZADD', s.prefix .. 'g', exact(s.now), gateway) == 1 then
      lasting(s, 'g')
    end
    if count > 0 then
      local answered = {}
      local keys = {}
      for i = 1, count do
        keys[i] = args[at + 2 + i]
      end
      local headers = call_each('HMGET', s.prefix .. 'e', keys)
      for i = 1, count do
        if headers[i] and is_answered(headers[i]) then
          answered[#answered + 1] = keys[i]
        end
      end
      call_all('HDEL', s.prefix .. 'e', answered)
    end
    if last ~= '' then
      -- Ids are two numbers; the next after a-b is a-(b+1).
      local major, minor = string.match(last, '^(%d+)%-(%d+)$')
      redis.call('XTRIM', s.prefix .. 'r:' .. gateway, 'MINID', major .. '-' .. string.format('%.0f', tonumber(minor) + 1))
    end
  end
  return at + 3 + count
end

-- The gateways of these entries are there: nothing of theirs is swept away.
local function hear_of(s, gateways, heard)
  for _, gateway in ipairs(gateways) do
    if not heard[gateway] then
      heard[gateway] = true
      redis.call('ZADD', s.prefix .. 'g', exact(s.now), gateway)
      lasting(s, 'g')
    end
  end
end

local function turn_away(refused, place, wait, why)
  refused[#refused + 1] = place - 1
  refused[#refused + 1] = exact(wait)
  refused[#refused + 1] = why
end

-- One that is known: true when it is to be let in as it is; false when another gateway's is; nil when it is new after all,
-- as its outcome went to another gateway.
local function is_known(header, gateway)
  if is_answered(header) then
    return string.sub(header, 2) == gateway or nil
  end
  return read_header(header).gateway == gateway
end

-- Let a new entry run, or share another's answer. Returns why not, and the seconds until it would be let in.
local function admit(s, intake, entry, payload, timeouts, shares)
  local flight, share, why, free
  if shares then
    why, flight, share, free = find_flight(s, shares)
    if why then
      return why, 0
    end
  end
  local record = {shares = shares, led = {}, follows = ''}
  if flight then
    s.joined = true
    redis.call('HSET', s.prefix .. 'p', entry.key, payload)
    join(s, entry, record, flight, share, free)
    return nil
  end
  observe_arrival(s.q, entry.tier, s.now)
  local wait, shed = refuse(s, entry.tier, timeouts[1], timeouts[2], function()
    return served_before(s, intake, entry)
  end)
  if wait then
    return shed and 1 or 0, wait
  end
  take_in(s, intake, entry, payload)
  s.entered[entry.key] = true
  if shares then
    lead(s, entry.key, record, free)
    store_record(s, entry.key, record)
  end
  return nil
end

local function enqueue(keys, args, scarce)
  local s = open(keys, args)
  s.entered = {}
  local at = forget_read(s, args, HEAD + 1)
  local extras = args[at] ~= '' and cmsgpack.unpack(args[at]) or {{}, {}, {}}
  at = at + 1
  local count = (#args - at + 1) / ENTRY
  local names, gateways, seen, refused = {}, {}, {}, {}
  local tiers, queue_timeouts, timeouts = {}, {}, {}
  for i = 1, count do
    local head = args[at + (i - 1) * ENTRY]
    local tier, length, queue_timeout, timeout = struct.unpack(ENTRY_HEAD, head)
    names[i] = string.sub(head, ENTRY_HEAD_BYTES + 1, ENTRY_HEAD_BYTES + length)
    gateways[i] = string.sub(head, ENTRY_HEAD_BYTES + length + 1)
    tiers[i], queue_timeouts[i], timeouts[i] = tier + 1, queue_timeout, timeout
  end
  local known = call_each('HMGET', s.prefix .. 'e', names)
  local book, limits_of, shares_of = open_book(s, extras[1]), extras[2], extras[3]
  local intake = new_intake(s)
  for i = 1, count do
    local key = names[i]
    if not seen[key] then
      local before = nil
      if known[i] then
        before = is_known(known[i], gateways[i])
      end
      local why, wait = nil, 0
      if before == false then
        why = CONFLICT
      elseif before == nil then
        if scarce then
          observe_arrival(s.q, tiers[i], s.now)
          why, wait = 2, SCARCE_WAIT
        elseif limits_of[i] then
          why, wait = over_limit(book, limits_of[i])
          why = why and OVER + why
        end
        if not why then
          why, wait = admit(s, intake, {
            key = key, tier = tiers[i], queue_due = s.now + math.min(queue_timeouts[i], timeouts[i]),
            due = s.now + timeouts[i], gateway = gateways[i], shared = shares_of[i] ~= nil,
          }, args[at + (i - 1) * ENTRY + 1], {queue_timeouts[i], timeouts[i]}, shares_of[i])
          if not why and limits_of[i] then
            charge(book, limits_of[i])
          end
        end
      end
      seen[key] = not why
      if why then
        turn_away(refused, i, wait, why)
      end
    end
  end
  if #intake.headers > 0 or s.joined then
    hear_of(s, gateways, {[args[HEAD + 1]] = true})
    write_down(s, intake)
  end
  local owed = close_book(s, book)
  ring(s)
  save(s)
  return {exact(s.now), exact(s.q.born), exact(s.q.headway), refused, owed}
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
  return {exact(s.now), exact(s.q.born)}
end}

-- cancel: forget entries by their keys. Queued ones never reach a GPU, running ones are not replied to. Arguments after the
-- head: who cancels, then the keys; other gateways are told of theirs, unless nobody says who cancels.
redis.register_function{function_name = VERSION .. '_cancel', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  local by, names, told = args[HEAD + 1], {}, {}
  for i = HEAD + 2, #args do
    names[#names + 1] = args[i]
  end
  local headers, dropped = call_each('HMGET', s.prefix .. 'e', names), {}
  for i, key in ipairs(names) do
    local entry = headers[i] and not is_answered(headers[i]) and read_header(headers[i])
    if entry and entry.shared then
      entry = live(s, key)  -- It may have come to its end with one before it.
    end
    if not entry or entry.shared then
      forget_outcome(s, TASK .. '\0' .. key)
    end
    if entry and entry.gateway ~= '' then
      if by ~= '' and by ~= entry.gateway then
        told[entry.gateway] = told[entry.gateway] or {}
        table.insert(told[entry.gateway], {key, '0', CANCELLED, exact(s.now - entry.arrived)})
      end
      entry.key, entry.member = key, member_of(entry.seq, key)
      if entry.shared then
        withdraw(s, entry)
      else
        if not drop_from_lane(s, entry) and s.q.groups > 0 then
          drop_suspect(s, entry.member, read_groups(s))
        end
        dropped[#dropped + 1] = key
      end
    end
  end
  if #dropped > 0 then
    call_all('HDEL', s.prefix .. 'e', dropped)
    call_all('HDEL', s.prefix .. 'p', dropped)
    look_again(s)
  end
  for gateway, list in pairs(told) do
    send(s, gateway, unpack(failure_fields(s, 'refused', list)))
  end
  save(s)
  return {exact(s.now), exact(s.q.born)}
end}

end

-- enqueue: admit entries or refuse them. Arguments after the head: what the gateway has read (its name, the id of the last
-- stream entry, how many keys, the keys), then for each entry its head (tier, length of the key, queue timeout, timeout,
-- key, gateway) and its payload. Returns the instant, the queue's birth, the headway, for each refused one its place, the
-- wait and why (0 the queue is too long, 1 this tier's share of it, 2 memory, 3 another gateway's).

local ENTRY = 2
local ENTRY_HEAD = '>BI2dd'
local ENTRY_HEAD_BYTES = 19

local function forget_read(s, args, at)
  local gateway, last, count = args[at], args[at + 1], tonumber(args[at + 2])
  if gateway ~= '' then
    redis.call('ZADD', s.prefix .. 'g', exact(s.now), gateway)
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

local function round_of(s, tier, tenant, latest)
  local of = latest[tier]
  local last = of[tenant]
  if not last then
    last = tonumber(redis.call('ZSCORE', s.prefix .. 't' .. tier, tenant) or 0)
  end
  local round = math.max(last + 1, s.q.next[tier])
  of[tenant] = round
  return round
end

-- The gateways of these entries are there: nothing of theirs is swept away.
local function hear_of(s, gateways, heard)
  for _, gateway in ipairs(gateways) do
    if not heard[gateway] then
      heard[gateway] = true
      redis.call('ZADD', s.prefix .. 'g', exact(s.now), gateway)
    end
  end
end

local function turn_away(refused, place, wait, why)
  refused[#refused + 1] = place - 1
  refused[#refused + 1] = exact(wait)
  refused[#refused + 1] = why
end

local function enqueue(keys, args, scarce)
  local s = open(keys, args)
  local at = forget_read(s, args, HEAD + 1)
  local q, now, p = s.q, s.now, s.prefix
  local count = (#args - at + 1) / ENTRY
  local names, seen, refused = {}, {}, {}
  local tiers, queue_timeouts, timeouts, gateways = {}, {}, {}, {}
  for i = 1, count do
    local head = args[at + (i - 1) * ENTRY]
    local tier, length, queue_timeout, timeout = struct.unpack(ENTRY_HEAD, head)
    names[i] = string.sub(head, ENTRY_HEAD_BYTES + 1, ENTRY_HEAD_BYTES + length)
    gateways[i] = string.sub(head, ENTRY_HEAD_BYTES + length + 1)
    tiers[i], queue_timeouts[i], timeouts[i] = tier + 1, queue_timeout, timeout
  end
  local known = call_each('HMGET', p .. 'e', names)
  local headers, payloads, odd, lanes, lines, latest, stamps = {}, {}, {}, {}, {}, {}, {}
  for tier = 1, s.tiers do
    lanes[tier], lines[tier], latest[tier] = {}, {}, {}
  end
  for i = 1, count do
    local key = names[i]
    if known[i] and not seen[key] then
      -- Another gateway's: it gets the answer, or has had it.
      if is_answered(known[i]) then
        known[i] = string.sub(known[i], 2) == gateways[i] and known[i]
      elseif read_header(known[i]).gateway ~= gateways[i] then
        seen[key] = true
        turn_away(refused, i, 0, 3)
      end
    end
    if not known[i] and not seen[key] then
      local tier, queue_timeout, timeout = tiers[i], queue_timeouts[i], timeouts[i]
      observe_arrival(q, tier, now)
      local wait, shed = refuse(s, tier, queue_timeout, timeout)
      if scarce then
        turn_away(refused, i, SCARCE_WAIT, 2)
      elseif wait then
        turn_away(refused, i, wait, shed and 1 or 0)
      else
        seen[key] = true
        q.seq = q.seq + 1
        local queue_due = now + math.min(queue_timeout, timeout)
        local member = member_of(q.seq, key)
        local round = round_of(s, tier, tenant_of(key), latest)
        local lane, line = lanes[tier], lines[tier]
        lane[#lane + 1], lane[#lane + 2] = round, member
        if not stamps[queue_due] then
          stamps[queue_due] = struct.pack(STAMP, now, queue_due)
        end
        line[#line + 1] = stamps[queue_due] .. member
        if queue_due < q.last_due[tier] then
          odd[#odd + 1], odd[#odd + 2] = queue_due, member
        else
          q.last_due[tier] = queue_due
        end
        headers[#headers + 1] = key
        headers[#headers + 1] = pack_header(tier, q.seq, now, queue_due, now + timeout, gateways[i])
        payloads[#payloads + 1], payloads[#payloads + 2] = key, args[at + (i - 1) * ENTRY + 1]
        q.depth[tier] = q.depth[tier] + 1
        q.fresh = q.fresh + 1
        q.newest = now
        q.oldest = math.min(q.oldest, now)
        q.due = math.min(q.due, queue_due)
      end
    end
  end
  if #headers > 0 then
    hear_of(s, gateways, {[args[HEAD + 1]] = true})
    call_all('HSET', p .. 'e', headers)
    call_all('HSET', p .. 'p', payloads)
    if #odd > 0 then
      call_all('ZADD', p .. 'd', odd)
      q.odd = q.odd + #odd / 2
    end
    for tier = 1, s.tiers do
      if #lanes[tier] > 0 then
        call_all('ZADD', p .. 'l' .. tier, lanes[tier])
        call_all('RPUSH', p .. 'a' .. tier, lines[tier])
        local rounds = {}
        for tenant, round in pairs(latest[tier]) do
          rounds[#rounds + 1], rounds[#rounds + 2] = round, tenant
        end
        call_all('ZADD', p .. 't' .. tier, rounds)
      end
    end
  end
  ring(s)
  save(s)
  return {exact(now), exact(q.born), exact(q.headway), refused}
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

-- cancel: forget entries by their keys. Queued ones never reach a GPU, running ones are not replied to.
redis.register_function{function_name = VERSION .. '_cancel', flags = {'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args)
  local names = {}
  for i = HEAD + 1, #args do
    names[#names + 1] = args[i]
  end
  local headers, dropped = call_each('HMGET', s.prefix .. 'e', names), {}
  for i, key in ipairs(names) do
    if headers[i] and not is_answered(headers[i]) then
      local entry = read_header(headers[i])
      entry.key, entry.member = key, member_of(entry.seq, key)
      if not drop_from_lane(s, entry) and s.q.groups > 0 then
        drop_suspect(s, entry.member, read_groups(s))
      end
      dropped[#dropped + 1] = key
    end
  end
  if #dropped > 0 then
    call_all('HDEL', s.prefix .. 'e', dropped)
    call_all('HDEL', s.prefix .. 'p', dropped)
    look_again(s)
  end
  save(s)
  return {exact(s.now), exact(s.q.born)}
end}

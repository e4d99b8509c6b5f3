-- The home slots, and maintenance that is necessary even if no slot claims.
do
-- Remove slots that stopped reporting from the idle ones, because each would be woken and waited for. They are woken once: they may just be late.
local function leave_silent(s)
  local silent = redis.call('ZRANGEBYSCORE', s.prefix .. 'h', '-inf', s.now - DEGRADED_AFTER)
  for _, worker in ipairs(silent) do
    redis.call('ZREM', s.prefix .. 'h', worker)
    codes.leave(s, worker)
    forget_factor(s, worker)
    silent[worker] = true
  end
  if s.q.idle > 0 then
    for _, slot in ipairs(redis.call('ZRANGE', s.prefix .. 'i', 0, -1)) do
      if silent[string.match(slot, '%z(.*)$')] then
        no_longer_idle(s, slot)
        send_wakeup(s, slot, 0)
      end
    end
  end
end

-- Count the healthy slots. Returns true if their number changed.
local function recount(s)
  local changed = count_slots(s)
  if redis.call('ZCARD', s.prefix .. 'h') > s.q.slots then leave_silent(s) end
  return changed
end

-- beat: heartbeat of a home slot. Arguments after the common ones: worker, 1 if healthy or 2 if cold, share of its GPU, 1 if its backend has
-- changed, seconds by which its next heartbeat may be later than usual, code, then size and seconds of each warm-up batch. The queue learns
-- from these while nothing else is known.
step('beat', function(s, args)
  local worker = args[HEAD + 1]
  if args[HEAD + 2] == '1' then
    redis.call('ZADD', s.prefix .. 'h', s.now + tonumber(args[HEAD + 5]), worker)
    begin_factor(s, worker, tonumber(args[HEAD + 3]))
    lasting(s, 'h', 'hf')
    codes.note(s, worker, args[HEAD + 6], 'hc', 'hd')
    if args[HEAD + 4] == '1' then codes.renew(s) end
  else
    redis.call('ZREM', s.prefix .. 'h', worker)
    if args[HEAD + 2] == '2' then
      codes.note(s, worker, args[HEAD + 6], 'hd', 'hc')
    else
      codes.leave(s, worker)
    end
    forget_factor(s, worker)
  end
  if s.q.largest == 0 then
    for i = HEAD + 7, #args, 2 do observe_batch(s, tonumber(args[i]), tonumber(args[i + 1])) end
    s.q.gate_at = -INF
  end
  if recount(s) then ring(s) end
end)

-- forget: drop a slot whose home is now another shard.
step('forget', function(s, args)
  redis.call('ZREM', s.prefix .. 'h', args[HEAD + 1])
  codes.leave(s, args[HEAD + 1])
  forget_factor(s, args[HEAD + 1])
  if recount(s) then ring(s) end
end)

-- look: packed, the time and when the queue's state was created; the load; the depth of each tier, and the arrival of its oldest entry. If there
-- ever were bulk entries, also how many are waiting, how many others they have delayed, how many entire batches of them are running, and the
-- seconds for which such batches are held.
step('look', function(s)
  local depths, oldest = {}, {}
  for tier = 1, s.tiers do
    depths[tier], oldest[tier] = s.q.depth[tier], s.now
    if depths[tier] > 0 then oldest[tier] = head_of(s, tier) end
  end
  for _, group in ipairs(suspects.groups(s)) do
    for _, entry in ipairs(wanted(s, group.members)) do
      depths[entry.tier] = depths[entry.tier] + 1
      oldest[entry.tier] = math.min(oldest[entry.tier], entry.arrived)
    end
  end
  local tiers = {}
  for tier = 1, s.tiers do tiers[#tiers + 1], tiers[#tiers + 2] = depths[tier], exact(oldest[tier]) end
  local answer = {instants(s), load_of(s), tiers}
  if s.q.bulk_used > 0 then
    answer[4], answer[5], answer[6] = s.q.bulk + s.q.bulk_apart, s.q.bulk_delayed, s.q.bulk_busy
    answer[7] = exact(bulk.held(s))
  end
  return answer, not s.unknown  -- Otherwise each look would report a new state.
end)

-- glance: packed numbers for other queues: size of what is waiting, home slots, seconds for which the oldest fresh entry has waited, run time of
-- a full batch; and for `core.locality.contender`, waiting entries, seconds until the first one is late, run time of the next batch.
redis.register_function{function_name = VERSION .. '_glance', flags = {'no-writes', 'allow-oom'}, callback = function(keys, args)
  local s = open(keys, args, true)
  leave(s)
  local q, depth = s.q, s.q.fresh + s.q.suspects
  return as_doubles({
    math.floor(size_of(s, q.fresh, waiting_weight(s))) + q.suspects, q.slots, q.fresh > 0 and s.now - q.oldest or 0,
    batch_seconds(q, s.max_batch), depth, math.min(q.due, q.suspects_due) - s.now, batch_seconds(q, math.min(depth, s.max_batch)),
  })
end}

-- siblings: until when any queue of the model may hold data (including dead letters), and the endings of those queues.
together.register('siblings', function(keys, args)
  local tag, now = siblings.split(keys[1]), clock(args[CLOCK])
  local endings = redis.call('ZRANGE', tag .. ':qs', exact(now), '+inf', 'BYSCORE')
  local last = tonumber(redis.call('ZRANGE', tag .. ':qs', 0, 0, 'REV', 'WITHSCORES')[2] or 0)
  for _, ending in ipairs(redis.call('SMEMBERS', tag .. ':ql')) do
    local seconds = redis.call('TTL', tag .. ending .. 'o')
    if seconds > 0 then
      endings[#endings + 1] = ending
      last = math.max(last, now + seconds)
    end
  end
  return {exact(last), endings}
end, {'no-writes', 'allow-oom'})

-- A Standing of codes.py. The standing of a follower is that of its original.
local function standing(s, key)
  local entry = live(s, key)
  if entry and entry.shared then entry = live(s, root_of(s, key)) end
  if not entry then return AT_END end
  local member = member_found(entry)
  if entry.tier > s.tiers then return bulk.has(s, member) and WAITING or RUNNING end
  return (is_waiting(s, entry.tier, member) or suspects.group_of(s, member)) and WAITING or RUNNING
end

-- stage: state of an entry that somebody is waiting for.
step('stage', function(s, args)
  local entry = live(s, args[HEAD + 1])
  return entry and standing(s, entry.key) or AT_END, true
end)

-- owners: all tenants' keys of entries with an id, in a part of the queue, and the cursor of the next part. Arguments: cursor, id as a
-- pattern. Only people search without a tenant.
redis.register_function{function_name = VERSION .. '_owners', flags = {'no-writes', 'allow-oom'}, callback = function(keys, args)
  local answer = redis.call('HSCAN', keys[1] .. 'e', args[1], 'MATCH', '*\0' .. args[2], 'COUNT', 1000)
  local owners = {}
  for i = 1, #answer[2], 2 do owners[#owners + 1] = answer[2][i] end
  return {answer[1], owners}
end}

-- recall: state of a task, and its outcome, if any, as stream fields.
step('recall', function(s, args)
  local flight = TASK .. '\0' .. args[HEAD + 1]
  local original = original_of(s, flight)
  local kept = not original and kept_under(s, flight)
  if not kept then return {original and standing(s, original) or AT_END}, true end
  local fields = kept.outcome.fields
  fields[#fields + 1], fields[#fields + 2] = 'p', cmsgpack.pack({{args[HEAD + 1], kept.kind, kept.kept, 0}})
  return {AT_END, 'v', tostring(SCHEMA), unpack(fields)}, true
end)

-- Drop the streams of gateways that haven't made a call for a long time; their clients are gone as well. A gateway whose entries have no outcome
-- yet stays until they do, because otherwise their outcomes would stay for ever.
local function sweep(s)
  local gone = {}
  for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', s.prefix .. 'g', '-inf', s.now - GATEWAY_SECONDS)) do
    gone[gateway] = {}
  end
  if next(gone) then
    local cursor = '0'
    repeat
      local part = redis.call('HSCAN', s.prefix .. 'e', cursor, 'COUNT', 1000)
      cursor = part[1]
      for i = 1, #part[2], 2 do
        local header = part[2][i + 1]
        if is_answered(header) then
          local _, whose_answer = submissions.read_mark(header)
          local answered = gone[whose_answer]
          if answered then answered[#answered + 1] = part[2][i] end
        else
          gone[read_header(header).gateway] = nil
        end
      end
    until cursor == '0'
  end
  for gateway, answered in pairs(gone) do
    redis.call('DEL', s.prefix .. 'r:' .. gateway)
    memory_of(s).renewed[gateway], memory_of(s).heard[gateway] = nil, nil
    redis.call('ZREM', s.prefix .. 'g', gateway)
    call_all('HDEL', s.prefix .. 'e', answered)
  end
end

-- Renew what would expire, because the queue is in use.
local function renew(s)
  lasting(s, unpack(belongings(s)))
  for _, gateway in ipairs(redis.call('ZRANGE', s.prefix .. 'g', 0, -1)) do
    redis.call('EXPIRE', s.prefix .. 'r:' .. gateway, STREAM_SECONDS_TEXT)
  end
  large.renew(s)
  renew_book(s)
  renew_account(s)
end

-- True if something is waiting, or arrived in the last second. In that case some process must watch the queue all the time.
local function stirs(s)
  local q = s.q
  return q.fresh > 0 or q.groups > 0 or q.coming_until > -INF or s.now - q.newest < STIRS_SECONDS
end

-- Time of the next reap by a process that `rests` while the queue is at rest.
local function next_reap(s, rests)
  local q, now, p = s.q, s.now, s.prefix
  local due = math.min(now + ((not rests or stirs(s)) and REAP_EVERY or REST_SECONDS), q.due, q.suspects_due)
  for key, after in pairs({y = 0, vd = 0, h = DEGRADED_AFTER}) do
    local first = redis.call('ZRANGE', p .. key, 0, 0, 'WITHSCORES')[2]
    if first then due = math.min(due, tonumber(first) + after) end
  end
  return math.max(due, now + TIMER_GRAIN)
end

-- reap: reclaim expired leases, expire overdue entries, wake forgotten slots. One process at a time is the reaper. Another one reaps only if
-- something is due before the reaper's next call. Arguments after the common ones: process, a random number, number of shards, 1 if the
-- process rests while the queue is at rest. Returns, packed, the time, when the queue's state was created, and the seconds until the next
-- call; how many entries of lost leases run again; 1 if the queue is at rest; 1 if this process is the reaper.
step('reap', function(s, args)
  local q, now, p = s.q, s.now, s.prefix
  if q.reaper_until > now and redis.call('GET', p .. 'm') ~= args[HEAD + 1] and next_reap(s, true) + REAPER_SECONDS >= q.reaper_until then
    -- The more slots and gateways can take over, the less often each one checks.
    local others = redis.call('ZCARD', p .. 'h') * tonumber(args[HEAD + 3]) + redis.call('ZCARD', p .. 'g') + 1
    local pause = q.reaper_until - now + tonumber(args[HEAD + 2]) * STANDBY_SECONDS * others
    return {struct.pack('<ddd', now, q.born, pause), 0, stirs(s) and 0 or 1, 0}, true
  end
  redis.call('SET', p .. 'm', args[HEAD + 1], 'EX', LIFE_SECONDS_TEXT)
  local again = 0
  for _, fence in ipairs(redis.call('ZRANGEBYSCORE', p .. 'y', '-inf', now)) do
    local lease = take_lease(s, fence)
    if lease then
      local worker = string.match(lease.slot, '%z(.*)$')
      local message = string.format('worker %s did not report within %g s', worker, s.lease_seconds)
      local version = string.gsub(string.match(p, '}@([^+:]*)') or '', '%%', ':')
      local lost = {LEASE_LOST, message, worker, '', version, string.format('%s@%.6f', worker, lease.left_at)}
      again = again + fail(s, lease, cmsgpack.pack(lost), tonumber(args[HEAD + 2]))
    end
  end
  expire_followers(s)
  expire(s)
  forget_paid(s)
  forget_ended(s)
  recount(s)
  if q.swept_at + SWEEP_SECONDS <= now then
    q.swept_at = now
    sweep(s)
    culprits.tidy(s)
    budgets.tidy(s)
    renew(s)
  end
  if q.coming_until > -INF and q.coming_until <= now then q.coming_until = -INF end
  if q.armed + WATCH_GRACE <= now then
    no_longer_idle(s, redis.call('GET', p .. 'f'))
    q.armed = INF
  end
  ring(s)
  local due, rests = next_reap(s, args[HEAD + 4] == '1'), stirs(s) and 0 or 1
  q.reaper_until, s.touched[FLEET] = due + REAPER_SECONDS, true
  return {struct.pack('<ddd', now, q.born, due - now), again, rests, 1}
end)
end

-- Wake-ups of idle slots. They sleep instead of polling.
--
-- If there is no batch for a claim, the slot is idle. If a change of the queue creates work, the first idle slot is woken. No other slot is
-- woken until that slot has claimed or is considered gone. If a batch may only leave later, one idle slot is told the time: it is on watch.
local function send_wakeup(s, slot, instant)
  local process, worker = string.match(slot, '^(.-)%z(.*)$')
  local key = s.prefix .. 'b:' .. process
  redis.call('RPUSH', key, struct.pack('<d', instant) .. load_of(s) .. worker)
  redis.call('EXPIRE', key, WAKEUP_SECONDS_TEXT)
end

local function off_watch(s, slot)
  if s.q.armed < INF and redis.call('GET', s.prefix .. 'f') == slot then s.q.armed = INF end
end

local function no_longer_idle(s, slot)
  local q = s.q
  if q.idle > 0 and redis.call('ZREM', s.prefix .. 'i', slot) == 1 then q.idle = q.idle - 1 end
  off_watch(s, slot)
end

local function wake(s, slot)
  local q = s.q
  no_longer_idle(s, slot)
  q.coming_until = s.now + COMING_SECONDS
  redis.call('SET', s.prefix .. 'c', slot, 'EX', LIFE_SECONDS_TEXT)
  send_wakeup(s, slot, 0)
end

-- Put a slot on watch. Returns the time if the slot is `me`: its claim is being answered, so it needs no wake-up.
local function watch(s, slot, instant, me)
  if instant < s.q.armed then
    s.q.armed = instant
    redis.call('SET', s.prefix .. 'f', slot, 'EX', LIFE_SECONDS_TEXT)
    if slot == me then return instant end
    send_wakeup(s, slot, instant)
  end
end

-- Wake an idle slot if there is work, or put one on watch. `me` is the slot that is claiming, if any. If it must claim again
-- without a wake-up, returns when.
local function ring(s, me)
  local q, now = s.q, s.now
  if q.idle == 0 then
    q.armed = INF
    return nil
  end
  if q.coming_until > now or (q.fresh == 0 and q.groups == 0 and not bulk.waits(s)) then return nil end
  local idle = redis.call('ZRANGE', s.prefix .. 'i', 0, 1)
  if #idle == 0 then
    q.idle, q.armed = 0, INF
    return nil
  end
  if idle[1] == me and idle[2] and q.team == 0 then idle[1], idle[2] = idle[2], me end  -- The other one is already listening.
  local again = INF
  if q.groups > 0 then
    for _, group in ipairs(suspects.groups(s)) do
      for _, slot in ipairs(idle) do
        local opens = suspects.opens_at(s, group, string.match(slot, '%z(.*)$'))
        if opens <= now then
          wake(s, slot)
          return nil
        end
        again = math.min(again, opens)
      end
    end
  end
  if q.fresh > 0 then
    local reason, instant = 'stale', nil
    if now - q.rule_at <= RULE_AGE then reason, instant = decide(s, idle[1]) end
    if reason then
      wake(s, idle[1])
      return nil
    end
    again = math.min(again, instant)
  end
  if bulk.waits(s) then
    local opens = bulk.opens_at(s)
    if opens <= now then
      wake(s, idle[1])
      return nil
    end
    again = math.min(again, opens)
  end
  return watch(s, idle[1], again, me)
end

-- Record that a slot has no work before `instant`. Returns when it should claim again without a wake-up, or INF if another idle slot is on
-- watch. If batches are spaced, the fastest slot is woken first.
local function go_idle(s, slot, instant)
  local q = s.q
  q.idle = q.idle + redis.call('ZADD', s.prefix .. 'i', 'NX', s.now + rank_of(s, slot) * LONGER_THAN_IDLE, slot)
  lasting(s, 'i')
  if q.idle == 1 then return watch(s, slot, instant, slot) or INF end
  return ring(s, slot) or INF
end

local function came(s, slot)
  if s.q.coming_until > -INF and redis.call('GET', s.prefix .. 'c') == slot then s.q.coming_until = -INF end
end

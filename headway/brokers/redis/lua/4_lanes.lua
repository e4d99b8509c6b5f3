-- Who rides: as `core.packing`. A lane serves its tenants in rounds, one entry of each in a round.

local function start_afresh(s, tier)
  redis.call('DEL', s.prefix .. 't' .. tier)
end

local function look_again(s)
  local q = s.q
  q.oldest, q.due = INF, INF
  if q.fresh == 0 then
    return
  end
  for tier = 1, s.tiers do
    if q.depth[tier] > 0 then
      local first = redis.call('ZRANGE', s.prefix .. 'a' .. tier, 0, 0, 'WITHSCORES')
      q.oldest = math.min(q.oldest, tonumber(first[2]))
    end
  end
  q.due = tonumber(redis.call('ZRANGE', s.prefix .. 'd', 0, 0, 'WITHSCORES')[2])
end

-- Take members out of a lane that were not popped from it; their tenants get the places back.
local function drop_from_lane(s, entry)
  local q, tier = s.q, entry.tier
  if redis.call('ZREM', s.prefix .. 'l' .. tier, entry.member) == 0 then
    return false
  end
  redis.call('ZREM', s.prefix .. 'a' .. tier, entry.member)
  redis.call('ZREM', s.prefix .. 'd', entry.member)
  q.depth[tier] = q.depth[tier] - 1
  q.fresh = q.fresh - 1
  if q.depth[tier] == 0 then
    start_afresh(s, tier)
  else
    local tenant = tenant_of(entry.key)
    local latest = tonumber(redis.call('ZSCORE', s.prefix .. 't' .. tier, tenant) or 0)
    if latest >= q.next[tier] then
      redis.call('ZADD', s.prefix .. 't' .. tier, latest - 1, tenant)
    end
  end
  return true
end

local function pop(s, tier, count, into)
  local q = s.q
  local popped = redis.call('ZPOPMIN', s.prefix .. 'l' .. tier, count)
  local members = {}
  for i = 1, #popped, 2 do
    members[#members + 1] = popped[i]
    into[#into + 1] = popped[i]
    q.next[tier] = math.max(q.next[tier], tonumber(popped[i + 1]) + 1)
  end
  if #members > 0 then
    call_all('ZREM', s.prefix .. 'a' .. tier, members)
    call_all('ZREM', s.prefix .. 'd', members)
  end
  q.depth[tier] = q.depth[tier] - #members
  q.fresh = q.fresh - #members
  if q.depth[tier] == 0 then
    start_afresh(s, tier)
  elseif redis.call('ZCARD', s.prefix .. 't' .. tier) > q.depth[tier] + FORGET_ABOVE then
    redis.call('ZREMRANGEBYSCORE', s.prefix .. 't' .. tier, '-inf', '(' .. q.next[tier])
  end
end

-- Pop as many members as there is room for: tiers in order, but when more waits than fits, the last places are kept
-- for the tiers below the highest that waits, the longest wait first.
local function pop_in_turns(s, room)
  local q, waiting, total, taken = s.q, {}, 0, {}
  for tier = 1, s.tiers do
    if q.depth[tier] > 0 then
      waiting[#waiting + 1] = tier
      total = total + q.depth[tier]
    end
  end
  local kept = 0
  if total > room and s.share > 0 and room >= 2 then
    local lower = total - q.depth[waiting[1]]
    kept = math.min(math.max(1, math.floor(room * s.share)), lower)
  end
  local left = room - kept
  for _, tier in ipairs(waiting) do
    local count = math.min(left, q.depth[tier])
    if count > 0 then
      pop(s, tier, count, taken)
      left = left - count
    end
  end
  for _ = 1, kept + left do
    local longest, chosen = INF, nil
    for place = 2, #waiting do
      local tier = waiting[place]
      if q.depth[tier] > 0 then
        local arrived = tonumber(redis.call('ZRANGE', s.prefix .. 'a' .. tier, 0, 0, 'WITHSCORES')[2])
        if arrived < longest then
          longest, chosen = arrived, tier
        end
      end
    end
    if not chosen then
      break
    end
    pop(s, chosen, 1, taken)
  end
  return taken
end

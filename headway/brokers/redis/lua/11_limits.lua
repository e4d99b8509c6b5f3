-- Rate limits. See `core.ratelimit`. A sorted set contains each limit's theoretical arrival time while something is owed. On a single server
-- all queues share the set. In a cluster each queue has its own, because a step can't access other nodes. The set also contains the negated
-- time of the last charge, which shows if the clock was set back. Its name LATEST is so long that Redis doesn't store the set as a list of strings.
--
-- A limit is a list: id, seconds that a request adds to the debt, maximum seconds of debt.
local LATEST = '-- the instant of the last charge, which is not a limit of any request --'

-- The set must only expire once all debts are paid.
local function renew_book(s)
  local longest = tonumber(redis.call('ZRANGE', s.limits, -1, -1, 'WITHSCORES')[2] or 0)
  redis.call('EXPIRE', s.limits, math.ceil(math.max(longest - s.now, 0)) + LIFE_SECONDS)
end

local function open_book(s, limits)
  local ids, owed = {LATEST}, {}
  for i = 1, #limits do ids[i + 1] = limits[i][1] end
  local scores = call_each('ZMSCORE', s.limits, ids)
  local latest = -(scores[1] or 0)
  if s.now < latest - CLOCK_STEP then
    shift(s.limits, latest - s.now)  -- The clock was set back, but debts stay the same.
    redis.call('ZADD', s.limits, -s.now, LATEST)
    renew_book(s)
    scores = call_each('ZMSCORE', s.limits, ids)
  end
  for i = 1, #limits do owed[ids[i + 1]] = math.max((scores[i + 1] or 0) - s.now, 0) end
  return {limits = limits, known = scores[1], owed = owed, charged = {}}
end

-- Position of the exceeded limit with the longest wait among the entry's limits, and the wait in seconds.
local function over_limit(book, positions)
  local worst, longest = nil, RATE_ROUNDING
  for i = 1, #positions do
    local limit = book.limits[positions[i] + 1]
    local wait = book.owed[limit[1]] + limit[2] - limit[3]
    if wait > longest then worst, longest = i - 1, wait end
  end
  return worst, longest
end

local function charge(book, positions)
  for i = 1, #positions do
    local limit = book.limits[positions[i] + 1]
    local id = limit[1]
    book.owed[id], book.charged[id] = book.owed[id] + limit[2], true
  end
end

-- Store the debts. Returns the debt of each limit, in order, packed.
local function close_book(s, book)
  local tats, owed = {-s.now, LATEST}, {}
  for id in pairs(book.charged) do tats[#tats + 1], tats[#tats + 2] = s.now + book.owed[id], id end
  if #tats > 2 then
    call_all('ZADD', s.limits, tats)
    if not book.known then renew_book(s) end
  end
  for i = 1, #book.limits do owed[i] = book.owed[book.limits[i][1]] end
  return as_doubles(owed)
end

local function forget_paid(s)
  if redis.call('ZREMRANGEBYSCORE', s.limits, 0, s.now) > 0 and redis.call('ZCARD', s.limits) == 1 then
    redis.call('DEL', s.limits)
  end
end

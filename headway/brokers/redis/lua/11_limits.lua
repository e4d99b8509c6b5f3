-- Rate limits: as `core.ratelimit`, one theoretical arrival time for each in the sorted set `w`, until nothing is owed.
--
-- A limit is a list: its id, the seconds that a request adds to what is owed, the most seconds that may be owed.

local function open_book(s, limits)
  local ids, book = {}, {limits = limits, owed = {}, charged = {}}
  for i, limit in ipairs(limits) do
    ids[i] = limit[1]
  end
  if #ids > 0 then
    for i, tat in ipairs(call_each('ZMSCORE', s.prefix .. 'w', ids)) do
      -- Not more than the burst's worth, or whoever puts the clock back locks everybody out.
      book.owed[ids[i]] = math.min(math.max(tonumber(tat or 0) - s.now, 0), limits[i][3])
    end
  end
  return book
end

-- Charge an entry to all its limits or to none. Returns the place of the limit that it is over for longest among its own,
-- and the seconds until it would not be.
local function charge(book, places)
  local owed, worst, longest = {}, nil, RATE_ROUNDING
  for i, place in ipairs(places) do
    local limit = book.limits[place + 1]
    owed[i] = book.owed[limit[1]] + limit[2]
    local wait = owed[i] - limit[3]
    if wait > longest then
      worst, longest = i - 1, wait
    end
  end
  if worst then
    return worst, longest
  end
  for i, place in ipairs(places) do
    local id = book.limits[place + 1][1]
    book.owed[id], book.charged[id] = owed[i], true
  end
  return nil
end

-- Write down what is owed. Returns it for each limit, in order.
local function close_book(s, book)
  local tats, owed = {}, {}
  for id in pairs(book.charged) do
    tats[#tats + 1], tats[#tats + 2] = exact(s.now + book.owed[id]), id
  end
  call_all('ZADD', s.prefix .. 'w', tats)
  for i, limit in ipairs(book.limits) do
    owed[i] = exact(book.owed[limit[1]])
  end
  return owed
end

local function forget_paid(s)
  redis.call('ZREMRANGEBYSCORE', s.prefix .. 'w', '-inf', exact(s.now))
end

-- Leases by fence. A call with a fence whose lease no longer exists changes nothing.
local function lease_of(s, fence)
  local packed = redis.call('HGET', s.prefix .. 'x', fence)
  return packed and cmsgpack.unpack(packed) or nil
end

-- Remove a lease, and return it, or nil if its fence is no longer valid: it has expired or was settled.
local function take_lease(s, fence)
  local lease = lease_of(s, fence)
  if not lease then return nil end
  redis.call('HDEL', s.prefix .. 'x', fence)
  redis.call('ZREM', s.prefix .. 'y', fence)
  redis.call('ZREM', s.prefix .. 'ys', fence)
  local last = redis.call('HGET', s.prefix .. 'n', lease.slot)
  if last and struct.unpack('<d', last) == tonumber(fence) then
    redis.call('HDEL', s.prefix .. 'n', lease.slot)
  end
  note_busy(s)
  s.q.busy = s.q.busy - 1
  if lease.bulk then bulk.back(s, lease) end
  if lease.size >= s.q.running then
    s.q.running = s.q.busy > 0 and tonumber(redis.call('ZRANGE', s.prefix .. 'ys', -1, -1, 'WITHSCORES')[2] or 0) or 0
  end
  return lease
end

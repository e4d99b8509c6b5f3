-- Tallies of something per tenant and of all together, as `core.retention` counts bytes. A tally is a sorted set of negative amounts,
-- so the tenant with most comes first, ties by name. The total has the name ALL, which no UTF-8 text equals.
local tallies = {}
local ALL = '\255'

-- Amounts of a tenant and of all.
function tallies.of(key, tenant)
  local scores = redis.call('ZMSCORE', key, tenant, ALL)
  return -tonumber(scores[1] or 0), tonumber(scores[2] or 0)
end

-- Add to a tenant's amount. Returns its new amount and that of all.
function tallies.add(key, tenant, more)
  local own, all = -redis.call('ZINCRBY', key, -more, tenant), tonumber(redis.call('ZINCRBY', key, more, ALL))
  if own <= 0 then redis.call('ZREM', key, tenant) end
  if all <= 0 then redis.call('DEL', key) end
  return own, all
end

-- Take from a tenant until it has at most `most`, or without a tenant from whoever has most until all together do. `lose` takes
-- something from a tenant, and returns nothing if there is nothing, because stored data was lost.
function tallies.hold(key, most, lose, tenant)
  local own, all = tallies.of(key, tenant or ALL)
  while (tenant and own or all) > most do
    local loser = tenant or redis.call('ZRANGE', key, 0, 0)[1]
    if not lose(loser) then redis.call('ZREM', key, loser) end
    own, all = tallies.of(key, tenant or ALL)
  end
end

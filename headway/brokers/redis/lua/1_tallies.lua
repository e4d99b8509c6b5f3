-- Tallies: amounts for each tenant and in total. See `core.retention`, which counts bytes. A tally is a sorted set of negative amounts, so
-- the tenant with the largest amount comes first; ties are ordered by name. The total is stored as ALL, which is not valid UTF-8.
local tallies = {}
local ALL = '\255'

-- Amount of a tenant, and total.
function tallies.of(key, tenant)
  local scores = redis.call('ZMSCORE', key, tenant, ALL)
  return -tonumber(scores[1] or 0), tonumber(scores[2] or 0)
end

-- Add to a tenant's amount. Returns its new amount and the new total.
function tallies.add(key, tenant, more)
  local own, all = -redis.call('ZINCRBY', key, -more, tenant), tonumber(redis.call('ZINCRBY', key, more, ALL))
  if own <= 0 then redis.call('ZREM', key, tenant) end
  if all <= 0 then redis.call('DEL', key) end
  return own, all
end

-- Reduce a tenant's amount to at most `most` or, if there is no tenant, reduce the total by taking from the tenant with the largest amount.
-- `lose` takes something from a tenant. It returns nothing if the tenant has nothing, because stored data was lost.
function tallies.hold(key, most, lose, tenant)
  local own, all = tallies.of(key, tenant or ALL)
  while (tenant and own or all) > most do
    local loser = tenant or redis.call('ZRANGE', key, 0, 0)[1]
    if not lose(loser) then redis.call('ZREM', key, loser) end
    own, all = tallies.of(key, tenant or ALL)
  end
end

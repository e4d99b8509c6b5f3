-- Tallies: how much of something each tenant has, and all have together, as `core.retention` counts bytes. A tally is a sorted set
-- of less than nothing for each tenant, so that who has most is the first, of those that have as much the first by name. What all
-- have is in it under ALL, which is no tenant's name, as no text has it in UTF-8.
local tallies = {}

do

local ALL = '\255'

-- What a tenant has, and what all have.
function tallies.of(key, tenant)
  local found = redis.call('ZMSCORE', key, tenant, ALL)
  return -tonumber(found[1] or 0), tonumber(found[2] or 0)
end

-- Add to what a tenant has, or take off. Returns what it has then, and what all have.
function tallies.add(key, tenant, more)
  local own, all = -redis.call('ZINCRBY', key, -more, tenant), tonumber(redis.call('ZINCRBY', key, more, ALL))
  if own <= 0 then redis.call('ZREM', key, tenant) end
  if all <= 0 then redis.call('DEL', key) end
  return own, all
end

-- Have a tenant lose something until it has no more than this; without one, whoever has most, until all have no more. `lose` takes
-- something of a tenant off; it returns nothing where there is nothing, as part of what was counted was lost.
function tallies.hold(key, most, lose, tenant)
  local own, all = tallies.of(key, tenant or ALL)
  while (tenant and own or all) > most do
    local one = tenant or redis.call('ZRANGE', key, 0, 0)[1]
    if not lose(one) then redis.call('ZREM', key, one) end
    own, all = tallies.of(key, tenant or ALL)
  end
end

end

-- Retry budgets: as `core.retry.RetryBudgets`. What a tenant has spent is a debt, which time and first runs pay off. It is known by
-- the instant at which it is paid, as what is owed to a limit is; a tenant that owes nothing is not there.
local budgets = {}

do

-- Seconds that pay for one retry, and those that pay for all of a budget.
local function terms(q)
  local each = 1 / math.max(BUDGET_TRICKLE, BUDGET_TRICKLE_RUNS * q.max_batch)
  return each, each * math.max(BUDGET_RESERVE, BUDGET_RUNS * q.max_batch)
end

local function count_by_tenant(entries)
  local counts = {}
  for _, entry in ipairs(entries) do
    local tenant = tenant_of(key_of(entry.member))
    counts[tenant] = (counts[tenant] or 0) + 1
  end
  return counts
end

-- Forget the budgets that are full again.
function budgets.tidy(s)
  if s.q.budgets > 0 then
    redis.call('ZREMRANGEBYSCORE', s.prefix .. 'rb', '-inf', s.now)
    s.q.budgets, s.touched[SELDOM] = redis.call('ZCARD', s.prefix .. 'rb'), true
  end
end

-- Tenants have entries that run for the first time.
function budgets.earn(s, entries)
  if s.q.budgets == 0 then return end
  local each = terms(s.q)
  for tenant, count in pairs(count_by_tenant(entries)) do
    redis.call('ZADD', s.prefix .. 'rb', 'XX', 'INCR', -count * BUDGET_RATIO * each, tenant)
  end
  budgets.tidy(s)
end

-- Take retries out of a tenant's budget; false when they are not there.
local function spend(s, tenant, count)
  local each, most = terms(s.q)
  local paid_at = math.max(tonumber(redis.call('ZSCORE', s.prefix .. 'rb', tenant) or s.now), s.now) + count * each
  if paid_at - s.now > most + RATE_ROUNDING then return false end
  s.q.budgets, s.touched[SELDOM] = s.q.budgets + redis.call('ZADD', s.prefix .. 'rb', paid_at, tenant), true
  lasting(s, 'rb')
  return true
end

-- Those whose tenants have the retries for them, which are taken, and those whose tenants have not.
function budgets.pay(s, entries)
  local pays, paid, spent = {}, {}, {}
  for tenant, count in pairs(count_by_tenant(entries)) do
    pays[tenant] = spend(s, tenant, count)
  end
  for _, entry in ipairs(entries) do
    local into = pays[tenant_of(key_of(entry.member))] and paid or spent
    into[#into + 1] = entry
  end
  return paid, spent
end

end

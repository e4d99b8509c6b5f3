-- Retry budgets. See `core.retry.RetryBudgets`. What a tenant has spent is a debt, which is paid off by time and by first runs. It is stored as
-- the time at which it will be paid. Tenants without debt aren't stored.
local budgets = {}
do
-- Seconds that pay for one retry, and for the entire budget.
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

function budgets.tidy(s)
  if s.q.budgets > 0 then
    redis.call('ZREMRANGEBYSCORE', s.prefix .. 'rb', '-inf', s.now)
    s.q.budgets, s.touched[SELDOM] = redis.call('ZCARD', s.prefix .. 'rb'), true
  end
end

-- Pay off debts of tenants whose entries run for the first time.
function budgets.earn(s, entries)
  if s.q.budgets == 0 then return end
  local each = terms(s.q)
  for tenant, count in pairs(count_by_tenant(entries)) do
    redis.call('ZADD', s.prefix .. 'rb', 'XX', 'INCR', -count * BUDGET_RATIO * each, tenant)
  end
  budgets.tidy(s)
end

-- Spend a tenant's retries. Returns false if the budget doesn't cover them.
local function spend(s, tenant, count)
  local each, most = terms(s.q)
  local paid_at = math.max(tonumber(redis.call('ZSCORE', s.prefix .. 'rb', tenant) or s.now), s.now) + count * each
  if paid_at - s.now > most + RATE_ROUNDING then return false end
  s.q.budgets, s.touched[SELDOM] = s.q.budgets + redis.call('ZADD', s.prefix .. 'rb', paid_at, tenant), true
  lasting(s, 'rb')
  return true
end

-- Split entries into those whose tenants pay for their retries and those whose tenants can't.
function budgets.pay(s, entries)
  local pays = {}
  for tenant, count in pairs(count_by_tenant(entries)) do pays[tenant] = spend(s, tenant, count) end
  return split(entries, function(entry) return pays[tenant_of(key_of(entry.member))] end)
end
end

"""Rate limits as they are counted in the server: over several processes, when the clock is set, and what is left."""

from functools import partial

import pytest

from headway import errors
from headway.brokers.redis import entry_wire
from headway.brokers.redis.broker import RedisBroker
from headway.model import Limit
from tests.contracts.brokers import ask, leave, output
from tests.redis.stand import Stand

KEY = Limit("key:k", "key", 600.0, 50.0)
COUNTS = "headway:{limits}:w"


async def test_four_processes_share_one_rate_limit(harness: Stand) -> None:
    brokers = [harness.broker, harness.peer(), await harness.another(), await harness.another()]
    admitted = 0
    for step in range(100):
        asked = [ask(gateway=f"g{step % 4}", limits=(KEY,)) for _ in range(1 + step % 7)]
        verdicts = await brokers[step % 4].enqueue(asked)
        admitted += sum(verdict is None for verdict in verdicts)
        assert {verdict.code for verdict in verdicts if verdict is not None} <= {errors.RATE_LIMITED}
        await leave(harness.broker, *asked)
        await harness.advance(0.1)
    assert admitted == 50 + 99


async def test_nothing_is_left_when_nothing_is_owed(harness: Stand) -> None:
    others = [Limit(f"user:{number}", "user", 60.0, 5.0) for number in range(20)]
    entries = [ask(limits=(KEY, other)) for other in others]
    await harness.broker.enqueue(entries)
    assert harness.server.command("ZCARD", COUNTS) == 1 + len(others) + 1
    await leave(harness.broker, *entries)
    await harness.reaping(1.1)
    assert harness.server.command("EXISTS", COUNTS) == 1
    await harness.reaping(1.0)
    assert harness.server.command("EXISTS", COUNTS) == 0


@pytest.mark.parametrize("step", [-3600.0, -1.0, -0.1])
async def test_the_clock_is_put_back_and_nobody_is_locked_out(harness: Stand, step: float) -> None:
    await harness.broker.enqueue([ask(limits=(KEY,)) for _ in range(50)])
    harness.clock_error += step
    [verdict] = await harness.peer().enqueue([ask(limits=(KEY,))])
    assert verdict is not None
    assert verdict.retry_after == pytest.approx(0.1, abs=0.11)
    await harness.advance(1.0 + (abs(step) if step > -0.5 else 0.0))
    verdicts = await harness.peer().enqueue([ask(tenant=f"t-{number}", limits=(KEY,)) for number in range(12)])
    assert [verdict is None for verdict in verdicts] == [True] * 10 + [False] * 2


async def test_limits_do_not_travel_with_what_is_stored(harness: Stand) -> None:
    await harness.broker.enqueue([ask("text", id="a", limits=(KEY,))])
    [payload] = harness.server.command("HVALS", harness.key("p"))
    assert b"key:k" not in payload
    lease = await harness.claim()
    assert lease.entries[0].limits == ()
    assert output(lease.entries[0].input) == output("text")


async def test_what_is_owed_is_forgotten_with_the_servers_state(harness: Stand) -> None:
    await harness.broker.enqueue([ask(limits=(KEY,)) for _ in range(50)])
    assert harness.broker.rate_limit_debt(KEY) == pytest.approx(5.0)
    harness.server.flush()
    await harness.advance(0.1)
    await harness.broker.reap()
    assert harness.broker.rate_limit_debt(KEY) == 0.0


def test_a_limit_of_a_tier_is_spread_over_counts_and_others_are_not() -> None:
    tier, user = Limit("tier:1", "tier", 600.0, 2.0), Limit("user:u", "user", 600.0, 2.0)
    assert [entry_wire._pack_limit(limit, 4) for limit in (tier, user)] == [("tier:1", 0.4, 0.4), ("user:u", 0.1, 0.2)]
    assert entry_wire.pack_extras([ask()], [], 4) == b""


class Shard:
    """A shard of a model, whose limits that span tenants are spread over two counts."""

    counts = 2

    def __init__(self, owed: float) -> None:
        self._rate_limit_cache = owed

    def rate_limit_debt(self, limit: Limit) -> float:
        return self._rate_limit_cache


async def test_a_tier_is_owed_its_mean_and_others_the_most(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, user = Limit("tier:1", "tier", 600.0, 2.0), Limit("user:u", "user", 600.0, 2.0)
    monkeypatch.setattr(harness.broker, "_queues", {"m": [Shard(3.0), Shard(1.0)]})
    owed = partial(RedisBroker.rate_limit_debt, harness.broker)  # type: ignore[arg-type]
    assert (owed(tier), owed(user)) == (2.0, 3.0)

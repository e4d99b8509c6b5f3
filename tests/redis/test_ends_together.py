"""A step with many entries sets the end of each key once."""

from __future__ import annotations

from tests.contracts.brokers import story
from tests.contracts.dedup_keys import key, sharing
from tests.redis.stand import Stand


def expires(harness: Stand) -> int:
    calls: int = harness.server.command("INFO", "commandstats").get("cmdstat_expire", {}).get("calls", 0)
    return calls


@story
async def test_who_joins_the_same_answer_costs_no_end_of_its_own(harness: Stand) -> None:
    await harness.broker.enqueue([sharing("first", key())])
    few = expires(harness)
    await harness.broker.enqueue([sharing(f"one {number}", key()) for number in range(4)])
    few = expires(harness) - few
    many = expires(harness)
    await harness.broker.enqueue([sharing(f"other {number}", key()) for number in range(200)])
    assert expires(harness) - many <= few

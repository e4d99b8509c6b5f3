"""A step with many entries sets the end of each key once."""

from __future__ import annotations

from tests.contracts.brokers import output, story
from tests.contracts.dedup_keys import key, sharing
from tests.redis.stand import Stand


def expires(harness: Stand) -> int:
    calls: int = harness.server.command("INFO", "commandstats").get("cmdstat_expire", {}).get("calls", 0)
    return calls


def commands(harness: Stand) -> dict[str, int]:
    stats = harness.server.command("INFO", "commandstats")
    return {name.removeprefix("cmdstat_"): told["calls"] for name, told in stats.items()}


@story
async def test_who_joins_the_same_answer_costs_no_end_of_its_own(harness: Stand) -> None:
    await harness.broker.enqueue([sharing("first", key())])
    few = expires(harness)
    await harness.broker.enqueue([sharing(f"one {number}", key()) for number in range(4)])
    few = expires(harness) - few
    many = expires(harness)
    await harness.broker.enqueue([sharing(f"other {number}", key()) for number in range(200)])
    assert expires(harness) - many <= few


@story
async def test_who_gets_a_kept_answer_costs_a_look_at_its_key_and_all_are_replied_to_in_one_piece(
    harness: Stand,
) -> None:
    await harness.broker.enqueue([sharing("first", key()), sharing("another", key("k2"))])
    await harness.answer(await harness.claim())
    _, read = await harness.broker.replies("g", 0)
    begun = commands(harness)
    joining = [sharing(f"one {number}", key(("k", "k2")[number % 2])) for number in range(64)]
    assert await harness.broker.enqueue(joining) == [None] * 64
    done = {name: calls - begun.get(name, 0) for name, calls in commands(harness).items()}
    assert done["xadd"] == 2
    assert done["hget"] <= 3 * 64
    assert sum(calls for name, calls in done.items() if name != "hget") <= 32
    answers: dict[str, object] = {}
    while len(answers) < 64:
        replies, read = await harness.broker.replies("g", read)
        answers |= {reply.id: reply.output for reply in replies}
    assert answers == {entry.id: output("asked") for entry in joining}

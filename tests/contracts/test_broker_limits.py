"""Promises of every broker on rate limits: exact across gateways, all charged or none, only for admitted entries."""

import pytest

from headway import errors
from headway.model import Entry, Failure, Limit
from tests.contracts.brokers import MAX_BATCH, MAX_QUEUE, Harness, ask, ids, several

KEY = Limit("key:k", "key", 600.0, 5.0)
"""One every 0.1 s, with bursts of five."""
MODEL = Limit("key:k:m", "model", 60.0, 2.0, "m")
"""The same key's limit for one model: one per second, with bursts of two."""
EXACT = 1e-3
"""Seconds by which a broker may round."""


def over(verdict: Failure | None) -> float:
    """Seconds to wait, from a verdict that must be over a limit."""
    assert verdict is not None
    assert (verdict.code, verdict.reason) == (errors.RATE_LIMITED, "rate")
    assert verdict.retry_after is not None
    return verdict.retry_after


def counted(*limits: Limit, **how: object) -> Entry:
    return ask(limits=limits or (KEY,), **how)  # type: ignore[arg-type]


async def test_limits_come_before_room_and_who_finds_none_is_not_charged(harness: Harness) -> None:
    await harness.broker.enqueue([ask() for _ in range(MAX_QUEUE)])
    verdicts = await harness.broker.enqueue([counted() for _ in range(8)])
    assert {verdict and verdict.code for verdict in verdicts} == {errors.SERVICE_OVERLOADED}
    assert harness.broker.rate_limit_debt(KEY) == 0.0
    await harness.claim()
    assert [one is None for one in await harness.broker.enqueue([counted() for _ in range(6)])] == [True] * 5 + [False]
    await harness.broker.enqueue([ask() for _ in range(MAX_BATCH)])
    over((await harness.broker.enqueue([counted()]))[0])


async def test_a_changed_rate_holds_at_once_for_what_is_owed_by_the_old_one(harness: Harness) -> None:
    await harness.broker.enqueue([counted() for _ in range(5)])
    slower = Limit(KEY.id, KEY.name, 60.0, 5.0)
    verdicts = await harness.broker.enqueue([counted(slower) for _ in range(6)])
    assert [verdict is None for verdict in verdicts] == [True] * 4 + [False] * 2
    assert over(verdicts[4]) == pytest.approx(0.5, abs=EXACT)
    [verdict] = await harness.broker.enqueue([counted()])  # 4.5 s are owed, and the old rate allows 0.5 s.
    assert over(verdict) == pytest.approx(4.1, abs=EXACT)


async def test_what_one_pays_for_is_let_in_with_it_or_not_at_all(harness: Harness) -> None:
    await harness.broker.enqueue([counted(), counted()])
    refused = several(4, KEY)
    verdicts = await harness.broker.enqueue([ask(id="other"), *refused, ask(id="after")])
    assert [verdict is None for verdict in verdicts] == [True, False, False, False, False, True]
    waits = {over(verdict) for verdict in verdicts[1:5]}
    assert len(waits) == 1
    assert not set(ids(refused)) & set(ids((await harness.claim()).entries))
    for entry in refused:
        assert await harness.broker.state(entry.tenant, entry.id) is None
    await harness.advance(waits.pop() + 2 * EXACT)
    for _ in range(2):  # The second time they are already known.
        assert list(await harness.broker.enqueue(refused)) == [None] * 4
    assert list(await harness.broker.enqueue(several(3)[1:])) == [None] * 2, "without the one that pays"
    assert set(ids((await harness.claim()).entries)) > set(ids(refused))

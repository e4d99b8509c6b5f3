"""Promises of every broker on rate limits: exact across gateways, all charged or none, and only for admitted entries."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from headway import errors
from headway.core.budget import GREED
from headway.core.ratelimit import counting_as
from headway.model import DedupKey, DedupKind, Entry, Failure, Limit
from tests.contracts.brokers import MAX_BATCH, MAX_QUEUE, Harness, ask, drained, ids, leave

KEY = Limit("key:k", "key", 600.0, 5.0)
"""One each 0.1 s, and five at once."""
MODEL = Limit("key:k:m", "model", 60.0, 2.0, "m")
"""Of the same key for one model: one each second, and two at once."""
EXACT = 1e-3
"""Seconds by which a broker may round."""


def over(verdict: Failure | None) -> float:
    """Seconds after which to come again; the verdict must be that the entry is over a limit."""
    assert verdict is not None
    assert (verdict.code, verdict.reason) == (errors.RATE_LIMITED, "rate")
    assert verdict.retry_after is not None
    return verdict.retry_after


def let_in(entries: Sequence[Entry], verdicts: Sequence[Failure | None]) -> list[Entry]:
    return [entry for entry, verdict in zip(entries, verdicts, strict=True) if verdict is None]


def counted(*limits: Limit, **how: object) -> Entry:
    return ask(limits=limits or (KEY,), **how)  # type: ignore[arg-type]


def same(key: str = "s", digest: bytes = b"") -> tuple[DedupKey, ...]:
    return (DedupKey(DedupKind.SAME, key, digest, 60.0),)


async def test_a_limit_for_a_model_takes_nothing_of_other_models_and_callers(harness: Harness) -> None:
    brokers = harness.broker, harness.peer()
    for turn in range(4):
        verdicts = await brokers[turn % 2].enqueue([counted(KEY, MODEL) for _ in range(20)])
        assert [verdict is None for verdict in verdicts] == [turn == 0] * 2 + [False] * 18
        assert "to the model 'm'" in verdicts[-1].message  # type: ignore[union-attr]
    assert harness.broker.rate_limit_debt(KEY) == pytest.approx(0.2, abs=EXACT)
    assert list(await brokers[1].enqueue([counted(model="other") for _ in range(3)])) == [None] * 3
    over((await brokers[0].enqueue([counted(model="other")]))[0])
    other = Limit("key:l", "key", 600.0, 5.0), Limit("key:l:m", "model", 60.0, 2.0, "m")
    assert list(await brokers[0].enqueue([counted(*other, tenant="u") for _ in range(2)])) == [None] * 2


async def test_limits_come_before_room(harness: Harness) -> None:
    await harness.broker.enqueue([counted() for _ in range(5)])
    await harness.broker.enqueue([ask() for _ in range(MAX_QUEUE - 5)])
    over((await harness.broker.enqueue([counted()]))[0])


async def test_who_is_refused_for_want_of_room_is_not_charged(harness: Harness) -> None:
    await harness.broker.enqueue([ask() for _ in range(MAX_QUEUE)])
    for verdict in await harness.broker.enqueue([counted() for _ in range(8)]):
        assert verdict is not None
        assert verdict.code == errors.SERVICE_OVERLOADED
    assert harness.broker.rate_limit_debt(KEY) == 0.0
    await harness.claim()
    assert [one is None for one in await harness.broker.enqueue([counted() for _ in range(6)])] == [True] * 5 + [False]


async def test_limits_come_before_shares(harness: Harness) -> None:
    await harness.broker.enqueue([ask(dedup_keys=same())])
    await harness.broker.enqueue([counted() for _ in range(5)])
    joining = counted(dedup_keys=same())
    over((await harness.broker.enqueue([joining]))[0])
    over((await harness.broker.enqueue([counted(dedup_keys=same(digest=b"another"))]))[0])
    await harness.answer(await harness.claim())
    assert joining.id not in await drained(harness)
    over((await harness.broker.enqueue([counted(dedup_keys=same())]))[0])  # Though it is kept.


async def test_a_changed_rate_holds_at_once_for_what_is_owed_by_the_old_one(harness: Harness) -> None:
    await harness.broker.enqueue([counted() for _ in range(5)])
    slower = Limit(KEY.id, KEY.name, 60.0, 5.0)
    verdicts = await harness.broker.enqueue([counted(slower) for _ in range(6)])
    assert [verdict is None for verdict in verdicts] == [True] * 4 + [False] * 2
    assert over(verdicts[4]) == pytest.approx(0.5, abs=EXACT)
    [verdict] = await harness.broker.enqueue([counted()])  # 4.5 s are owed, and the old rate allows for 0.5.
    assert over(verdict) == pytest.approx(4.1, abs=EXACT)


async def test_what_is_owed_is_told_by_who_charged_and_never_too_much(harness: Harness) -> None:
    assert (harness.broker.rate_limit_debt(KEY), harness.peer().rate_limit_debt(KEY)) == (0.0, 0.0)
    for made in range(1, 4):
        await harness.broker.enqueue([counted()])
        assert harness.broker.rate_limit_debt(KEY) == pytest.approx(0.1 * made, abs=EXACT)
        assert harness.peer().rate_limit_debt(KEY) <= 0.1 * made + EXACT
    await harness.peer().enqueue([counted()])
    assert harness.peer().rate_limit_debt(KEY) == pytest.approx(0.4, abs=EXACT)
    assert harness.broker.rate_limit_debt(KEY) <= 0.4 + EXACT
    await harness.advance(0.25)
    assert harness.peer().rate_limit_debt(KEY) == pytest.approx(0.15, abs=EXACT)
    assert harness.broker.rate_limit_debt(KEY) <= 0.15 + EXACT
    await harness.advance(0.25)
    assert (harness.broker.rate_limit_debt(KEY), harness.peer().rate_limit_debt(KEY)) == (0.0, 0.0)


async def test_what_is_owed_is_learned_from_a_refusal_too(harness: Harness) -> None:
    await harness.broker.enqueue([counted() for _ in range(5)])
    over((await harness.peer().enqueue([counted()]))[0])
    assert harness.peer().rate_limit_debt(KEY) == pytest.approx(0.5, abs=EXACT)


async def test_the_rate_is_exact_over_minutes(harness: Harness) -> None:
    """Two processes, four gateways, more than is allowed at every instant: burst + rate · time, to the request."""
    limit = Limit("user:u", "user", 1000.0, 50.0)
    rng = random.Random(3)
    passed, seconds = 0, 180.0
    began = harness.now()
    while True:
        for broker, part in ((harness.broker, 0.9), (harness.peer(), 0.1)):
            entries = [counted(limit, gateway=f"g{rng.randrange(4)}") for _ in range(round(part * MAX_QUEUE))]
            admitted = let_in(entries, await broker.enqueue(entries))
            passed += len(admitted)
            await leave(broker, *admitted)
        if harness.now() - began >= seconds:
            break
        await harness.advance(1.5)
    assert passed == pytest.approx(50 + seconds * 1000 / 60, abs=1)


def several(count: int, *limits: Limit, **how: object) -> list[Entry]:
    """Entries of one request, of which the first pays for all and comes for all."""
    charged = tuple(counting_as(limit, count) for limit in limits)
    parts = [ask(nonce=1000 + number, **how) for number in range(count)]  # type: ignore[arg-type]
    payer = parts[0].nonce
    first = msgspec.structs.replace(parts[0], limits=charged, payer=payer, count=count)
    return [first, *(msgspec.structs.replace(part, payer=payer) for part in parts[1:])]


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
    assert list(await harness.broker.enqueue(refused)) == [None] * 4
    assert set(ids((await harness.claim()).entries)) == set(ids(refused))


async def test_what_is_offered_again_without_the_one_that_paid_is_let_in(harness: Harness) -> None:
    parts = several(3, KEY)
    assert list(await harness.broker.enqueue(parts)) == [None] * 3
    assert list(await harness.broker.enqueue(parts)) == [None] * 3, "they are known"
    assert list(await harness.broker.enqueue(several(3)[1:])) == [None] * 2


async def test_who_has_taken_most_of_a_queue_is_let_in_again_as_far_as_its_entries_have_left(harness: Harness) -> None:
    crowded = MAX_QUEUE * GREED // (GREED + 1)
    verdicts = await harness.broker.enqueue([ask(tenant="hog") for _ in range(crowded + 1)])
    assert [verdict is None for verdict in verdicts] == [True] * crowded + [False]
    for _ in range(2):
        await harness.answer(await harness.claim())
    others = [ask(tenant=f"tenant {number}") for number in range(2 * MAX_BATCH)]
    assert await harness.broker.enqueue(others) == [None] * len(others)
    assert await harness.broker.enqueue([ask(tenant="hog")]) == [None]

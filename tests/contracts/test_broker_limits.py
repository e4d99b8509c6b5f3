"""Promises of every broker on rate limits: exact across gateways, all charged or none, and only for admitted entries."""

import msgspec
import pytest

from headway import errors
from headway.core.ratelimit import counting_as
from headway.model import Entry, Failure, Limit
from tests.contracts.brokers import MAX_BATCH, MAX_QUEUE, Harness, ask, ids

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


def counted(*limits: Limit, **how: object) -> Entry:
    return ask(limits=limits or (KEY,), **how)  # type: ignore[arg-type]


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
    for _ in range(2):  # The second time they are known.
        assert list(await harness.broker.enqueue(refused)) == [None] * 4
    assert list(await harness.broker.enqueue(several(3)[1:])) == [None] * 2, "without the one that pays"
    assert set(ids((await harness.claim()).entries)) > set(ids(refused))

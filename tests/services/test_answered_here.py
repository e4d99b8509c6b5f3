"""Wrong requests that a gateway answers by itself count towards the limits of their principal, like any request."""

from __future__ import annotations

import asyncio

import pytest

from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.core.queue_limits import QueueLimits
from headway.core.ratelimit import LOOKS, Debts
from headway.doors.rate_limit_headers import RateLimitHeaders
from headway.gateway.limiter import Limiter
from headway.model import InferenceRequest, Limit, Principal, RequestOptions
from headway.runtime.counters import BrokerCounts
from headway.runtime.request_id import new_id
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand
from tests.virtual_time import Clock

LIMIT = Limit("user-1", "user", 60.0, 5.0)
"""One a second, five at once."""
MANY = 20_000
LIMITED = Principal("somebody", "acme", 1, (LIMIT,))
PICKY = Principal("somebody", "acme", 1, (LIMIT,), frozenset(["other"]))


async def outcome(stand: Stand, model: str = "m", caller: Principal = LIMITED, id: str = "") -> str:
    reply = await stand.gateway.ask(
        InferenceRequest(caller, id or new_id(), RequestOptions(5.0, 1), model, "text", b"")
    )
    return "ok" if reply.failure is None else reply.failure.code


async def test_unknown_models_and_good_requests_share_one_limit(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.0)) as stand:
        codes = [await outcome(stand, model) for model in ("x", "m", "x", "m", "x", "x", "m")]
        assert codes == ["NOT_FOUND", "ok", "NOT_FOUND", "ok", "NOT_FOUND", "RATE_LIMITED", "RATE_LIMITED"]
        assert RateLimitHeaders(stand.gateway).fields((LIMIT,))["ratelimit"].startswith('"user";r=0;')
        await asyncio.sleep(1.0)
        assert await outcome(stand, "x") == "NOT_FOUND"


async def test_a_flood_of_what_is_wrong_gets_its_rate(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.0)) as stand:
        codes = []
        for _ in range(1000):
            codes.append(await outcome(stand, "x"))
            await asyncio.sleep(0.01)
        assert codes.count("NOT_FOUND") == pytest.approx(5 + 10, abs=1)
        assert codes.count("RATE_LIMITED") == 1000 - codes.count("NOT_FOUND")


async def test_models_of_others_and_ids_in_flight_count(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(1.0)) as stand:
        assert await outcome(stand, caller=PICKY) == "FORBIDDEN"
        id = new_id()
        first = asyncio.ensure_future(outcome(stand, id=id))
        await asyncio.sleep(0.01)
        codes = [await outcome(stand, id=id) for _ in range(4)]
        assert codes == ["IDEMPOTENCY_CONFLICT"] * 3 + ["RATE_LIMITED"]
        assert await first == "ok"


def nothing_owed() -> MemoryBroker:
    limits = QueueLimits(3, 8, 0.1, 100)
    return MemoryBroker({"m": limits}, DeadLetterBox(), BrokerCounts(), lambda: 0.0, lambda: 0.5)


def test_what_is_owed_here_is_forgotten_when_it_is_paid() -> None:
    now, queue = [0.0], nothing_owed()
    limiter = Limiter(1, lambda: now[0])
    for number in range(MANY):
        limiter.charge((Limit(f"user-{number}", "user", 60.0, 5.0),))
    now[0] = 2.0
    for _ in range(MANY):
        limiter.excess((LIMIT,), queue)
    assert not limiter.debts


@pytest.mark.parametrize("what", ["a wrong request", "a poll"])
def test_nothing_that_is_owed_is_forgiven_however_many_owe(what: str) -> None:
    limiter = Limiter(1, lambda: 0.0)
    queue = nothing_owed()

    def ask(limit: Limit) -> bool:
        if what == "a poll":
            return limiter.poll((limit,)) is None
        allowed = limiter.excess((limit,), queue) is None
        if allowed:
            limiter.charge((limit,))
        return allowed

    def others(number: int) -> Limit:
        return Limit(f"user-{number}", "user", 60.0, 5.0)

    while ask(LIMIT):
        pass
    for number in range(MANY):
        ask(others(number))
    assert not ask(LIMIT)


def test_a_wrong_request_costs_as_many_looks_however_many_owe(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    popitem = Debts.popitem

    def counted(debts: Debts, last: bool = True) -> tuple[str, float]:
        nonlocal looks
        looks += 1
        return popitem(debts, last)

    monkeypatch.setattr(Debts, "popitem", counted)
    limiter = Limiter(1, lambda: 0.0)
    for number in range(MANY):
        limiter.charge((Limit(f"user-{number}", "user", 60.0, 5.0),))
    assert looks <= LOOKS * MANY
    assert len(limiter.debts) == MANY


def test_a_refund_takes_one_charge_back() -> None:
    now = [0.0]
    limiter = Limiter(1, lambda: now[0])
    limiter.charge((LIMIT,))
    limiter.charge((LIMIT,))
    limiter.refund((LIMIT,))
    assert limiter.debts[LIMIT.id] == pytest.approx(1.0)
    limiter.refund((LIMIT,))
    limiter.refund((LIMIT,))
    now[0] = 1.0
    limiter.refund((LIMIT,))
    assert limiter.debts == {}

"""Rate limits while the broker is away and for invalid requests, and the throttle's share of the refusals."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from headway import errors
from headway.core.ratelimit import LOOKS, Debts
from headway.doors.entrance import RateLimitHeaders
from headway.gateway.limiter import POLLS_AT_ONCE, Limiter
from headway.model import DedupKey, DedupKind, Failure, Limit, Principal
from headway.runtime.request_id import new_id
from tests.core.entries import entry
from tests.services.calls import failure_of
from tests.services.fake_backend import FakeBackend
from tests.services.fleet import Fleet
from tests.services.requests import request
from tests.services.site import memory_broker
from tests.services.stand import Stand
from tests.virtual_time import Clock

LIMITED = Principal("somebody", "acme", 1, (Limit("user-1", "user", 600.0, 40.0),))
"""Ten a second, forty at once."""
FREE = 2
pytestmark = pytest.mark.fleet(0.01, fallback=0.01)


async def admitted(fleet: Fleet, rate: float, seconds: float) -> int:
    """Send requests at a constant rate, and return how many were answered."""
    asked = []
    for number in range(int(rate * seconds)):
        asked.append(fleet.ask(f"text {number}", caller=LIMITED))
        await asyncio.sleep(1.0 / rate)
    return (await fleet.answered(*asked)).count("ok")


@pytest.mark.parametrize(("task_seconds", "polls"), [(4.0, 30), (30.0, 30), (600.0, 600)])
def test_a_task_may_be_polled_once_a_second_for_as_long_as_it_may_take(task_seconds: float, polls: int) -> None:
    limiter = Limiter(1, lambda: 1000.0, task_seconds)
    limits = (Limit("user-1", "user", 1.0, 1.0),)
    for _ in range(polls + POLLS_AT_ONCE):
        assert limiter.poll(limits) is None
    assert limiter.poll(limits) is not None


async def test_while_the_broker_is_away_a_gateway_counts_its_part_of_a_limit(fleet: Fleet) -> None:
    fleet.gateway.limiter.gateways = 4
    assert await admitted(fleet, 50.0, 10.0) == pytest.approx(10 * 10 + 40, abs=2)
    await fleet.go_direct()
    told = RateLimitHeaders(fleet.gateway).fields(LIMITED.limits)
    assert told["ratelimit-policy"] == '"user";q=150;w=60'
    assert await admitted(fleet, 50.0, 20.0) == pytest.approx((20 * 10 + 40) / 4, abs=2)
    await fleet.server.become("fine")
    await asyncio.sleep(5.0)
    assert await admitted(fleet, 50.0, 10.0) == pytest.approx(10 * 10 + 40, abs=2)


@pytest.mark.fleet(2.9, max_batch=1)
async def test_a_burst_that_was_let_in_is_not_refused_because_the_broker_goes(fleet: Fleet) -> None:
    fleet.gateway.limiter.gateways = 4
    asked = [fleet.ask(f"text {number}", caller=LIMITED) for number in range(40)]
    await asyncio.sleep(0.2)
    await fleet.server.become("refuse")
    assert set(await fleet.answered(*asked)) == {"ok"}


@pytest.mark.fleet(max_batch=100)
async def test_the_throttle_is_for_the_lowest_tier_and_says_when_to_come_back(fleet: Fleet, clock: Clock) -> None:
    throttle = fleet.gateway.limiter.throttles["m"]
    throttle.count(clock())
    throttle.set_rate(20.0, clock())
    asked = [fleet.ask(f"{tier} {number}", tier=tier) for tier in range(3) for number in range(30)]
    outcomes = await fleet.answered(*asked)
    assert outcomes[:60] == ["ok"] * 60
    assert sorted(outcomes[60:]) == ["SHED"] * 10 + ["ok"] * 20
    failure = failure_of(asked[-1].reply)
    assert failure.reason == "capacity"
    assert failure.retry_after == pytest.approx(0.05)
    assert fleet.counters.gateway.refusals == {("capacity", "free", "m"): 10}
    assert (throttle.higher, throttle.lowest) == (60, 30)
    await fleet.go_direct()
    asked = [fleet.ask(f"direct {number}", tier=FREE) for number in range(60)]
    assert set(await fleet.answered(*asked)) == {"ok"}, "the fleet's capacity does not bound the fallback"


@pytest.mark.fleet(cache=True)
async def test_answers_in_common_take_nothing_of_the_capacity(fleet: Fleet, clock: Clock) -> None:
    throttle = fleet.gateway.limiter.throttles["m"]
    throttle.count(clock())
    throttle.set_rate(10.0, clock())
    assert await fleet.answered(fleet.ask("the same", tier=FREE), fleet.ask("other", tier=1)) == ["ok", "ok"]
    for _ in range(50):
        asked = [fleet.ask("the same", tier=FREE), fleet.ask("other", tier=1)]
        assert await fleet.answered(*asked) == ["ok", "ok"]
    assert (throttle.higher, throttle.lowest) == (1, 1)


@pytest.mark.parametrize("tier", [0, FREE])
def test_only_what_a_worker_could_have_answered_in_time_counts_as_demand(tier: int) -> None:
    limiter = Limiter(3, lambda: 1000.0)
    throttle = limiter.throttles["m"]
    throttle.least_seconds = 0.1
    throttle.set_rate(1000.0, 1000.0)

    def demand() -> int:
        return throttle.higher + throttle.lowest

    keyed = msgspec.structs.replace(entry(tier=tier), dedup_keys=(DedupKey(DedupKind.KEY, "k"),))
    steps: list[tuple[Callable[[], object], int]] = [
        (lambda: limiter.check(entry(tier=tier, timeout=0.05), alone=False, count=3), 0),
        (lambda: limiter.not_run(entry(tier=tier, timeout=0.05)), 0),
        (lambda: limiter.check(entry(tier=tier, timeout=0.1), alone=False, count=3), 3),
        (lambda: limiter.left(entry(tier=tier, timeout=4.0), 0.05), 2),
        (lambda: limiter.left(entry(tier=tier, timeout=4.0), 0.1), 2),
        (lambda: limiter.left(entry(tier=tier, timeout=0.05), 0.01), 2),
        (lambda: limiter.left(keyed, 0.05), 2),
        (lambda: limiter.not_run(keyed), 1),
    ]
    found = []
    for step, _ in steps:
        step()
        found.append(demand())
    assert found == [expected for _, expected in steps]


@pytest.mark.parametrize("tier", [0, FREE])
@pytest.mark.parametrize(
    ("code", "demand"),
    [(errors.SHED, 3), (errors.SERVICE_OVERLOADED, 3), (errors.SCARCE, 3), (errors.PAYLOAD_TOO_LARGE, 0), (errors.RATE_LIMITED, 0)],
)  # fmt: skip
def test_a_refusal_for_something_else_than_the_load_was_no_demand(tier: int, code: str, demand: int) -> None:
    limiter = Limiter(3, lambda: 1000.0)
    throttle = limiter.throttles["m"]
    throttle.set_rate(3.0, 1000.0)
    first, rest = (msgspec.structs.replace(entry(tier=tier), count=count) for count in (3, 0))
    for _ in range(50):
        assert limiter.check(first, alone=False, count=3) is None, "the places of what is refused are given back"
        for one in (first, rest, rest):
            limiter.refused(one, Failure(code, "no"))
    assert throttle.higher + throttle.lowest == 50 * demand


LIMIT = Limit("user-1", "user", 60.0, 5.0)
"""One a second, five at once."""
MANY = 2_000
CALLER = Principal("somebody", "acme", 1, (LIMIT,))
PICKY = Principal("somebody", "acme", 1, (LIMIT,), frozenset(["other"]))


async def outcome(stand: Stand, model: str = "m", caller: Principal = CALLER, id: str = "") -> str:
    reply = await stand.gateway.ask(request("text", caller, id=id, model=model, timeout=5.0))
    return "ok" if reply.failure is None else reply.failure.code


async def test_models_of_others_and_ids_in_flight_count(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(1.0)) as stand:
        assert await outcome(stand, caller=PICKY) == "FORBIDDEN"
        id = new_id()
        first = asyncio.ensure_future(outcome(stand, id=id))
        await asyncio.sleep(0.01)
        codes = [await outcome(stand, id=id) for _ in range(4)]
        assert codes == ["IDEMPOTENCY_CONFLICT"] * 3 + ["RATE_LIMITED"]
        assert await first == "ok"


def test_what_is_owed_here_is_forgotten_when_it_is_paid() -> None:
    now, queue = [0.0], memory_broker(lambda: 0.0)
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
    queue = memory_broker(lambda: 0.0)

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

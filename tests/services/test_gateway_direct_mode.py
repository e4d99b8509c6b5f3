"""A gateway with its own fallback while its broker is unreachable."""

import asyncio

import pytest

from headway import errors
from headway.gateway.broker_session import Down, Replied, Up
from headway.model import Failure, Reply
from tests.services.calls import failure_of, offered, once
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.fleet import Fleet
from tests.virtual_time import Clock

pytestmark = pytest.mark.fleet(fallback=0.1)


@pytest.mark.fleet(max_batch=4)
async def test_in_direct_mode_everything_is_answered_and_afterwards_nothing_runs_twice(fleet: Fleet) -> None:
    await fleet.answered(fleet.ask("all is well"))
    await fleet.server.fail()
    held = [fleet.ask(f"held {number}") for number in range(10)]
    assert await fleet.answered(*held) == ["ok"] * 10
    assert fleet.clock() - held[0].at < 1.5
    direct = fleet.ask("direct")
    assert await fleet.answered(direct) == ["ok"]
    assert fleet.clock() - direct.at < 0.15
    assert fleet.counters.gateway.direct == {"m": 11}
    assert fleet.counters.gateway.requests == {("m", "paid", "ok"): 12}
    finishing = fleet.ask("finishes there")
    await asyncio.sleep(0.05)
    await fleet.server.become("fine")
    await asyncio.sleep(0.6)
    after = fleet.ask("after")
    assert await fleet.answered(finishing, after) == ["ok", "ok"]
    for one in [*held, direct, finishing, after]:
        assert fleet.runs(one.text, [fleet.fallback]) == (one is not after)
        assert fleet.runs(one.text) == (one is after)


async def test_what_the_fallback_does_not_answer_for_is_held_and_new_requests_for_it_are_refused(clock: Clock) -> None:
    backends, fallback = (FakeBackend(0.1), FakeBackend(0.1)), FakeBackend(0.1)
    async with Fleet(clock, *backends, fallback=fallback, models=("m", "n")) as fleet:
        assert await fleet.answered(fleet.ask("before"), fleet.ask("before", model="n")) == ["ok", "ok"]
        await fleet.server.fail()
        held = fleet.ask("held")
        waits = [fleet.ask(text, model="n") for text in ("waits", "waits, too")]
        assert await fleet.answered(held) == ["ok"]
        other = fleet.ask("refused", model="n")
        of_version = fleet.ask("a version", version="1")
        assert await fleet.answered(other, of_version) == [errors.SERVICE_OVERLOADED, errors.NO_WORKERS]
        assert "the model 'n' has no fallback" in failure_of(other.reply).message
        assert failure_of(other.reply).reason == "broker"
        assert fleet.counters.gateway.direct == {"m": 1}
        await fleet.server.become("fine")
        assert await fleet.answered(*waits) == ["ok", "ok"]
        assert [sorted(batch) for batch in backends[1].batches] == [["before"], ["waits", "waits, too"]]
        assert fallback.batches == [["held"]]


@pytest.mark.fleet(1.5, fallback=1.5)
async def test_what_ran_when_the_broker_went_is_answered_once_in_direct_mode(fleet: Fleet) -> None:
    asked = fleet.ask("x")
    await asyncio.sleep(0.5)
    await fleet.server.fail()
    await asyncio.sleep(1.3)
    assert fleet.gateway.broker is not fleet.gateway._shared.broker
    await fleet.server.become("fine")  # The shared broker's answer comes first.
    assert await fleet.answered(asked) == ["ok"]
    assert asked.answered_at - asked.at < 2.5
    await asyncio.sleep(3)
    assert await fleet.answered(asked) == ["ok"]
    assert fleet.counters.gateway.direct == {}
    assert fleet.gateway.broker is fleet.gateway._shared.broker


@pytest.mark.fleet(2.5, max_batch=1, queue_timeout_ms=4000)
async def test_what_waits_at_a_lost_broker_is_withdrawn_once_answered_in_direct_mode(fleet: Fleet) -> None:
    running = fleet.ask("runs", timeout=8.0)
    await asyncio.sleep(0.1)
    queued = fleet.ask("waits")
    await asyncio.sleep(0.1)
    await fleet.server.fail()
    assert await fleet.answered(running, queued) == ["ok", "ok"]
    await fleet.server.become("fine")
    await asyncio.sleep(5)
    assert fleet.backends[0].batches == [["runs"]]


@pytest.mark.fleet(1.5, fallback=1.0, max_batch=1)
async def test_what_waits_in_direct_mode_is_withdrawn_when_the_broker_brings_its_answer_after_all(fleet: Fleet) -> None:
    first = fleet.ask("first")
    await asyncio.sleep(0.2)
    await fleet.server.fail()
    await asyncio.sleep(0.7)
    # `first` comes second there, because a higher tier goes first.
    ahead = fleet.ask("ahead", tier=0)
    await asyncio.sleep(0.7)
    await fleet.server.become("fine")
    assert await fleet.answered(first, ahead) == ["ok", "ok"]
    await asyncio.sleep(3)
    assert fleet.runs("first") == 1
    assert fleet.fallback.batches == [["ahead"]]


@pytest.mark.fleet(3.0, fallback=0.8, max_batch=1, queue_timeout_ms=1300)
async def test_a_failure_by_the_line_that_a_request_has_left_is_not_its_answer(fleet: Fleet) -> None:
    fleet.ask("occupies the GPU")
    await asyncio.sleep(0.01)
    moved = fleet.ask("moved")
    await asyncio.sleep(0.1)
    await fleet.server.become("stall")
    fleet.server.script = once("enqueue", "refuse")
    fleet.ask("finds out")
    await asyncio.sleep(1.25)
    gateway = fleet.gateway
    [id] = [entry.id for entry in offered(fleet) if entry.input == "moved"]
    late = Reply(id, ANYBODY.tenant, None, Failure(errors.DEADLINE_EXCEEDED, "too late", None, "queue"))
    gateway.on_event(gateway._shared, Replied([late]))
    assert not moved.replies
    await fleet.server.become("fine")
    assert await fleet.answered(moved) == ["ok"]


async def test_a_fallback_that_does_not_come_up_keeps_no_gateway_from_serving(clock: Clock) -> None:
    fallback = FakeBackend(0.1)
    fallback.refuse_start = 3
    async with Fleet(clock, FakeBackend(0.1), fallback=fallback) as fleet:
        assert await fleet.answered(fleet.ask("x")) == ["ok"]
        await asyncio.sleep(5)
        assert fallback.starts == 1
        await fleet.server.fail()
        assert await fleet.answered(fleet.ask("y")) == ["ok"]
        assert fleet.direct is not None
        await fleet.direct.wind_down()
    assert fallback.stops == 4


async def test_who_waits_too_long_hears_so_while_the_only_slot_is_busy(clock: Clock) -> None:
    async with Fleet(clock, fallback=FakeBackend(3.0), max_batch=1, queue_timeout_ms=500) as fleet:
        await fleet.go_direct()
        fleet.ask("runs")
        await asyncio.sleep(0.01)
        waits = fleet.ask("waits")
        assert await fleet.answered(waits) == [errors.DEADLINE_EXCEEDED]
        assert waits.answered_at - waits.at == pytest.approx(0.5, abs=0.06)


async def test_a_broker_that_comes_and_goes_in_one_moment_costs_nobody_an_answer(clock: Clock) -> None:
    async with Fleet(clock, fallback=FakeBackend(0.1)) as fleet:
        await fleet.go_direct()
        gateway = fleet.gateway
        direct = fleet.ask("direct")
        gateway.on_event(gateway._shared, Up())
        shared = fleet.ask("shared")
        gateway.on_event(gateway._shared, Down())
        assert await fleet.answered(direct, shared) == ["ok", "ok"]

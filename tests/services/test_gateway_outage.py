"""Behaviour of a gateway while its broker is out of reach, and when it is back."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from headway import errors
from headway.core.retry import BACKOFF_BASE
from headway.gateway.broker_session import LOOK_EVERY, Replied
from headway.gateway.resubmitter import CHUNK, SPREAD
from headway.model import Entry, EntryState, Failure, Limit, Principal, Reply
from headway.runtime.request_id import new_id
from tests.services.fake_backend import FakeBackend
from tests.services.fleet import ANYBODY, Fleet
from tests.services.troubled import Connection
from tests.virtual_time import run

Clock = Callable[[], float]


def once(name: str, mode: str, times: int = 1) -> Callable[[str], str | None]:
    """The next call, or calls, of this name end like that."""
    left = [mode] * times
    return lambda called: left.pop() if called == name and left else None


def offered(fleet: Fleet, since: int = 0) -> list[Entry]:
    return [entry for _, _, entries in fleet.server.named("enqueue")[since:] for entry in entries]


@pytest.mark.parametrize("mode", ["refuse", "lose"])
def test_a_call_that_was_not_answered_is_made_again_under_the_same_id_with_the_time_that_is_left(mode: str) -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.1)) as fleet:
            fleet.server.script = once("enqueue", mode)
            asked = fleet.ask("hello")
            assert await fleet.answered(asked) == ["ok"]
            assert clock() - asked.at < 0.15
            assert fleet.runs("hello") == 1
            first, *again = offered(fleet)
            assert again and {entry.id for entry in again} == {first.id}
            assert all(first.timeout - 0.1 < entry.timeout < first.timeout for entry in again)
            assert fleet.counters.refusals == {}

    run(main)


def test_so_it_is_when_another_call_has_shown_meanwhile_that_the_broker_is_there() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.1)) as fleet:
            first = fleet.ask("first")
            await asyncio.sleep(0.099)
            fleet.server.script = once("enqueue", "refuse")
            second = fleet.ask("second")
            assert await fleet.answered(first, second) == ["ok", "ok"]
            times = [entry.timeout for entry in offered(fleet) if entry.input == "second"]
            assert len(times) > 1 and max(times[1:]) < times[0]

    run(main)


def test_a_broker_that_answers_is_asked_once_for_a_request_and_not_probed() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.1)) as fleet:
            assert await fleet.answered(fleet.ask("hello")) == ["ok"]
            assert len(fleet.server.named("enqueue")) == 1
            assert fleet.server.named("withdraw", "cancel_task", "probe") == []

    run(main)


def test_pauses_between_attempts_grow_up_to_a_bound() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.1)) as fleet:
            await fleet.answered(fleet.ask("before"))
            since = clock()
            await fleet.server.become("refuse")
            fleet.ask("x", timeout=30.0)
            await asyncio.sleep(10)
            attempts = [at for at, _, _ in fleet.server.named("withdraw", "probe", "enqueue") if at >= since]
            gaps = [later - sooner for sooner, later in itertools.pairwise(attempts)]
            assert gaps[0] <= BACKOFF_BASE
            assert min(gaps[8:]) >= 0.25 and max(gaps) <= 0.5

    run(main)


def test_a_short_outage_costs_time_and_nothing_else() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.05)) as fleet:
            for number in range(40):  # So that its pace is known, and a batch held up by the outage says little of it.
                await fleet.answered(fleet.ask(f"warm {number}"))
            asked = [fleet.ask(f"before {number}") for number in range(12)]
            await asyncio.sleep(0.02)
            await fleet.server.become("refuse")
            fleet.server.cut()
            asked += [fleet.ask(f"during {number}") for number in range(12)]
            await asyncio.sleep(0.8)
            asked += [fleet.ask(f"late {number}") for number in range(12)]
            await fleet.server.become("fine")
            assert await fleet.answered(*asked) == ["ok"] * 36
            assert all(fleet.runs(one.text) == 1 for one in asked)

    run(main)


def test_one_call_that_is_lost_is_no_outage_for_clients() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.05)) as fleet:
            fleet.server.script = once("enqueue", "stall")
            asked = [fleet.ask("stalled")]
            await asyncio.sleep(0.98)
            for number in range(100):
                await asyncio.sleep(0.0005)
                asked.append(fleet.ask(f"behind {number}"))
            assert set(await fleet.answered(*asked)) == {"ok"}

    run(main)


def test_while_the_broker_is_away_new_requests_are_refused_at_once_and_held_ones_wait() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.05)) as fleet:
            await fleet.server.become("refuse")
            patient, hasty = fleet.ask("patient", timeout=30.0), fleet.ask("hasty", timeout=2.0)
            await asyncio.sleep(1.05)
            before = clock()
            refused = fleet.ask("refused")
            assert await fleet.answered(refused) == [errors.SERVICE_OVERLOADED]
            assert clock() == before
            failure = refused.reply.failure
            assert failure is not None and failure.reason == "broker"
            assert failure.retry_after == pytest.approx(1.05, abs=0.01)
            assert fleet.counters.refusals == {("broker", "paid"): 1}
            assert await fleet.answered(hasty) == [errors.DEADLINE_EXCEEDED]
            assert hasty.answered_at - hasty.at == pytest.approx(2.0, abs=0.021)
            await asyncio.sleep(8)
            await fleet.server.become("fine")
            assert await fleet.answered(patient) == ["ok"]
            assert await fleet.answered(fleet.ask("after")) == ["ok"]
            assert fleet.runs("hasty") == fleet.runs("refused") == 0

    run(main)


def test_while_the_broker_is_away_even_the_first_request_is_refused() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.05)) as fleet:
            await fleet.server.become("refuse")
            fleet.server.cut()
            await asyncio.sleep(2.0)
            assert await fleet.answered(fleet.ask("first")) == [errors.SERVICE_OVERLOADED]
            await fleet.server.become("fine")
            await asyncio.sleep(1.0)
            assert await fleet.answered(fleet.ask("second")) == ["ok"]

    run(main)


def test_a_stall_is_known_for_one_as_soon_as_a_second_call_is_not_answered_either() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.05)) as fleet:
            await fleet.server.become("stall")
            first = fleet.ask("first")
            await asyncio.sleep(1.15)
            assert await fleet.answered(fleet.ask("refused")) == [errors.SERVICE_OVERLOADED]
            await asyncio.sleep(1)
            await fleet.server.become("fine")
            assert await fleet.answered(first) == ["ok"]
            assert fleet.runs("first") == 1

    run(main)


def test_what_was_given_up_in_a_stall_does_not_run_after_it() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.5), max_batch=1) as fleet:
            running = fleet.ask("running")
            await asyncio.sleep(0.2)
            await fleet.server.become("stall")
            late = [fleet.ask(f"late {number}", timeout=0.5) for number in range(3)]
            assert set(await fleet.answered(*late)) == {errors.DEADLINE_EXCEEDED}
            await asyncio.sleep(1.5)
            await fleet.server.become("fine")
            assert await fleet.answered(running) == ["ok"]
            await asyncio.sleep(5)
            assert sum(fleet.runs(one.text) for one in late) <= 1  # One may have left before it could be withdrawn.

    run(main)


def test_the_time_that_the_broker_was_away_is_no_time_in_the_queue() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.05), queue_timeout_ms=500) as fleet:
            await fleet.server.become("refuse")
            asked = fleet.ask("x")
            await asyncio.sleep(0.9)
            await fleet.server.become("fine")
            assert await fleet.answered(asked) == ["ok"]

    run(main)


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "half-open"])
def test_what_the_broker_lost_is_offered_again_without_being_asked(cut: bool) -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.3), max_batch=1) as fleet:
            await fleet.answered(fleet.ask("so that the cursor is not at its beginning"))
            asked = [fleet.ask(f"text {number}") for number in range(4)]
            await asyncio.sleep(0.5)
            fleet.server.lose_everything()
            if cut:
                fleet.server.cut()
            assert await fleet.answered(*asked) == ["ok"] * 4
            assert clock() - asked[0].at < 0.3 * 5 + LOOK_EVERY * 2 + SPREAD + 0.1
            assert all(fleet.runs(one.text) <= 2 for one in asked)

    run(main)


def test_everything_is_offered_again_in_chunks_once_for_each_return() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(3.0), max_batch=100) as fleet:
            await asyncio.gather(*(asyncio.sleep(0) for _ in range(3)))
            asked = [fleet.ask(f"text {number}", timeout=25.0) for number in range(1000)]
            await asyncio.sleep(0.1)
            before = len(fleet.server.named("enqueue"))
            for _ in range(9):  # Its lines break again and again, and it is there in between.
                fleet.server.cut()
                await asyncio.sleep(0.1)
            calls = fleet.server.named("enqueue")[before:]
            assert [len(entries) for _, _, entries in calls] == [CHUNK, CHUNK, CHUNK, 1000 - 3 * CHUNK]
            assert {entry.input for _, _, entries in calls for entry in entries} == {one.text for one in asked}
            assert not any(one.replies for one in asked)

    run(main)


def test_gateways_do_not_return_all_at_once() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(3.0), gateways=5, max_batch=100) as fleet:
            for number in range(5):
                fleet.ask(f"text {number}", gateway=number)
            await asyncio.sleep(0.1)
            fleet.server.lose_everything()
            fleet.server.cut()
            before = len(fleet.server.named("enqueue"))
            await asyncio.sleep(0.5)
            instants = sorted(at for at, _, _ in fleet.server.named("enqueue")[before:])
            assert len(instants) == 5
            assert instants[-1] - instants[0] > 0.05

    run(main)


def test_a_refusal_of_what_is_offered_again_is_the_answer() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(3.0)) as fleet:
            asked = fleet.ask("x")
            await asyncio.sleep(0.1)
            full = Failure(errors.SERVICE_OVERLOADED, "full", 2.0, "overloaded")

            async def refuse(entries: Sequence[Entry]) -> Sequence[Failure | None]:
                return [full] * len(entries)

            fleet.server.lose_everything()
            fleet.server.inner.enqueue = refuse  # type: ignore[method-assign]
            assert await fleet.answered(asked) == [errors.SERVICE_OVERLOADED]
            assert asked.reply.failure == full
            assert fleet.gateway.pending == 0

    run(main)


def test_what_is_offered_again_is_not_charged_again() -> None:
    limit = Limit("user-1", "user", 600.0, 10.0)
    caller = Principal("somebody", "acme", 1, (limit,))

    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(2.0), max_batch=100) as fleet:
            asked = [fleet.ask(f"text {number}", caller=caller, timeout=20.0) for number in range(10)]
            await asyncio.sleep(1.0)
            asked += [fleet.ask(f"late {number}", caller=caller, timeout=20.0) for number in range(10)]
            await asyncio.sleep(0.1)
            assert [one.replies for one in asked] == [[]] * 20
            fleet.server.lose_everything()
            fleet.server.cut()
            assert await fleet.answered(*asked) == ["ok"] * 20
            assert fleet.server.inner.rate_limit_debt(limit) == 0.0

    run(main)


def test_what_was_never_charged_is_charged_when_it_is_offered_again() -> None:
    limit = Limit("user-1", "user", 6.0, 10.0)
    caller = Principal("somebody", "acme", 1, (limit,))

    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.1)) as fleet:
            fleet.server.script = once("enqueue", "refuse")
            assert await fleet.answered(fleet.ask("hello", caller=caller)) == ["ok"]
            assert fleet.server.inner.rate_limit_debt(limit) == pytest.approx(10.0, abs=0.3)

    run(main)


def test_a_broker_without_memory_may_refuse_what_it_has_and_is_not_believed() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(1.0)) as fleet:
            held = fleet.ask("held")
            await asyncio.sleep(0.1)

            async def refuse(entries: Sequence[Entry]) -> Sequence[Failure | None]:
                return [Failure(errors.SHED, "no memory", 1.0, "memory")] * len(entries)

            fleet.server.inner.enqueue = refuse  # type: ignore[method-assign]
            fleet.server.cut()
            await asyncio.sleep(0.5)
            assert await fleet.answered(fleet.ask("new")) == [errors.SHED]
            assert await fleet.answered(held) == ["ok"]

    run(main)


def test_answers_come_after_the_reply_connection_was_cut() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.1), max_batch=4) as fleet:
            asked = []
            for number in range(100):
                asked.append(fleet.ask(f"text {number}"))
                await asyncio.sleep(0.01)
                if number % 7 == 0:
                    fleet.server.cut()
            assert await fleet.answered(*asked) == ["ok"] * 100
            assert all(fleet.runs(one.text) == 1 for one in asked)

    run(main)


def test_a_reply_of_another_tenant_is_nobodys() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.1)) as fleet:
            asked = fleet.ask("mine", id=(id := new_id()), caller=Principal("u", "ours", 1))
            real = fleet.server.inner.replies

            async def forged(gateway: str, after: int) -> tuple[Sequence[Reply], int]:
                replies, cursor = await real(gateway, after)
                return [Reply(id, "theirs", "A SECRET"), *replies], cursor

            fleet.server.inner.replies = forged  # type: ignore[method-assign]
            fleet.server.cut()
            assert await fleet.answered(asked) == ["ok"]

    run(main)


def test_what_is_not_handed_over_is_bounded() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.05), max_queue=50) as fleet:
            await fleet.server.become("refuse")
            asked = [fleet.ask(f"text {number}") for number in range(80)]
            await asyncio.sleep(0.1)
            refused = [one for one in asked if one.replies]
            assert len(refused) == 30
            failures = [one.reply.failure for one in refused if one.reply.failure]
            assert {(failure.reason, failure.retry_after) for failure in failures} == {("overloaded", 1.0)}
            more = fleet.ask("more")
            await more.told.wait()
            assert more.reply.failure is not None and more.reply.failure.reason == "broker"
            await fleet.server.become("fine")
            assert set(await fleet.answered(*(one for one in asked if one not in refused))) == {"ok"}

    run(main)


def test_a_client_that_leaves_before_its_request_is_handed_over_never_reaches_a_gpu() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.05)) as fleet:
            stays, at_once = fleet.ask("stays"), fleet.ask("at once")
            fleet.gateway.abandon(at_once, ANYBODY.tenant, at_once.id)
            assert await fleet.answered(stays) == ["ok"]
            await fleet.server.become("refuse")
            gone = fleet.ask("gone")
            await asyncio.sleep(0.5)
            fleet.gateway.abandon(gone, ANYBODY.tenant, gone.id)
            await fleet.server.become("fine")
            await asyncio.sleep(2)
            assert fleet.runs("at once") == fleet.runs("gone") == 0
            assert fleet.gateway.pending == 0

    run(main)


def test_an_answer_that_comes_long_after_the_deadline_is_not_given() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.2)) as fleet:
            asked = fleet.ask("x", timeout=0.5)
            await asyncio.sleep(0.1)
            loop: Any = asyncio.get_running_loop()
            loop.now += 2.0  # The process stood still; the answer and the end of the deadline come together.
            fleet.gateway.on_event(fleet.gateway._shared, Replied([Reply(offered(fleet)[0].id, ANYBODY.tenant, "X")]))
            assert await fleet.answered(asked) == [errors.DEADLINE_EXCEEDED]

    run(main)


def test_status_is_told_without_the_broker() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.5)) as fleet:
            fleet.ask("x", id=(id := new_id()))
            await asyncio.sleep(0.1)
            known = await fleet.gateway.status(id)
            assert known is not None and known.stage is EntryState.PROCESSING
            await fleet.server.become("refuse")
            known = await fleet.gateway.status(id)
            assert known is not None and known.stage is EntryState.QUEUED

    run(main)


def test_a_drain_ends_with_the_broker_away() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.5)) as fleet:
            asked = [fleet.ask(f"text {number}") for number in range(5)]
            await asyncio.sleep(0.1)
            await fleet.server.become("stall")
            fleet.server.cut()
            async with asyncio.timeout(4.1):
                await fleet.gateway.emptied()
            assert set(await fleet.answered(*asked)) == {errors.DEADLINE_EXCEEDED}

    run(main)


def test_the_log_tells_of_an_outage_once() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.1)) as fleet:
            with capture_logs() as lines:
                await fleet.server.become("refuse")
                fleet.server.cut()
                asked = fleet.ask("x", timeout=30.0)
                await asyncio.sleep(20)
                await fleet.server.become("fine")
                await fleet.answered(asked)
            told = [line["event"] for line in lines if line.get("who") == "gateway"]
            assert told == ["the broker is out of reach", "the broker is back"]
            assert len([line for line in lines if line.get("who") == "gpu-0"]) == 2

    run(main)


def test_in_direct_mode_everything_is_answered_and_afterwards_nothing_runs_twice() -> None:
    async def main(clock: Clock) -> None:
        fallback = FakeBackend(0.1)
        async with Fleet(clock, FakeBackend(0.1), fallback=fallback, max_batch=4) as fleet:
            await fleet.answered(fleet.ask("all is well"))
            await fleet.server.become("refuse")
            fleet.server.cut()
            held = [fleet.ask(f"held {number}") for number in range(10)]
            assert await fleet.answered(*held) == ["ok"] * 10
            assert clock() - held[0].at < 1.5
            direct = fleet.ask("direct")
            assert await fleet.answered(direct) == ["ok"]
            assert clock() - direct.at < 0.15
            assert fleet.counters.direct == {"m": 11}
            assert fleet.counters.requests == {("m", "paid", "ok"): 12}
            finishing = fleet.ask("finishes there")
            await asyncio.sleep(0.05)
            await fleet.server.become("fine")
            await asyncio.sleep(0.6)
            after = fleet.ask("after")
            assert await fleet.answered(finishing, after) == ["ok", "ok"]
            for one in [*held, direct, finishing, after]:
                assert fleet.runs(one.text, [fallback]) == (one is not after)
                assert fleet.runs(one.text) == (one is after)

    run(main)


def test_what_ran_when_the_broker_went_is_answered_once_in_direct_mode() -> None:
    async def main(clock: Clock) -> None:
        fallback = FakeBackend(1.5)
        async with Fleet(clock, FakeBackend(1.5), fallback=fallback) as fleet:
            asked = fleet.ask("x")
            await asyncio.sleep(0.5)
            await fleet.server.become("refuse")
            fleet.server.cut()
            await asyncio.sleep(1.3)
            assert fleet.gateway.broker is not fleet.gateway._shared.broker
            await fleet.server.become("fine")  # The shared broker's answer comes first.
            assert await fleet.answered(asked) == ["ok"]
            assert asked.answered_at - asked.at < 2.5
            await asyncio.sleep(3)
            assert await fleet.answered(asked) == ["ok"]
            assert fleet.counters.direct == {}
            assert fleet.gateway.broker is fleet.gateway._shared.broker

    run(main)


def test_what_waits_in_the_queue_of_the_broker_that_went_is_withdrawn_when_it_was_answered_in_direct_mode() -> None:
    async def main(clock: Clock) -> None:
        fallback = FakeBackend(0.1)
        async with Fleet(clock, FakeBackend(2.5), fallback=fallback, max_batch=1, queue_timeout_ms=4000) as fleet:
            running = fleet.ask("runs", timeout=8.0)
            await asyncio.sleep(0.1)
            queued = fleet.ask("waits")
            await asyncio.sleep(0.1)
            await fleet.server.become("refuse")
            fleet.server.cut()
            assert await fleet.answered(running, queued) == ["ok", "ok"]
            await fleet.server.become("fine")
            await asyncio.sleep(5)
            assert fleet.backends[0].batches == [["runs"]]

    run(main)


def test_what_waits_in_direct_mode_is_withdrawn_when_the_broker_brings_its_answer_after_all() -> None:
    async def main(clock: Clock) -> None:
        fallback = FakeBackend(1.0)
        async with Fleet(clock, FakeBackend(1.5), fallback=fallback, max_batch=1) as fleet:
            first = fleet.ask("first")
            await asyncio.sleep(0.2)
            await fleet.server.become("refuse")
            fleet.server.cut()
            await asyncio.sleep(0.7)
            # Its turn comes second there: a higher tier goes first.
            ahead = fleet.ask("ahead", tier=0)
            await asyncio.sleep(0.7)
            await fleet.server.become("fine")
            assert await fleet.answered(first, ahead) == ["ok", "ok"]
            await asyncio.sleep(3)
            assert fleet.runs("first") == 1
            assert fallback.batches == [["ahead"]]

    run(main)


def test_what_is_answered_while_it_is_offered_again_does_not_run_again() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.5), max_batch=1) as fleet:
            asked = fleet.ask("first")
            await asyncio.sleep(0.01)
            others = [fleet.ask(f"then {number}") for number in range(2)]
            await asyncio.sleep(0.1)
            real = fleet.server.inner.enqueue

            async def slow(entries: Sequence[Entry]) -> Sequence[Failure | None]:
                await asyncio.sleep(0.5)
                return await real(entries)

            fleet.server.inner.enqueue = slow  # type: ignore[method-assign]
            fleet.server.cut()
            assert await fleet.answered(asked, *others) == ["ok"] * 3
            await asyncio.sleep(3)
            assert fleet.runs("first") == 1

    run(main)


def test_a_failure_by_the_line_that_a_request_has_left_is_not_its_answer() -> None:
    async def main(clock: Clock) -> None:
        fallback = FakeBackend(0.8)
        async with Fleet(clock, FakeBackend(3.0), fallback=fallback, max_batch=1, queue_timeout_ms=1300) as fleet:
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

    run(main)


def test_direct_mode_is_bounded_like_any_queue() -> None:
    async def main(clock: Clock) -> None:
        fallback = FakeBackend(0.5)
        async with Fleet(clock, FakeBackend(0.1), fallback=fallback, max_batch=2) as fleet:
            await fleet.server.become("refuse")
            fleet.server.cut()
            await asyncio.sleep(1.2)
            await fleet.answered(fleet.ask("measures"))
            asked = [fleet.ask(f"text {number}") for number in range(100)]
            outcomes = await fleet.answered(*asked)
            assert set(outcomes) <= {"ok", errors.SHED, errors.SERVICE_OVERLOADED}
            assert 4 <= outcomes.count("ok") <= 16
            assert max(map(len, fallback.batches)) == 2

    run(main)


def test_a_fallback_that_does_not_come_up_keeps_no_gateway_from_serving() -> None:
    async def main(clock: Clock) -> None:
        fallback = FakeBackend(0.1)
        fallback.refuse_start = 3
        async with Fleet(clock, FakeBackend(0.1), fallback=fallback) as fleet:
            assert await fleet.answered(fleet.ask("x")) == ["ok"]
            await asyncio.sleep(5)
            assert fallback.starts == 1
            await fleet.server.become("refuse")
            fleet.server.cut()
            assert await fleet.answered(fleet.ask("y")) == ["ok"]
            assert fleet.direct is not None
            await fleet.direct.drain()
        assert fallback.stops == 4

    run(main)


def test_each_process_finds_out_for_itself_what_was_lost() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.1)) as fleet:
            other = Connection(fleet.server)
            await other.depths()
            fleet.server.lose_everything()
            known = other.epoch
            await other.depths()
            assert other.epoch != known

    run(main)


def test_a_reply_that_is_read_again_is_not_told_again() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.1)) as fleet:
            asked = fleet.ask("x")
            await fleet.answered(asked)
            fleet.gateway.on_event(fleet.gateway._shared, Replied(asked.replies * 3))
            assert await fleet.answered(asked) == ["ok"]
            assert fleet.counters.requests == {("m", "paid", "ok"): 1}

    run(main)


def test_who_was_held_through_an_outage_is_not_shed_for_it() -> None:
    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.5)) as fleet:
            warm = [fleet.ask(f"warm {number}") for number in range(24)]
            await fleet.answered(*warm)
            await fleet.server.become("refuse")
            asked = [fleet.ask(f"held {number}", tier=2) for number in range(100)]
            await asyncio.sleep(2.5)
            await fleet.server.become("fine")
            outcomes = Counter(await fleet.answered(*asked))
            assert outcomes["ok"]
            assert outcomes[errors.SERVICE_OVERLOADED]
            assert set(outcomes) <= {"ok", errors.SERVICE_OVERLOADED, errors.DEADLINE_EXCEEDED}
            assert not fleet.counters.refusals["shed", "free"]

    run(main)


def test_a_refusal_of_what_is_offered_beside_clients_that_leave_is_no_outage() -> None:
    """Entries are offered anew beside withdrawals, too: that alone says nothing of the broker."""

    async def main(clock: Clock) -> None:
        async with Fleet(clock, FakeBackend(0.5), max_batch=1) as fleet:
            for number in range(6):
                fleet.ask(f"{number}", timeout=30.0, tier=2)
            await asyncio.sleep(0.6)
            leaves, hurried = fleet.ask("leaves", timeout=30.0), fleet.ask("hurried", timeout=0.2, tier=2)
            fleet.gateway.abandon(leaves, ANYBODY.tenant, leaves.id)
            await hurried.told.wait()
            assert hurried.reply.failure is not None
            assert hurried.reply.failure.reason != "broker"

    run(main)

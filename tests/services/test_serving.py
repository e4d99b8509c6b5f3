"""Requests through gateway, broker and batcher, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from headway import errors
from headway.config import load
from headway.core import policies
from headway.model import Entry, Failure, Limit, Principal, Reply, RequestOptions, WorkerStatus
from headway.runtime.request_id import new_id
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.stand import Stand, codes
from tests.virtual_time import Clock


@pytest.mark.parametrize("policy", policies.NAMES)
async def test_a_lone_request_waits_for_nobody(policy: str, clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.1), policy=policy) as stand:
        await asyncio.sleep(5)
        before = clock()
        reply = await stand.ask("hello")
        assert reply.output == "HELLO"
        assert clock() - before == pytest.approx(0.1, abs=0.002)


async def test_each_gets_the_answer_to_its_own_input(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.01), FakeBackend(0.013)) as stand:
        texts = [f"text {number}" for number in range(500)]
        replies = await asyncio.gather(*(stand.ask(text) for text in texts))
        assert [reply.output for reply in replies] == [text.upper() for text in texts]
        assert max(len(batch) for backend in stand.backends for batch in backend.batches) == 8


@pytest.mark.parametrize(("weight", "heaviest"), [(0, 400), (100, 100)])
async def test_a_batch_holds_no_more_characters_than_it_may(weight: int, heaviest: int, clock: Clock) -> None:
    """One text is longer than that, and runs alone; an empty one weighs as one character."""
    async with Stand(clock, FakeBackend(0.1), max_batch_weight=weight) as stand:
        texts = ["", *("x" * 50 for _ in range(32)), "y" * 150]
        replies = await asyncio.gather(*(stand.ask(text) for text in texts))
        assert [reply.output for reply in replies] == [text.upper() for text in texts]
        sizes = [(len(batch), sum(map(len, batch))) for batch in stand.backends[0].batches]
        assert max(size for count, size in sizes if count > 1) <= max(heaviest, weight)
        assert stand.counters.batch_fill["m"].sum > 0.0
        if weight:
            assert (1, 150) in sizes


async def test_a_client_that_leaves_while_queued_never_reaches_a_gpu(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(1.0), max_batch=1) as stand:
        first = stand.asking("first")
        await asyncio.sleep(0.1)
        second = stand.asking("second")
        await asyncio.sleep(0.1)
        second.cancel()
        assert (await first).output == "FIRST"
        await asyncio.sleep(3)
        assert stand.backends[0].batches == [["first"]]
        assert stand.counters.requests["m", "paid", "cancelled"] == 1


async def test_a_client_that_leaves_in_flight_costs_gpu_time_that_is_counted(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(1.0)) as stand:
        leaver = stand.asking("gone")
        await asyncio.sleep(0.5)
        leaver.cancel()
        await asyncio.sleep(1)
        assert stand.counters.wasted_seconds["departed"] == pytest.approx(1.0, abs=0.01)
        assert (await stand.ask("next")).output == "NEXT"


async def test_the_total_deadline_answers_while_the_batch_runs_on(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(2.0)) as stand:
        before = clock()
        reply = await stand.ask("slow", timeout=0.5)
        assert codes([reply]) == [errors.DEADLINE_EXCEEDED]
        assert clock() - before == pytest.approx(0.5, abs=0.025)
        await asyncio.sleep(3)
        assert (await stand.ask("later", timeout=4.0)).output == "LATER"


async def test_the_queue_deadline_fires_while_the_only_worker_is_busy(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(3.0), max_batch=1, queue_timeout_ms=500) as stand:
        running = stand.asking("a")
        await asyncio.sleep(0.01)
        before = clock()
        reply = await stand.ask("b")
        assert codes([reply]) == [errors.DEADLINE_EXCEEDED]
        assert reply.failure is not None and reply.failure.reason == "queue"
        assert clock() - before == pytest.approx(0.5, abs=0.06)
        assert (await running).output == "A"


async def test_drain_answers_everything_and_stops_the_workers(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.3), FakeBackend(0.3)) as stand:
        asked = [stand.asking(f"t{number}") for number in range(40)]
        await asyncio.sleep(0.1)
        await stand.service.drain()
        await stand.service.stop()
        assert codes([await one for one in asked]) == ["ok"] * 40
        assert all(backend.stops for backend in stand.backends)


async def test_stop_refuses_what_is_left(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(3.0)) as stand:
        asked = stand.asking("t")
        await asyncio.sleep(0.1)
        await stand.service.stop()
        assert codes([await asked]) == [errors.DRAINING]


async def test_an_unknown_model_a_repeated_id_and_a_spent_limit_are_refused(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.1)) as stand:
        unknown = await stand.gateway.ask(ANYBODY, new_id(), RequestOptions(1.0, 1), "other", "x", b"")
        assert codes([unknown]) == [errors.NOT_FOUND]
        same = new_id()
        twice = await asyncio.gather(
            *(stand.gateway.ask(ANYBODY, same, RequestOptions(1.0, 1), "m", "x", b"") for _ in range(2))
        )
        assert codes(twice) == ["ok", errors.IDEMPOTENCY_CONFLICT]
        limited = Principal("u", "t", 1, (Limit("user u", "user", rate=60.0, burst=2.0),))
        replies = [await stand.ask("x", caller=limited) for _ in range(3)]
        assert codes(replies) == ["ok", "ok", errors.RATE_LIMITED]
        assert replies[2].failure is not None and replies[2].failure.retry_after is not None


async def test_refusals_at_the_door_do_not_flatter_the_latency(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.5), max_batch=1) as stand:
        await stand.ask("measures")
        replies = await asyncio.gather(*(stand.ask(str(number)) for number in range(20)))
        refused = sum(reply.failure is not None and reply.failure.reason == "shed" for reply in replies)
        assert 5 < refused < 20
        assert stand.counters.refusals["shed", "paid", "m"] == refused
        latencies = stand.counters.request_seconds["m", "paid"]
        assert latencies.count == 21 - refused
        assert latencies.counts[0] == 0


async def test_random_cancellations_never_wedge_a_batcher(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.05), FakeBackend(0.05), max_batch=4) as stand:
        tasks = []
        for number in range(300):
            task = stand.asking(f"t{number}")
            tasks.append(task)
            await asyncio.sleep(0.003)
            if number % 3:
                tasks[(number * 7) % len(tasks)].cancel()
            if number % 50 == 49:
                for inner in sorted(asyncio.all_tasks(), key=asyncio.Task.get_name):
                    name = inner.get_name()
                    if name.startswith("Task-") and inner is not asyncio.current_task() and inner not in tasks:
                        inner.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(o, asyncio.CancelledError | Reply) for o in outcomes)
        assert (await stand.ask("still there")).output == "STILL THERE"
        assert stand.gateway.pending == 0


@pytest.mark.parametrize("hangs", ["heartbeat", "extend"])
async def test_a_lease_is_renewed_whatever_else_the_broker_is_slow_at(
    hangs: str, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """A heartbeat is never answered, or the first renewal."""
    hung = asyncio.Event()
    async with Stand(clock, FakeBackend(25.0), gpu_timeout_ms=30_000, request_timeout_ms=30_000) as stand:
        asked = stand.asking("long", timeout=30.0)
        call = getattr(stand.broker, hangs)

        async def slow(what: Any) -> Any:
            if hangs == "heartbeat" or not hung.is_set():
                hung.set()
                await asyncio.Event().wait()
            return await call(what)

        monkeypatch.setattr(stand.broker, hangs, slow)
        reply = await asked
        assert hung.is_set()
        assert (reply.output, reply.attempts) == ("LONG", 1)
        assert stand.backends[0].batches == [["long"]]
        monkeypatch.undo()


async def test_batches_of_300_s_are_served_like_any_others(clock: Clock) -> None:
    """The worker stays healthy, the lease lives, clients wait, and what comes meanwhile rides next."""
    patience = 600_000.0
    slow: dict[str, Any] = {
        "gpu_timeout_ms": patience, "queue_timeout_ms": patience, "request_timeout_ms": patience,
    }  # fmt: skip
    async with Stand(clock, FakeBackend(300.0), max_batch=4096, **slow) as stand:
        begun = clock()
        first = stand.asking("first", timeout=600.0)
        await asyncio.sleep(150.0)
        [worker] = await stand.broker.workers()
        assert (worker.status, worker.in_flight) == (WorkerStatus.HEALTHY, 1)
        late = [stand.asking(f"late {number}", timeout=600.0) for number in range(1000)]
        reply = await first
        assert (reply.output, reply.attempts) == ("FIRST", 1)
        assert clock() - begun == pytest.approx(300.0, abs=0.1)
        replies = await asyncio.gather(*late)
        assert [one.output for one in replies] == [f"LATE {number}" for number in range(1000)]
        assert {one.attempts for one in replies} == {1}
        assert clock() - begun == pytest.approx(600.0, abs=0.1)
        assert [len(batch) for batch in stand.backends[0].batches] == [1, 1000]
        assert stand.backends[0].starts == 1


async def test_a_drain_waits_for_a_batch_of_300_s(clock: Clock) -> None:
    settings = load({"gpu_timeout_ms": 600_000.0, "queue_timeout_ms": 600_000.0, "request_timeout_ms": 600_000.0}, {})
    slow: dict[str, Any] = {
        name: getattr(settings, name) for name in ("drain_timeout_ms", "gpu_timeout_ms", "request_timeout_ms")
    }
    async with Stand(clock, FakeBackend(300.0), **slow) as stand:
        asked = stand.asking("last", timeout=600.0)
        await asyncio.sleep(1.0)
        await stand.service.drain()
        assert (await asked).output == "LAST"


async def test_requests_in_a_rush_go_to_the_broker_together_and_a_lone_one_goes_at_once(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.1), max_batch=100) as stand:
        calls: list[tuple[float, int]] = []
        enqueue = stand.broker.enqueue

        async def watched(entries: Sequence[Entry]) -> Sequence[Failure | None]:
            calls.append((clock(), len(entries)))
            return await enqueue(entries)

        stand.broker.enqueue = watched  # type: ignore[method-assign]
        stand.gateway._session.near = None
        rush = []
        for number in range(1000):
            rush.append(stand.asking(f"r{number}"))
            await asyncio.sleep(0.0001)
        await asyncio.gather(*rush)
        assert sum(size for _, size in calls) == 1000
        assert len(calls) < 500
        await asyncio.sleep(10)
        before = clock()
        await stand.ask("lone")
        assert calls[-1] == (before, 1)

"""Requests through gateway, broker and batcher, on virtual time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence

import pytest

from headway import errors
from headway.core import policies
from headway.core.breaker import Breaker, State
from headway.core.retry import MAX_ATTEMPTS, RetryBudget
from headway.errors import (
    BackendError,
    BatchRaised,
    RemoteError,
    StartKilled,
    TargetError,
    WorkerAbsent,
    WorkerCrashed,
)
from headway.gateway.pending import FutureSink
from headway.model import (
    WARM_UP,
    Entry,
    Failure,
    ItemResult,
    Limit,
    Principal,
    Reply,
    RequestOptions,
    WorkerStatus,
)
from headway.runtime.request_id import new_id
from tests.services.fake_backend import FakeBackend
from tests.services.stand import ANYBODY, Stand
from tests.virtual_time import run

Clock = Callable[[], float]


def codes(replies: Sequence[Reply]) -> list[str]:
    return [reply.failure.code if reply.failure else "ok" for reply in replies]


@pytest.mark.parametrize("policy", policies.NAMES)
def test_a_lone_request_waits_for_nobody(policy: str) -> None:
    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(0.1), policy=policy) as stand:
            await asyncio.sleep(5)
            before = clock()
            reply = await stand.ask("hello")
            assert reply.output == "HELLO"
            assert clock() - before == pytest.approx(0.1, abs=0.002)

    run(main)


def test_each_gets_the_answer_to_its_own_input() -> None:
    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(0.01), FakeBackend(0.013)) as stand:
            texts = [f"text {number}" for number in range(500)]
            replies = await asyncio.gather(*(stand.ask(text) for text in texts))
            assert [reply.output for reply in replies] == [text.upper() for text in texts]
            assert max(len(batch) for backend in stand.backends for batch in backend.batches) == 8

    run(main)


def test_a_client_that_leaves_while_queued_never_reaches_a_gpu() -> None:
    async def main(clock: Clock) -> None:
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

    run(main)


def test_a_client_that_leaves_in_flight_costs_gpu_time_that_is_counted() -> None:
    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(1.0)) as stand:
            leaver = stand.asking("gone")
            await asyncio.sleep(0.5)
            leaver.cancel()
            await asyncio.sleep(1)
            assert stand.counters.wasted_seconds["departed"] == pytest.approx(1.0, abs=0.01)
            assert (await stand.ask("next")).output == "NEXT"

    run(main)


def test_the_total_deadline_answers_while_the_batch_runs_on() -> None:
    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(2.0)) as stand:
            before = clock()
            reply = await stand.ask("slow", timeout=0.5)
            assert codes([reply]) == [errors.DEADLINE_EXCEEDED]
            assert clock() - before == pytest.approx(0.5, abs=0.025)
            await asyncio.sleep(3)
            assert (await stand.ask("later", timeout=4.0)).output == "LATER"

    run(main)


def test_the_queue_deadline_fires_while_the_only_worker_is_busy() -> None:
    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(3.0), max_batch=1, queue_timeout_ms=500) as stand:
            running = stand.asking("a")
            await asyncio.sleep(0.01)
            before = clock()
            reply = await stand.ask("b")
            assert codes([reply]) == [errors.DEADLINE_EXCEEDED]
            assert reply.failure is not None and reply.failure.reason == "queue"
            assert clock() - before == pytest.approx(0.5, abs=0.06)
            assert (await running).output == "A"

    run(main)


def poison(entries: Sequence[Entry]) -> BackendError | None:
    if any("poison" in entry.input for entry in entries):
        return BatchRaised("ValueError: poison")
    return None


@pytest.mark.parametrize("workers", [1, 2])
def test_one_bad_input_does_not_hurt_its_batch_mates(workers: int) -> None:
    async def main(clock: Clock) -> None:
        backends = [FakeBackend(0.05, poison) for _ in range(workers)]
        async with Stand(clock, *backends, max_batch=32) as stand:
            texts = [f"good {number}" for number in range(31)]
            texts.insert(17, "poison")
            replies = await asyncio.gather(*(stand.ask(text) for text in texts))
            bad = replies.pop(17)
            assert codes([bad]) == [errors.REJECTED_BY_MODEL]
            assert [reply.output for reply in replies] == [t.upper() for t in texts if t != "poison"]
            [letter] = await stand.dead.list()
            [found] = await stand.dead.find(letter.entry.id)
            assert found.entry.input == "poison" and "ValueError" in letter.error
            for backend in backends:
                runs_with_poison = [batch for batch in backend.batches if "poison" in batch]
                assert all(len(batch) <= 32 for batch in runs_with_poison)

    run(main)


def test_a_crashed_worker_is_replaced_and_its_batch_is_retried() -> None:
    async def main(clock: Clock) -> None:
        crashes = [WorkerCrashed("killed by SIGKILL")]
        backend = FakeBackend(0.1, lambda entries: crashes.pop() if crashes else None)
        async with Stand(clock, backend) as stand:
            reply = await stand.ask("survivor")
            assert reply.output == "SURVIVOR" and reply.attempts == 2
            assert backend.starts == 2
            assert stand.counters.retries["crashed"] == 1

    run(main)


def test_a_batch_that_comes_when_its_worker_has_just_died_is_not_charged() -> None:
    async def main(clock: Clock) -> None:
        gone = [WorkerAbsent("it has no process") for _ in range(MAX_ATTEMPTS)]
        backend = FakeBackend(0.1, lambda entries: gone.pop() if gone else None)
        async with Stand(clock, backend) as stand:
            reply = await stand.ask("innocent")
            assert reply.output == "INNOCENT" and reply.attempts == 1
            assert backend.starts == 1 + MAX_ATTEMPTS
            assert not stand.counters.retries["crashed"]
            assert await stand.dead.list() == []

    run(main)


def test_a_worker_that_dies_idle_is_replaced() -> None:
    async def main(clock: Clock) -> None:
        backend = FakeBackend(0.1)
        async with Stand(clock, backend) as stand:
            await asyncio.sleep(1)
            backend.dead.set()
            await asyncio.sleep(1)
            assert backend.starts == 2
            assert (await stand.ask("x")).output == "X"

    run(main)


class Frail(FakeBackend):
    """Dies `life` seconds after each start."""

    life = 0.0

    async def gone(self) -> None:
        await asyncio.sleep(self.life)


def test_a_worker_that_dies_idle_again_and_again_is_started_ever_less_often() -> None:
    async def main(clock: Clock) -> None:
        backend = Frail(0.1)
        async with Stand(clock, backend) as stand:
            await asyncio.sleep(10)
            assert 3 <= backend.starts <= 8
            await asyncio.sleep(120)
            assert backend.starts <= 14
            backend.life = 6.0
            await asyncio.sleep(60)
            before = backend.starts
            await asyncio.sleep(30)
            assert backend.starts - before >= 4, "some seconds of life are enough"
            backend.life = 1e9
            assert (await stand.ask("x", timeout=30.0)).output == "X"

    run(main)


def test_a_worker_that_dies_idle_is_not_started_more_often_because_requests_wait() -> None:
    async def main(clock: Clock) -> None:
        backend = FakeBackend(0.1, lambda entries: WorkerAbsent("it has no process"))
        async with Stand(clock, backend) as stand:
            asked = [stand.asking(f"t{number}") for number in range(10)]
            await asyncio.sleep(10)
            assert backend.starts <= 8
            for one in asked:
                one.cancel()

    run(main)


def test_a_finished_batch_ends_the_pauses() -> None:
    async def main(clock: Clock) -> None:
        backend = Frail(0.01)
        async with Stand(clock, backend, request_timeout_ms=30_000, queue_timeout_ms=30_000) as stand:
            await asyncio.sleep(10)
            backend.life = 0.5
            assert (await stand.ask("x", timeout=30.0)).output == "X"
            await asyncio.sleep(0.5)
            before = clock()
            assert (await stand.ask("y", timeout=30.0)).output == "Y"
            assert clock() - before < 0.1

    run(main)


def test_a_worker_that_is_killed_while_it_starts_is_started_again_soon() -> None:
    async def main(clock: Clock) -> None:
        backend = FakeBackend(0.1)
        async with Stand(clock, backend) as stand:
            backend.refuse_start, backend.refusal = 10**6, StartKilled("died of SIGKILL")
            backend.dead.set()
            await asyncio.sleep(60)
            backend.refuse_start = 0
            await asyncio.sleep(2.1)
            assert (await stand.ask("back", timeout=0.2)).output == "BACK"

    run(main)


class Trace:
    """Object that a failed start had in its hands."""


def test_starts_that_fail_leave_nothing_for_the_garbage_collector() -> None:
    left: list[weakref.ref[Trace]] = []

    class Slow(FakeBackend):
        async def start(self) -> float:
            if not self.starts:
                return await super().start()
            trace = Trace()
            left.append(weakref.ref(trace))
            try:
                async with asyncio.timeout(0.1):
                    await asyncio.Event().wait()
            except TimeoutError:
                raise TargetError("was not ready") from None
            return 0.0

    async def main(clock: Clock) -> None:
        backend = Slow(0.1)
        async with Stand(clock, backend) as stand:
            gc.collect()
            gc.disable()
            try:
                backend.dead.set()
                await asyncio.sleep(30)
                assert len(left) > 5
                assert [one for one in left if one() is not None] == []
            finally:
                gc.enable()
            assert stand.counters.worker_restarts["gpu-0"] == 0

    run(main)


def test_all_workers_gone_and_back() -> None:
    async def main(clock: Clock) -> None:
        backend = FakeBackend(0.1)
        async with Stand(clock, backend) as stand:
            backend.refuse_start = 10**6
            backend.dead.set()
            await asyncio.sleep(0.5)
            before = clock()
            reply = await stand.ask("too early")
            assert codes([reply]) == [errors.NO_WORKERS]
            assert clock() - before == pytest.approx(2.0, abs=0.06)
            held = stand.asking("held")
            backend.refuse_start = 0
            assert (await held).output == "HELD"

    run(main)


def test_a_drain_does_not_wait_for_the_next_attempt_to_start_a_worker() -> None:
    async def main(clock: Clock) -> None:
        backend = FakeBackend(0.1)
        async with Stand(clock, backend) as stand:
            backend.refuse_start = 10**6
            backend.dead.set()
            await asyncio.sleep(20)
            before = clock()
            await stand.service.drain()
            assert clock() - before < 0.1

    run(main)


def test_a_drain_does_not_wait_for_a_worker_that_is_loading() -> None:
    async def main(clock: Clock) -> None:
        backend = FakeBackend(0.1)
        async with Stand(clock, backend) as stand:
            backend.start_seconds = 60.0
            backend.dead.set()
            await asyncio.sleep(1)
            before = clock()
            await stand.service.drain()
            assert clock() - before < 0.1
            assert backend.stops == 2

    run(main)


def test_a_worker_that_was_replaced_while_it_did_not_start_takes_the_fresh_one() -> None:
    async def main(clock: Clock) -> None:
        backend = FakeBackend(0.1)
        async with Stand(clock, backend) as stand:
            backend.refuse_start = 10**6
            backend.dead.set()
            await asyncio.sleep(20)
            backend.refuse_start = 0
            await stand.service.replace_workers()
            before = clock()
            assert (await stand.ask("back")).output == "BACK"
            assert clock() - before < 0.2
            assert backend.starts == 2

    run(main)


def test_a_failing_backend_opens_the_breaker_and_recovers() -> None:
    async def main(clock: Clock) -> None:
        broken = True
        backend = FakeBackend(0.01, lambda entries: BatchRaised("CUDA error") if broken else None)
        async with Stand(clock, backend, max_batch=1) as stand:
            for number in range(8):
                await stand.ask(f"bad {number}", timeout=1.0)
            statuses = {worker.status for worker in await stand.broker.workers()}
            assert statuses == {WorkerStatus.DEGRADED}
            runs = len(backend.batches)
            assert runs < 8 * 3
            assert stand.counters.breaker_state["gpu-0"] == State.OPEN
            broken = False
            reply = await stand.ask("good", timeout=4.0)
            while reply.output is None:
                reply = await stand.ask("good", timeout=4.0)
            statuses = {worker.status for worker in await stand.broker.workers()}
            assert statuses == {WorkerStatus.HEALTHY}
            assert stand.counters.breaker_state["gpu-0"] == State.CLOSED

    run(main)


class Broken(FakeBackend):
    """While `error` is set every batch fails, and the probe of something that no backend is known to raise."""

    error: Exception | None = None

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        items = await super().run(entries, timeout)
        if self.error is not None:
            raise self.error if entries[0].id == WARM_UP else BatchRaised("no")
        return items


@pytest.mark.parametrize("error", [RuntimeError("Session is closed"), KeyError(7)])
def test_a_probe_that_fails_of_something_unforeseen_keeps_no_slot_out_for_good(error: Exception) -> None:
    async def main(clock: Clock) -> None:
        backends = [Broken(0.01), Broken(0.01)]
        async with Stand(clock, *backends, max_batch=1, breaker=Breaker(5, 0.5)) as stand:
            for backend in backends:
                backend.error = error
            for number in range(8):
                await stand.ask(f"bad {number}", timeout=1.0)
            assert WorkerStatus.HEALTHY not in {worker.status for worker in await stand.broker.workers()}
            for backend in backends:
                backend.error = None
            await asyncio.sleep(31)
            assert (await stand.ask("good")).output == "GOOD"
            assert {worker.status for worker in await stand.broker.workers()} == {WorkerStatus.HEALTHY}

    run(main)


def test_a_slot_whose_turn_somebody_else_never_gives_back_is_not_healthy_and_comes_back() -> None:
    async def main(clock: Clock) -> None:
        breaker = Breaker(1, 0.5)
        async with Stand(clock, FakeBackend(0.1), breaker=breaker) as stand:
            breaker.failure(clock())
            assert breaker.allow(clock(), within=20.0)  # A probe that is never heard of again.
            refused = await stand.ask("meanwhile")
            assert codes([refused]) == [errors.NO_WORKERS]
            assert {worker.status for worker in await stand.broker.workers()} == {WorkerStatus.DEGRADED}
            await asyncio.sleep(20)
            assert (await stand.ask("later")).output == "LATER"

    run(main)


def test_slots_of_one_api_rest_together_as_long_as_it_asks() -> None:
    async def main(clock: Clock) -> None:
        breaker, begun = Breaker(5, 0.5), clock()

        def too_many(entries: Sequence[Entry]) -> BackendError | None:
            if clock() > begun + 50.0:
                return None
            breaker.rest(clock(), 60.0)
            return RemoteError("HTTP 429; it asks for 60 s of rest")

        backends = [FakeBackend(0.05, too_many) for _ in range(4)]
        async with Stand(clock, *backends, max_batch=4, breaker=breaker) as stand:
            asked = []
            for number in range(200):
                asked.append(stand.asking(f"t{number}"))
                await asyncio.sleep(0.02)
            assert set(codes(await asyncio.gather(*asked))) == {errors.NO_WORKERS}
            assert sum(len(backend.batches) for backend in backends) <= 4, "what had left when the API asked"
            [reason] = {worker.reason for worker in await stand.broker.workers()}
            assert "as it was asked to" in reason
            await asyncio.sleep(60.0)
            assert (await stand.ask("well again")).output == "WELL AGAIN"

    run(main)


def test_bad_inputs_in_a_row_do_not_take_the_service_from_others() -> None:
    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(0.01, poison), max_batch=1) as stand:
            for number in range(30):
                assert codes([await stand.ask(f"poison {number}")]) == [errors.REJECTED_BY_MODEL]
                assert {worker.status for worker in await stand.broker.workers()} == {WorkerStatus.HEALTHY}
            before = clock()
            assert (await stand.ask("innocent")).output == "INNOCENT"
            assert clock() - before < 0.1
            assert stand.backends[0].starts == 1

    run(main)


def test_a_worker_in_which_nothing_works_any_more_is_replaced() -> None:
    async def main(clock: Clock) -> None:
        backend = FakeBackend(0.01)
        backend.script = lambda entries: BatchRaised("CUDA error") if backend.starts < 2 else None
        async with Stand(clock, backend, max_batch=1) as stand:
            begun = clock()
            reply, tries = await stand.ask("x"), 0
            while reply.output is None:
                assert clock() - begun < 10
                tries += 1
                reply = await stand.ask(f"x {tries}")
            assert (await stand.ask("x")).output == "X", "the worker was at fault, not the input"
            assert backend.starts == 2
            assert stand.counters.worker_restarts["gpu-0"] == 1

    run(main)


def test_a_client_is_not_told_what_only_operators_may_read() -> None:
    def script(entries: Sequence[Entry]) -> BackendError | None:
        crash = any(entry.input == "bad" for entry in entries)
        return WorkerCrashed("it crashed; its last words: of another client", "it crashed") if crash else None

    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(0.05, script)) as stand:
            reply = await stand.ask("bad")
            assert reply.failure is not None
            assert (reply.failure.code, reply.failure.message) == (errors.REJECTED_BY_MODEL, "it crashed")
            [letter] = await stand.dead.list()
            assert letter.error == "it crashed; its last words: of another client"

    run(main)


def test_when_the_retry_budget_is_spent_nobody_is_told_of_a_batch_mate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryBudget, "for_batches", lambda largest: RetryBudget(ratio=0.0, reserve=0.0, trickle=0.0))

    async def main(clock: Clock) -> None:
        backend = FakeBackend(0.01, lambda entries: WorkerCrashed("it died of 'a secret'"))
        async with Stand(clock, backend, max_batch=2) as stand:
            for reply in await asyncio.gather(stand.ask("a secret"), stand.ask("another")):
                assert reply.failure is not None
                assert reply.failure.code == errors.BACKEND_ERROR
                assert "budget is spent" in reply.failure.message
                assert "secret" not in reply.failure.message

    run(main)


def test_an_exception_in_a_waiter_hurts_nobody_else() -> None:
    class Broken(FutureSink):
        def answer(self, reply: Reply) -> None:
            raise RuntimeError("connection object is broken")

    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(0.1)) as stand:
            stand.gateway.submit(Broken(), ANYBODY, new_id(), RequestOptions(4.0, 1), "m", "a", b"")
            assert (await stand.ask("b")).output == "B"

    run(main)


def test_a_fault_inside_is_told_to_operators_alone() -> None:
    class Faulty(FakeBackend):
        async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
            raise OSError(28, "No space left on device", "/srv/model")

    async def main(clock: Clock) -> None:
        async with Stand(clock, Faulty()) as stand:
            failure = (await stand.ask("x")).failure
            assert failure is not None
            assert failure.message == "the worker broke"
            [letter] = await stand.dead.list(10)
            assert "No space left" in letter.error

    run(main)


def test_drain_answers_everything_and_stops_the_workers() -> None:
    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(0.3), FakeBackend(0.3)) as stand:
            asked = [stand.asking(f"t{number}") for number in range(40)]
            await asyncio.sleep(0.1)
            await stand.service.drain()
            await stand.service.stop()
            assert codes([await one for one in asked]) == ["ok"] * 40
            assert all(backend.stops for backend in stand.backends)

    run(main)


def test_stop_refuses_what_is_left() -> None:
    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(3.0)) as stand:
            asked = stand.asking("t")
            await asyncio.sleep(0.1)
            await stand.service.stop()
            assert codes([await asked]) == [errors.DRAINING]

    run(main)


def test_refusals_at_the_door() -> None:
    async def main(clock: Clock) -> None:
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

    run(main)


def test_refusals_at_the_door_do_not_flatter_the_latency() -> None:
    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(0.5), max_batch=1) as stand:
            await stand.ask("measures")
            replies = await asyncio.gather(*(stand.ask(str(number)) for number in range(20)))
            refused = sum(reply.failure is not None and reply.failure.reason == "shed" for reply in replies)
            assert 5 < refused < 20
            assert stand.counters.refusals["shed", "paid"] == refused
            latencies = stand.counters.request_seconds["m", "paid"]
            assert latencies.count == 21 - refused
            assert latencies.counts[0] == 0

    run(main)


def test_random_cancellations_never_wedge_a_batcher() -> None:
    async def main(clock: Clock) -> None:
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

    run(main)


def test_a_batch_that_runs_long_keeps_its_lease() -> None:
    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(25.0), gpu_timeout_ms=30_000, request_timeout_ms=30_000) as stand:
            reply = await stand.ask("long", timeout=30.0)
            assert reply.output == "LONG" and reply.attempts == 1
            assert stand.backends[0].batches == [["long"]]

    run(main)


def test_requests_in_a_rush_go_to_the_broker_together_and_a_lone_one_goes_at_once() -> None:
    async def main(clock: Clock) -> None:
        async with Stand(clock, FakeBackend(0.1), max_batch=100) as stand:
            calls: list[tuple[float, int]] = []
            enqueue = stand.broker.enqueue

            async def watched(entries: Sequence[Entry]) -> Sequence[Failure | None]:
                calls.append((clock(), len(entries)))
                return await enqueue(entries)

            stand.broker.enqueue = watched  # type: ignore[method-assign]
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

    run(main)

"""Requests through gateway, broker and batcher, when all is well, and when workers, backends or inputs fail."""

import asyncio
import gc
import weakref
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest

from headway import errors
from headway.core.breaker import Breaker, State
from headway.core.retry import MAX_ATTEMPTS
from headway.errors import BackendError, BatchRaised, RemoteAbsent, RemoteError, StartKilled, TargetError, WorkerAbsent
from headway.model import WARM_UP, Entry, ItemResult, Lease, Reply, Slot, WorkerStatus
from headway.ports import Backend
from headway.worker.helping import run_batch
from tests.contracts.brokers import ask
from tests.services.calls import failure_of
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand, codes
from tests.virtual_time import Clock


async def test_a_client_that_leaves_in_flight_costs_gpu_time_that_is_counted(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(1.0)) as stand:
        leaver = stand.asking("gone")
        await asyncio.sleep(0.5)
        leaver.cancel()
        await asyncio.sleep(1)
        assert stand.counters.worker.wasted_seconds["departed"] == pytest.approx(1.0, abs=0.01)
        assert (await stand.ask("next")).output == "NEXT"


async def test_a_drain_ends_although_a_request_is_still_held(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.1), gpu_timeout_ms=25_000.0) as stand:
        stand.backends[0].seconds = 1000.0
        asked = stand.asking("is tried again", timeout=600.0)
        await asyncio.sleep(0.1)
        began = clock()
        await stand.service.drain()
        assert clock() - began == pytest.approx(30.0, abs=0.1)
        await stand.service.stop()
        assert codes([await asked]) == [errors.DRAINING]


async def test_refusals_at_the_door_do_not_flatter_the_latency(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.5), max_batch=1) as stand:
        await stand.ask("measures")
        replies = await asyncio.gather(*(stand.ask(str(number)) for number in range(20)))
        refused = sum(reply.failure is not None and reply.failure.reason == "shed" for reply in replies)
        assert 5 < refused < 20
        assert stand.counters.gateway.refusals["shed", "paid", "m"] == refused
        latencies = stand.counters.gateway.request_seconds["m", "paid"]
        assert latencies.count == 21 - refused
        assert latencies.counts[0] == 0


async def test_random_cancellations_never_wedge_a_batcher(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.05), FakeBackend(0.05), max_batch=4) as stand:
        tasks = []
        for number in range(300):
            tasks.append(stand.asking(f"t{number}"))
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
async def test_a_lease_is_renewed_whatever_is_slow(hangs: str, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Either a heartbeat or the first renewal is never answered."""
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


class Api(FakeBackend):
    """A fake remote API. It has no process that could be replaced."""

    @property
    def pid(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("kind", "error", "starts"),
    [(FakeBackend, WorkerAbsent("it has no process"), 1 + MAX_ATTEMPTS), (Api, RemoteAbsent("no connection came"), 1)],
)
async def test_an_unsent_batch_is_free(kind: type[FakeBackend], error: BackendError, starts: int, clock: Clock) -> None:
    left = [error] * MAX_ATTEMPTS
    backend = kind(0.1, lambda entries: left.pop() if left else None)
    async with Stand(clock, backend) as stand:
        reply = await stand.ask("innocent")
        assert reply.output == "INNOCENT" and reply.attempts == 1
        assert backend.starts == starts
        assert not sum(stand.counters.broker.retries.values())
        assert await stand.dead.list() == []


class Frail(FakeBackend):
    """Dies `life` seconds after each start."""

    life = 0.0

    async def gone(self) -> None:
        await asyncio.sleep(self.life)


async def test_a_worker_that_dies_idle_again_and_again_is_started_ever_less_often(clock: Clock) -> None:
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


async def test_a_worker_that_dies_idle_is_not_started_more_often_because_requests_wait(clock: Clock) -> None:
    backend = FakeBackend(0.1, lambda entries: WorkerAbsent("it has no process"))
    async with Stand(clock, backend) as stand:
        asked = [stand.asking(f"t{number}") for number in range(10)]
        await asyncio.sleep(10)
        assert backend.starts <= 8
        for one in asked:
            one.cancel()


async def test_a_finished_batch_ends_the_pauses(clock: Clock) -> None:
    backend = Frail(0.01)
    async with Stand(clock, backend, request_timeout_ms=30_000, queue_timeout_ms=30_000) as stand:
        await asyncio.sleep(10)
        backend.life = 0.5
        assert (await stand.ask("x", timeout=30.0)).output == "X"
        await asyncio.sleep(1.2)  # It died after its batch, and then once more.
        before = clock()
        assert (await stand.ask("y", timeout=30.0)).output == "Y"
        assert clock() - before < 0.1


async def test_a_worker_that_is_killed_while_it_starts_is_started_again_soon(clock: Clock) -> None:
    backend = FakeBackend(0.1)
    async with Stand(clock, backend) as stand:
        backend.refuse_start, backend.refusal = 10**6, StartKilled("died of SIGKILL")
        backend.dead.set()
        await asyncio.sleep(60)
        assert 10**6 - backend.refuse_start > 25
        backend.refuse_start = 0
        await asyncio.sleep(2.1)
        assert (await stand.ask("back", timeout=0.2)).output == "BACK"


class Trace:
    """An object that a failed start referred to."""


async def test_starts_that_fail_leave_nothing_for_the_garbage_collector(clock: Clock) -> None:
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
        assert stand.counters.worker.restarts["gpu-0"] == 0


async def test_a_drain_begun_during_a_claim_waits_for_no_more(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stand = Stand(clock, FakeBackend(0.1))
    claim, begun = stand.broker.claim, asyncio.Event()

    async def far(*arguments: Any) -> Any:
        begun.set()
        await asyncio.sleep(0.01)
        return await claim(*arguments)

    monkeypatch.setattr(stand.broker, "claim", far)
    async with stand, asyncio.timeout(60):
        await begun.wait()
        before = clock()
        await stand.service.drain()
        assert clock() - before < 0.1


@pytest.mark.parametrize("loads", [True, False], ids=["loads", "waits for its next attempt"])
async def test_a_drain_does_not_wait_for_a_worker_that_is_not_up(loads: bool, clock: Clock) -> None:
    backend = FakeBackend(0.1)
    async with Stand(clock, backend) as stand:
        backend.start_seconds, backend.refuse_start = 60.0, 0 if loads else 10**6
        backend.dead.set()
        await asyncio.sleep(1 if loads else 20)
        before = clock()
        await stand.service.drain()
        assert clock() - before < 0.1
        assert not loads or backend.stops == 2


async def test_a_worker_that_was_replaced_while_it_did_not_start_takes_the_fresh_one(clock: Clock) -> None:
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


async def test_a_worker_in_which_nothing_works_any_more_is_replaced(clock: Clock) -> None:
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
        assert stand.counters.worker.restarts["gpu-0"] == 1


def poison(entries: Sequence[Entry]) -> BackendError | None:
    if any("poison" in str(entry.input) for entry in entries):
        return BatchRaised("ValueError: poison")
    return None


async def test_a_backend_out_of_reach_is_degraded_after_its_first_batch(clock: Clock) -> None:
    """Requests that wait for it fail because there is no worker, not because a deadline has passed."""
    away = True
    backend = Api(0.01, lambda entries: RemoteAbsent("no connection came about") if away else None)
    async with Stand(clock, backend) as stand:
        reply = await stand.ask("in vain", timeout=1.0)
        assert failure_of(reply).code == errors.NO_WORKERS
        [worker] = await stand.broker.workers()
        assert worker.status is WorkerStatus.DEGRADED
        assert worker.reason == "rests after failed batches; the last error: no connection came about"
        away = False
        assert (await stand.ask("good", timeout=10.0)).output == "GOOD"


class Broken(FakeBackend):
    """While `error` is set, every batch fails, and the probe raises `error`, which no backend is known to raise."""

    error: Exception | None = None

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        items = await super().run(entries, timeout)
        if self.error is not None:
            raise self.error if entries[0].id == WARM_UP else BatchRaised("no")
        return items


@pytest.mark.parametrize("error", [RuntimeError("Session is closed"), KeyError(7)])
async def test_a_probe_that_fails_oddly_keeps_no_slot_out(error: Exception, clock: Clock) -> None:
    backends = [Broken(0.01), Broken(0.01)]
    async with Stand(clock, *backends, max_batch=1, breaker=Breaker(5, 0.5)) as stand:
        for backend in backends:
            backend.error = error
        for number in range(8):
            await stand.ask(f"bad {number}", timeout=1.0)
        assert WorkerStatus.HEALTHY not in {worker.status for worker in await stand.broker.workers()}
        assert stand.counters.worker.breaker_state["gpu-0"] != State.CLOSED
        for backend in backends:
            backend.error = None
        await asyncio.sleep(31)
        assert (await stand.ask("good")).output == "GOOD"
        assert {worker.status for worker in await stand.broker.workers()} == {WorkerStatus.HEALTHY}
        assert stand.counters.worker.breaker_state["gpu-0"] == State.CLOSED


async def test_slots_of_one_api_rest_together_as_long_as_it_asks(clock: Clock) -> None:
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
        reasons = {worker.reason for worker in await stand.broker.workers()}
        assert all("as the API requested" in reason for reason in reasons)
        assert any(reason.endswith("; the last error: HTTP 429; it asks for 60 s of rest") for reason in reasons)
        await asyncio.sleep(60.0)
        assert (await stand.ask("well again")).output == "WELL AGAIN"


async def test_bad_inputs_in_a_row_do_not_take_the_service_from_others(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.01, poison), max_batch=1) as stand:
        for number in range(30):
            assert codes([await stand.ask(f"poison {number}")]) == [errors.REJECTED_BY_MODEL]
            assert {worker.status for worker in await stand.broker.workers()} == {WorkerStatus.HEALTHY}
        before = clock()
        assert (await stand.ask("innocent")).output == "INNOCENT"
        assert clock() - before < 0.1
        assert stand.backends[0].starts == 1


async def test_a_fault_inside_is_told_to_operators_alone(clock: Clock) -> None:
    class Faulty(FakeBackend):
        async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
            raise OSError(28, "No space left on device", "/srv/model")

    async with Stand(clock, Faulty()) as stand:
        assert failure_of(await stand.ask("x")).message == "the worker broke"
        [letter] = await stand.dead.list(10)
        assert "No space left" in letter.error


class Raising:
    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        raise BatchRaised("no good", places=(len(entries) - 1,))


def test_the_places_of_a_call_that_raised_are_those_of_the_lease() -> None:
    pinned = msgspec.structs.replace(ask(id="elsewhere"), pinned=True)
    lease = Lease(
        1,
        Slot("gpu-0", "m", 8, version="2", helps=True),
        [pinned, ask(id="good"), pinned, ask(id="bad")],
        "full",
        0.0,
        1.0,
        1.0,
    )
    with pytest.raises(BatchRaised) as raised:
        asyncio.run(run_batch(cast("Backend", cast(Any, Raising())), lease, 1.0))
    assert raised.value.places == (3,)

"""Workers that die, do not start or are replaced, and the requests that wait for them, on virtual time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from headway import errors
from headway.core.retry import MAX_ATTEMPTS
from headway.errors import (
    BackendError,
    BatchRaised,
    RemoteAbsent,
    StartKilled,
    TargetError,
    WorkerAbsent,
    WorkerCrashed,
)
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand, codes
from tests.virtual_time import Clock


async def test_a_crashed_worker_is_replaced_and_its_batch_is_retried(clock: Clock) -> None:
    crashes = [WorkerCrashed("killed by SIGKILL")]
    backend = FakeBackend(0.1, lambda entries: crashes.pop() if crashes else None)
    async with Stand(clock, backend) as stand:
        reply = await stand.ask("survivor")
        assert reply.output == "SURVIVOR" and reply.attempts == 2
        assert backend.starts == 2
        assert stand.counters.retries["crashed"] == 1


class Api(FakeBackend):
    """Fake of a remote API, which has no process that could be replaced."""

    @property
    def pid(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("kind", "error", "starts"),
    [(FakeBackend, WorkerAbsent("it has no process"), 1 + MAX_ATTEMPTS), (Api, RemoteAbsent("no connection came"), 1)],
)
async def test_a_batch_of_which_nothing_was_sent_is_not_charged(
    kind: type[FakeBackend], error: BackendError, starts: int, clock: Clock
) -> None:
    left = [error] * MAX_ATTEMPTS
    backend = kind(0.1, lambda entries: left.pop() if left else None)
    async with Stand(clock, backend) as stand:
        reply = await stand.ask("innocent")
        assert reply.output == "INNOCENT" and reply.attempts == 1
        assert backend.starts == starts
        assert not sum(stand.counters.retries.values())
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
        await asyncio.sleep(0.5)
        before = clock()
        assert (await stand.ask("y", timeout=30.0)).output == "Y"
        assert clock() - before < 0.1


async def test_a_worker_that_is_killed_while_it_starts_is_started_again_soon(clock: Clock) -> None:
    backend = FakeBackend(0.1)
    async with Stand(clock, backend) as stand:
        backend.refuse_start, backend.refusal = 10**6, StartKilled("died of SIGKILL")
        backend.dead.set()
        await asyncio.sleep(60)
        backend.refuse_start = 0
        await asyncio.sleep(2.1)
        assert (await stand.ask("back", timeout=0.2)).output == "BACK"


class Trace:
    """Object that a failed start had in its hands."""


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
        assert stand.counters.worker_restarts["gpu-0"] == 0


async def test_requests_are_refused_while_no_worker_starts_and_answered_when_one_does(clock: Clock) -> None:
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


async def test_a_drain_that_begins_during_a_claim_waits_for_nothing_more(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
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
        assert stand.counters.worker_restarts["gpu-0"] == 1

"""Models on shared GPUs that do not load, or hang while they do: the others serve on, and everybody hears why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway import errors
from headway.core.locality.placement import LEAST_OVERDUE
from headway.http.readiness import Readiness
from headway.model import Failure, WorkerInfo, WorkerStatus
from tests.services.test_shared_gpus import BATCH, LOAD, OnGpu, Stand
from tests.virtual_time import Clock

HANGS = 3600.0
"""Seconds of a load that hangs."""


def hang(stand: Stand, model: str) -> None:
    """Have the loads of a model hang from now on."""
    make = stand._backend

    hung = model

    def made(model: str, index: int) -> OnGpu:
        backend = make(model, index)
        if model == hung:
            backend.start_seconds = HANGS
        return backend

    stand._backend = made  # type: ignore[method-assign]


def status(stand: Stand, worker: str) -> WorkerStatus | None:
    told = stand.broker._workers.get(worker)
    return told.status if told is not None else None


def retry_in(stand: Stand, worker: str) -> float:
    return stand.broker._workers[worker].retry_in


async def line(stand: Stand, worker: str) -> WorkerInfo:
    return next(one for one in await stand.broker.workers() if one.worker_id == worker)


async def until(holds: Callable[[], bool]) -> None:
    """Return once something holds, as it does within a few minutes of virtual time."""
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(BATCH)
    raise AssertionError("it never holds")


async def refused(stand: Stand, model: str, patience: float) -> Failure | None:
    """Failure of a request with so much patience, after the gateway has looked at the workers."""
    stand.gateway.served.learn(await stand.broker.workers())
    return (await stand.ask(model, timeout=patience)).failure


async def test_a_load_that_hangs_shows_its_age_and_the_models_that_are_warm_serve_on(
    clock: Clock,
) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        hang(stand, "c")
        cold = asyncio.ensure_future(stand.ask("c"))
        begun = clock()
        while clock() - begun < LEAST_OVERDUE:
            assert await stand.latency("a") <= 2 * BATCH + 1e-6
        loading = await line(stand, "c/gpu-0")
        assert loading.status is WorkerStatus.STARTING
        assert 15.0 < loading.loading <= LEAST_OVERDUE
        assert loading.reason == f"has been loading for {loading.loading:.0f} s"
        cold.cancel()


async def test_a_load_that_hangs_makes_room_for_another_model_that_is_asked_for(clock: Clock) -> None:
    async with Stand(clock, "abcd", 1, 2, a=1) as stand:
        hang(stand, "c")
        hung = asyncio.ensure_future(stand.ask("c", timeout=50.0))
        await until(lambda: "c" in stand.on[0])
        begun = clock()
        assert (await stand.ask("d")).output == "X"
        assert LEAST_OVERDUE - 1.0 <= clock() - begun <= LEAST_OVERDUE + LOAD + 2.0
        assert stand.on == ["ad"]
        failed = await line(stand, "c/gpu-0")
        assert failed.status is WorkerStatus.FAILED
        assert failed.reason.startswith("its load was given up after 30 s, as d needed its place; it is tried again")
        assert (await hung).failure is not None


async def test_a_load_that_hangs_in_one_gpu_keeps_no_load_from_another(clock: Clock) -> None:
    async with Stand(clock, "abcd", 2, 1, a=1) as stand:
        hang(stand, "c")
        hung = asyncio.ensure_future(stand.ask("c"))
        await until(lambda: "c" in "".join(stand.on))
        for _ in range(20):
            assert (await stand.ask("a")).output == "X"
        assert (await stand.ask("d")).output == "X"
        hung.cancel()


async def test_a_model_that_does_not_load_is_shown_as_failed_with_the_reason_until_it_loads(
    clock: Clock,
) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        ready = Readiness(stand.broker, lambda: False, stand.pool.slots, needs_own=True)
        stand.broken.add(("c", 0))
        cold = asyncio.ensure_future(stand.ask("c"))
        await until(lambda: status(stand, "c/gpu-0") is WorkerStatus.FAILED)
        failed = await line(stand, "c/gpu-0")
        assert failed.reason.startswith("does not load; it is tried again ")
        word, checks = await ready.look()
        assert (word, checks["workers"]) == ("degraded", "1 of 2 healthy"), "b has made room, which is no fault"
        assert checks["failed"] == {"c": failed.reason}
        stand.broken.clear()
        assert (await cold).output == "X"
        assert (await ready.look())[0] == "ok"
        assert (await line(stand, "c/gpu-0")).reason == ""


async def test_a_model_that_failed_on_one_gpu_and_loads_on_another_is_failed_no_more(
    clock: Clock,
) -> None:
    async with Stand(clock, "abc", 2, 1) as stand:
        stand.broken |= {("a", 0), ("b", 1), ("c", 1)}
        stand.backends["b", 1][0].dead.set()
        await until(lambda: stand.on == ["a", ""])
        cold = asyncio.ensure_future(stand.ask("c"))
        await until(lambda: status(stand, "c/gpu-1") is WorkerStatus.FAILED)
        assert "c/gpu-1" in stand.pool.slots, "it counts as missing"
        stand.backends["a", 0][0].dead.set()
        assert (await cold).output == "X"
        assert stand.on == ["c", ""]
        await asyncio.sleep(1.0)
        statuses = await stand.statuses()
        assert (statuses["c/gpu-0"], statuses["c/gpu-1"]) == (WorkerStatus.HEALTHY, WorkerStatus.COLD)
        assert "c/gpu-1" not in stand.pool.slots


async def test_requests_for_a_model_that_did_not_load_are_refused_at_once_where_it_is_tried_too_late_for_them(
    clock: Clock,
) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        stand.broken.add(("c", 0))
        patient = asyncio.ensure_future(stand.ask("c"))
        await until(lambda: status(stand, "c/gpu-0") is WorkerStatus.FAILED and retry_in(stand, "c/gpu-0") >= 4.0)
        begun = clock()
        failure = await refused(stand, "c", 2.0)
        assert failure is not None
        assert failure.code == errors.NO_WORKERS
        assert failure.message.startswith("the model 'c' did not load, and is tried again in ")
        assert (failure.retry_after or 0.0) > 2.0
        assert clock() == begun, "at once"
        stand.broken.clear()
        assert (await stand.ask("c")).output == "X", "who has time waits"
        assert (await patient).output == "X"
        assert await refused(stand, "c", 2.0) is None

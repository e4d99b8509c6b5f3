"""GPUs that hold several models: turns between them, loads and evictions, and faults that stay where they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headway import errors
from headway.app.brokers import queue_limits
from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.brokers.memory.fleet import MemoryFleet
from headway.config import Settings
from headway.config.models import ModelSettings
from headway.errors import TargetError
from headway.fleet.reaper import reap_on
from headway.gateway.gateway import Gateway
from headway.model import ModelReport, Reply, RequestOptions, Slot, WorkerInfo, WorkerStatus
from headway.ports import WorkSource
from headway.runtime.counters import Counters
from headway.runtime.request_id import new_id
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import Batcher
from headway.worker.shared_gpus import CHECK_LOADS_EVERY, SharedGpus, SharedModel, Started
from tests.services.batchers import make_batcher
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.fake_gpu import LOST, FakeGpu
from tests.virtual_time import Clock

BATCH = 0.1
LOAD = 2.0
"""Seconds of a load."""


class Gpu:
    """What runs on one GPU, to see that this is one batch at a time."""

    def __init__(self) -> None:
        self.running = 0
        self.order: list[str] = []


class OnGpu(FakeBackend):
    """Fake backend of one model on one GPU."""

    def __init__(self, model: str, gpu: Gpu) -> None:
        super().__init__(BATCH)
        self.start_seconds = LOAD
        self.model, self.gpu = model, gpu

    async def run(self, entries, timeout):  # type: ignore[no-untyped-def]
        assert not self.gpu.running, "two batches at once on one GPU"
        self.gpu.running += 1
        self.gpu.order.append(self.model)
        try:
            return await super().run(entries, timeout)
        finally:
            self.gpu.running -= 1


class Stand:
    """A gateway, and models that share GPUs; with another stand a host of its fleet."""

    def __init__(
        self,
        clock: Clock,
        models: str,
        gpus: int,
        room: int,
        beside: Stand | None = None,
        version: str = "",
        **min_warm: int,
    ) -> None:
        chosen = tuple(ModelSettings(name) for name in models)
        patient = {"queue_timeout_ms": 60_000.0, "request_timeout_ms": 60_000.0}
        self.settings = Settings(models=chosen, max_batch_size=8, policy="window", max_wait_ms=0, **patient)  # type: ignore[arg-type]
        self.counters, self.clock = Counters(), clock
        limits = {name: queue_limits(one) for name, one in self.settings.served.items()}
        self.host: str = "" if beside is None else f"{beside.host}further-"
        self.broker = MemoryBroker(limits, DeadLetterBox(), self.counters, clock, lambda: 0.5)
        self.fleet = MemoryFleet(clock)
        if beside is not None:
            self.broker, self.fleet = beside.broker, beside.fleet
            self.broker.know(limits)
        self.gateway = Gateway(self.settings, [*limits], self.broker, self.counters, clock, rng=lambda: 0.5)
        self.gpus = [Gpu() for _ in range(gpus)]
        self.watched = [FakeGpu() for _ in range(gpus)]
        self.backends: dict[tuple[str, int], list[OnGpu]] = {}
        self.broken: set[tuple[str, int]] = set()
        self.version = version
        shared = {name: self._shared(name, min_warm.get(name, 0)) for name in limits}
        names = [f"gpu-{number}" for number in range(gpus)]
        self.pool = SharedGpus(names, room, shared, self.broker, self.counters, clock, set(), may_load=self._may_load)
        self._supervisor = Supervisor()

    def _shared(self, model: str, min_warm: int) -> SharedModel:
        report = ModelReport(self.version or "1")
        return SharedModel(self._maker(model), self._namer(model), min_warm, report, self.version)

    async def _may_load(self, model: str, seconds: float) -> bool:
        return await self.fleet.acquire_load(model, self.host, seconds)

    def _namer(self, model: str) -> Callable[[int], str]:
        return lambda index: f"{self.host}{model}/gpu-{index}"

    def _maker(self, model: str):  # type: ignore[no-untyped-def]
        def make(index: int, broker: WorkSource, started: Started = lambda seconds: None) -> Batcher:
            slot = Slot(self._namer(model)(index), model, 8, 0, ModelReport(self.version or "1"), self.version)
            gpu = self.watched[index]
            return make_batcher(
                slot, lambda: self._backend(model, index), broker, self.counters, self.clock, gpu=gpu, started=started
            )

        return make

    def _backend(self, model: str, index: int) -> OnGpu:
        backend = OnGpu(model, self.gpus[index])
        backend.refuse_start = 1 if (model, index) in self.broken else 0
        self.backends.setdefault((model, index), []).append(backend)
        return backend

    async def __aenter__(self) -> Stand:
        await self.pool.start()
        self.pool.run(self._supervisor)
        self.gateway.start(self._supervisor)
        self._supervisor.start("reaper", lambda: reap_on(self.broker))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._supervisor.stop()
        await self.pool.stop()

    async def ask(self, model: str, text: str = "x", timeout: float = 60.0) -> Reply:
        return await self.gateway.ask(ANYBODY, new_id(), RequestOptions(timeout), model, text, b"")

    async def latency(self, model: str) -> float:
        begun = self.clock()
        assert (await self.ask(model)).output == "X"
        return self.clock() - begun

    async def statuses(self) -> dict[str, WorkerStatus]:
        return {worker.worker_id: worker.status for worker in await self.broker.workers()}

    @property
    def on(self) -> list[str]:
        """Models with a batcher on each GPU."""
        found: list[str] = ["" for _ in self.gpus]
        for batcher in self.pool.batchers:
            found[int(batcher.slot.worker[-1])] += batcher.slot.model
        return ["".join(sorted(models)) for models in found]


async def test_a_flood_of_one_model_costs_another_the_batch_that_is_running(clock: Clock) -> None:
    async with Stand(clock, "ab", 2, 2) as stand:
        assert stand.on == ["ab", "ab"]
        calm = max([await stand.latency("b") for _ in range(5)])
        flood = [asyncio.ensure_future(stand.ask("a")) for _ in range(400)]
        await asyncio.sleep(BATCH / 2)
        flooded = max([await stand.latency("b") for _ in range(10)])
        assert flooded <= calm + BATCH + 1e-6
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_what_one_model_leaves_of_the_gpus_another_uses(clock: Clock) -> None:
    async with Stand(clock, "ab", 2, 2) as stand:
        replies = await asyncio.gather(*(stand.ask("a") for _ in range(64)))
        assert {reply.ran.worker for reply in replies if reply.ran} == {"a/gpu-0", "a/gpu-1"}


async def test_models_that_are_both_flooded_take_turns(clock: Clock) -> None:
    async with Stand(clock, "ab", 1, 2) as stand:
        asked = [stand.ask(model) for model in "ab" for _ in range(80)]
        await asyncio.gather(*asked)
        first = stand.gpus[0].order[:16]
        assert abs(first.count("a") - first.count("b")) <= 2


async def test_a_cold_model_is_loaded_once_and_takes_the_place_of_the_coldest(clock: Clock) -> None:
    async with Stand(clock, "abc", 2, 1) as stand:
        assert stand.on == ["a", "b"]
        begun = clock()
        asked = [asyncio.ensure_future(stand.ask("c")) for _ in range(20)]
        while not asked[0].done():
            await stand.latency("a")
        assert {reply.output for reply in await asyncio.gather(*asked)} == {"X"}
        assert stand.on == ["a", "c"]
        assert stand.counters.model_loads["c", "c/gpu-1"] == 1
        assert [key for key in stand.counters.model_loads if key[0] == "c"] == [("c", "c/gpu-1")]
        assert stand.counters.model_evictions == {"cold": 1}
        assert stand.counters.load_seconds["c"].sum == pytest.approx(LOAD)
        assert clock() - begun < 15.0
        assert (await stand.statuses())["b/gpu-1"] is WorkerStatus.COLD


async def test_the_time_of_a_load_is_none_of_a_batch_and_trips_no_deadline(clock: Clock) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        stand.backends.clear()
        slow = stand._backend

        def slower(model: str, index: int) -> OnGpu:
            backend = slow(model, index)
            backend.start_seconds = 20.0  # The GPU deadline is 3 s.
            return backend

        stand._backend = slower  # type: ignore[method-assign]
        cold = asyncio.ensure_future(stand.ask("c"))
        while not cold.done():
            assert await stand.latency("a") <= 2 * BATCH + 1e-6, "the others of the GPU serve on"
        assert cold.result().output == "X"
        [seconds] = {histogram.sum for key, histogram in stand.counters.gpu_seconds.items() if key[0] == "c"}
        assert seconds == pytest.approx(BATCH)


async def test_a_model_that_does_not_load_leaves_the_others_of_its_gpu_alone(clock: Clock) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        stand.broken.add(("c", 0))
        cold = asyncio.ensure_future(stand.ask("c"))
        for _ in range(200):
            assert await stand.latency("a") <= 2 * BATCH + 1e-6
        assert len(stand.backends["c", 0]) >= 2, "it is tried again"
        stand.broken.clear()
        assert (await cold).output == "X"


async def test_a_model_that_does_not_load_at_the_start_ends_it(clock: Clock) -> None:
    stand = Stand(clock, "ab", 1, 2)
    stand.broken.add(("b", 0))
    with pytest.raises(TargetError):
        await stand.__aenter__()
    await stand.pool.stop()


async def test_a_process_that_is_killed_while_warm_is_started_again_and_the_others_serve_on(
    clock: Clock,
) -> None:
    async with Stand(clock, "ab", 1, 2) as stand:
        [backend] = stand.backends["a", 0]
        backend.dead.set()
        waiting = asyncio.ensure_future(stand.ask("a"))
        while not waiting.done():
            assert await stand.latency("b") <= 2 * BATCH + 0.05
        assert waiting.result().output == "X"
        assert len(stand.backends["a", 0]) == 2


async def test_a_process_that_does_not_come_back_gives_its_place_up(clock: Clock) -> None:
    async with Stand(clock, "ab", 2, 1) as stand:
        stand.broken.add(("a", 0))
        stand.backends["a", 0][0].dead.set()
        await asyncio.sleep(3 * CHECK_LOADS_EVERY)
        assert stand.on == ["", "b"]
        stand.broken.clear()
        assert (await stand.ask("a")).output == "X"


async def test_what_is_to_be_kept_warm_stays(clock: Clock) -> None:
    async with Stand(clock, "abc", 2, 1, a=1) as stand:
        for model in "bcbc":
            assert (await stand.ask(model)).output == "X"
            assert "a" in stand.on


async def test_the_models_of_a_gpu_that_is_lost_are_loaded_elsewhere_and_none_comes_back_to_it(
    clock: Clock,
) -> None:
    async with Stand(clock, "ab", 2, 1) as stand:
        assert stand.on == ["a", "b"]
        stand.watched[1].lose()
        asked = [asyncio.ensure_future(stand.ask("b")) for _ in range(20)]
        assert {reply.output for reply in await asyncio.gather(*asked)} == {"X"}
        for model in "abab":
            assert (await stand.ask(model)).output == "X"
        assert {key for key in stand.backends if key[1] == 1} == {("b", 1)}
        assert len(stand.backends["b", 1]) == 1, "it is not started again"
        lost = {one.worker_id: (one.status, one.reason) for one in await stand.broker.workers()}["b/gpu-1"]
        assert lost == (WorkerStatus.DEGRADED, f"its GPU is lost: {LOST}")


async def test_a_drain_ends_the_batches_and_begins_no_load(clock: Clock) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        running = asyncio.ensure_future(stand.ask("a"))
        cold = asyncio.ensure_future(stand.ask("c", timeout=5.0))
        await asyncio.sleep(BATCH / 2)
        await stand.pool.drain()
        assert (await running).output == "X"
        failure = (await cold).failure
        assert failure is not None
        assert failure.code in (errors.NO_WORKERS, errors.DEADLINE_EXCEEDED)
        assert ("c", 0) not in stand.backends
        assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}, "also of what was cold"


async def test_a_host_that_ends_takes_what_was_cold_with_it_wherever_that_was_told_of(
    clock: Clock,
) -> None:
    for drains in (True, False):
        async with Stand(clock, "abc", 2, 1) as stand:
            while "c/gpu-0" not in await stand.statuses():
                await stand.latency("a")
            asked = asyncio.ensure_future(stand.ask("c"))
            while not asked.done():
                await stand.latency("a")
            assert await stand.statuses() == {
                "a/gpu-0": WorkerStatus.HEALTHY,
                "b/gpu-1": WorkerStatus.COLD,
                "c/gpu-0": WorkerStatus.COLD,
                "c/gpu-1": WorkerStatus.HEALTHY,
            }
            if drains:
                await stand.pool.drain()
                assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}
                await asyncio.sleep(3.0)
        assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}


async def test_a_model_that_makes_room_while_its_host_drains_leaves_with_it(clock: Clock) -> None:
    async with Stand(clock, "ab", 1, 1) as stand:
        running = asyncio.ensure_future(stand.ask("a"))
        cold = asyncio.ensure_future(stand.ask("b", timeout=20.0))
        while stand.on == ["a"]:
            running = asyncio.ensure_future(stand.ask("a"))
            await asyncio.sleep(CHECK_LOADS_EVERY / 20)
        assert stand.on == [""], "the one is leaving, the other does not load yet"
        await stand.pool.drain()
        await asyncio.sleep(3.0)  # The heartbeats of what has left end.
        assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}
        cold.cancel()
        await asyncio.gather(running, cold, return_exceptions=True)


async def test_a_heartbeat_of_what_is_cold_that_is_under_way_comes_before_the_farewell(
    clock: Clock,
) -> None:
    async with Stand(clock, "abcd", 1, 1) as stand:
        told, slowly = stand.broker.heartbeat, asyncio.Event()

        async def slow(worker: WorkerInfo) -> None:
            if worker.status is WorkerStatus.COLD:
                slowly.set()
                await asyncio.sleep(CHECK_LOADS_EVERY)
            await told(worker)

        stand.broker.heartbeat = slow  # type: ignore[method-assign]
        await slowly.wait()
        await stand.pool.drain()
        await asyncio.sleep(3.0)
        assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}


async def test_heartbeats_tell_the_gpu_what_is_warm_there_and_what_share_it_can_have(
    clock: Clock,
) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        await asyncio.sleep(3.0)
        workers = {worker.worker_id: worker for worker in await stand.broker.workers()}
        assert {id: worker.status.value for id, worker in workers.items()} == {
            "a/gpu-0": "healthy", "b/gpu-0": "healthy", "c/gpu-0": "cold",
        }  # fmt: skip
        assert {worker.gpu for worker in workers.values()} == {"gpu-0"}
        flood = [asyncio.ensure_future(stand.ask("a")) for _ in range(400)]
        await asyncio.sleep(4.0)
        workers = {worker.worker_id: worker for worker in await stand.broker.workers()}
        assert workers["b/gpu-0"].share < 0.7
        assert workers["a/gpu-0"].share > 0.9
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_who_comes_in_vain_for_a_cold_model_is_told_when_it_will_be_loaded(clock: Clock) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        slow = stand._backend

        def slower(model: str, index: int) -> OnGpu:
            backend = slow(model, index)
            backend.start_seconds = 60.0
            return backend

        stand._backend = slower  # type: ignore[method-assign]
        kinds = stand.gateway.served
        await asyncio.sleep(3.0)
        kinds.learn(await stand.broker.workers())
        cold = await stand.ask("c", timeout=2.0)
        assert cold.failure is not None and cold.failure.code == errors.NO_WORKERS
        assert cold.failure.retry_after == pytest.approx(LOAD, abs=0.1), "as long as loads have been seen to take"
        kinds.learn(await stand.broker.workers())
        loading = await stand.ask("c", timeout=2.0)
        assert loading.failure is not None
        assert 1.0 <= (loading.failure.retry_after or 0.0) <= LOAD, "what is left of the load that is under way"
        assert kinds.in_time("a", loading.failure) is loading.failure, "one that is loaded has no load to wait for"

"""GPUs that hold several models, on one or more hosts: turns, loads and evictions, and faults that don't spread."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import pytest

from headway import errors
from headway.brokers.memory.fleet import MemoryFleet
from headway.config.target import ModelSettings
from headway.core.locality import LEAST_OVERDUE
from headway.core.versions import read_weights
from headway.doors.readiness import Readiness
from headway.errors import TargetError
from headway.model import Entry, Failure, ItemResult, ModelReport, Slot, WorkerInfo, WorkerStatus
from headway.ports import WorkSource
from headway.runtime.race import end
from headway.worker.batcher import Batcher
from headway.worker.helping import StrayWatcher
from headway.worker.shared_gpus import CHECK_LOADS_EVERY, SharedGpus, SharedModel, Started
from tests.services.calls import failure_of
from tests.services.fake_backend import FakeBackend
from tests.services.fake_gpu import LOST, FakeGpu
from tests.services.site import Site
from tests.virtual_time import Clock

BATCH = 0.1
LOAD = 2.0


class OnGpu(FakeBackend):
    """A backend that has its GPU to itself while it runs a batch."""

    def __init__(self, gpu: asyncio.Lock) -> None:
        super().__init__(BATCH)
        self._gpu = gpu

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        assert not self._gpu.locked(), "two batches at once on one GPU"
        async with self._gpu:
            return await super().run(entries, timeout)


class Stand(Site):
    """A gateway, and models that share GPUs. With `beside`, this is another host in that stand's fleet."""

    patience = 60.0

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
        patient = 60_000.0
        super().__init__(
            clock, *map(ModelSettings, models), beside=beside, queue_timeout_ms=patient, request_timeout_ms=patient
        )
        self.host: str = "" if beside is None else f"{beside.host}further-"
        self.fleet: MemoryFleet = MemoryFleet(clock) if beside is None else beside.fleet
        self.gpus = [asyncio.Lock() for _ in range(gpus)]
        self.watched = [FakeGpu() for _ in range(gpus)]
        self.backends: dict[tuple[str, int], list[OnGpu]] = {}
        self.broken: set[tuple[str, int]] = set()
        self.loads: dict[str, float] = {}
        """Seconds that a load of a model takes from now on, where that is not LOAD."""
        self.version = version
        self.codes = dict.fromkeys(models, "old")
        """Digests of the models' code, as they are read now."""
        shared = {name: self._shared(name, min_warm.get(name, 0)) for name in models}
        names = [f"gpu-{number}" for number in range(gpus)]
        self.pool = SharedGpus(
            names, room, shared, self.broker, self.counters.worker, clock, set(), may_load=self._may_load
        )
        self.pools = [self.pool]

    def _shared(self, model: str, min_warm: int) -> SharedModel:
        report = ModelReport(self.version or "1", "old")

        def name(index: int) -> str:
            return f"{self.host}{model}/gpu-{index}"

        async def read() -> ModelReport:
            return ModelReport(report.version, self.codes[model])

        def make(index: int, broker: WorkSource, started: Started = lambda seconds: None) -> Batcher:
            slot = Slot(name(index), model, 8, 0, report, self.version)
            own = {"gpu": self.watched[index], "started": started, "read_report": read}
            return self.batcher(slot, lambda: self._backend(model, index), broker, **own)

        return SharedModel(make, name, min_warm, report, self.version, read)

    async def _may_load(self, model: str, seconds: float) -> bool:
        return await self.fleet.acquire_load(model, self.host, seconds)

    def _backend(self, model: str, index: int) -> OnGpu:
        backend = OnGpu(self.gpus[index])
        backend.start_seconds = self.loads.get(model, LOAD)
        backend.refuse_start = 1 if (model, index) in self.broken else 0
        self.backends.setdefault((model, index), []).append(backend)
        return backend

    async def statuses(self) -> dict[str, WorkerStatus]:
        return {worker.worker_id: worker.status for worker in await self.broker.workers()}

    async def told(self, model: str) -> tuple[WorkerStatus, str]:
        [worker] = [one for one in await self.broker.workers() if one.worker_id == f"{model}/gpu-0"]
        return worker.status, worker.runs.target

    @property
    def on(self) -> list[str]:
        found: list[str] = ["" for _ in self.gpus]
        for batcher in self.pool.batchers:
            found[int(batcher.slot.worker[-1])] += batcher.slot.model
        return ["".join(sorted(models)) for models in found]


async def test_a_flood_of_one_model_costs_another_the_batch_that_is_running(clock: Clock) -> None:
    async with Stand(clock, "ab", 2, 2) as stand:
        assert stand.on == ["ab", "ab"]
        calm = max([await stand.latency("b") for _ in range(5)])
        flood = [stand.asking("a") for _ in range(400)]
        await asyncio.sleep(BATCH / 2)
        assert max([await stand.latency("b") for _ in range(10)]) <= calm + BATCH + 1e-6
        await end(*flood)


async def test_a_cold_model_is_loaded_once_and_takes_the_place_of_the_coldest(clock: Clock) -> None:
    async with Stand(clock, "abc", 2, 1) as stand:
        assert stand.on == ["a", "b"]
        begun = clock()
        asked = [stand.asking("c") for _ in range(20)]
        while not asked[0].done():
            await stand.latency("a")
        assert {reply.output for reply in await asyncio.gather(*asked)} == {"X"}
        assert stand.on == ["a", "c"]
        assert stand.counters.worker.loads["c", "c/gpu-1"] == 1
        assert [key for key in stand.counters.worker.loads if key[0] == "c"] == [("c", "c/gpu-1")]
        assert stand.counters.worker.evictions == {"cold": 1}
        assert stand.counters.worker.load_seconds["c"].sum == pytest.approx(LOAD)
        assert clock() - begun < 15.0
        assert (await stand.statuses())["b/gpu-1"] is WorkerStatus.COLD


async def test_the_time_of_a_load_is_none_of_a_batch_and_trips_no_deadline(clock: Clock) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        stand.loads["c"] = 20.0  # The GPU deadline is 3 s.
        cold = stand.asking("c")
        while not cold.done():
            assert await stand.latency("a") <= 2 * BATCH + 1e-6, "the others of the GPU serve on"
        assert cold.result().output == "X"
        [seconds] = {histogram.sum for key, histogram in stand.counters.worker.gpu_seconds.items() if key[0] == "c"}
        assert seconds == pytest.approx(BATCH)


async def test_a_model_that_does_not_load_at_the_start_ends_it(clock: Clock) -> None:
    stand = Stand(clock, "ab", 1, 2)
    stand.broken.add(("b", 0))
    with pytest.raises(TargetError):
        await stand.__aenter__()
    await stand.pool.stop()


async def test_a_process_that_is_killed_while_warm_is_started_again_and_the_others_serve_on(clock: Clock) -> None:
    async with Stand(clock, "ab", 1, 2) as stand:
        [backend] = stand.backends["a", 0]
        backend.dead.set()
        waiting = stand.asking("a")
        while not waiting.done():
            assert await stand.latency("b") <= 2 * BATCH + 0.05
        assert waiting.result().output == "X"
        assert len(stand.backends["a", 0]) == 2


async def test_the_models_of_a_gpu_that_is_lost_are_loaded_elsewhere_and_none_comes_back_to_it(clock: Clock) -> None:
    async with Stand(clock, "ab", 2, 1) as stand:
        assert stand.on == ["a", "b"]
        stand.watched[1].lose()
        asked = [stand.asking("b") for _ in range(20)]
        assert {reply.output for reply in await asyncio.gather(*asked)} == {"X"}
        for model in "abab":
            assert (await stand.ask(model)).output == "X"
        assert {key for key in stand.backends if key[1] == 1} == {("b", 1)}
        assert len(stand.backends["b", 1]) == 1, "it is not started again"
        lost = {one.worker_id: (one.status, one.reason) for one in await stand.broker.workers()}["b/gpu-1"]
        assert lost == (WorkerStatus.DEGRADED, f"its GPU is lost: {LOST}")


async def test_a_process_that_an_operator_drains_loads_nothing_and_is_no_place_for_what_is_cold(clock: Clock) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        for batcher in stand.pool.batchers:
            await batcher.hold(True)
        cold = stand.asking("c", timeout=20.0)
        await asyncio.sleep(3 * CHECK_LOADS_EVERY + 1.0)
        assert ("c", 0) not in stand.backends
        assert set((await stand.statuses()).values()) == {WorkerStatus.DRAINED}
        for batcher in stand.pool.batchers:
            await batcher.hold(False)
        assert (await cold).output == "X"


async def test_a_drain_ends_the_batches_and_begins_no_load(clock: Clock) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        running = stand.asking("a")
        cold = stand.asking("c", timeout=5.0)
        await asyncio.sleep(BATCH / 2)
        await stand.pool.wind_down()
        assert (await running).output == "X"
        assert failure_of(await cold).code in (errors.NO_WORKERS, errors.DEADLINE_EXCEEDED)
        assert ("c", 0) not in stand.backends
        assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}, "also of what was cold"


async def test_a_host_that_ends_takes_what_was_cold_with_it_wherever_that_was_told_of(clock: Clock) -> None:
    for drains in (True, False):
        async with Stand(clock, "abc", 2, 1) as stand:
            while "c/gpu-0" not in await stand.statuses():
                await stand.latency("a")
            asked = stand.asking("c")
            while not asked.done():
                await stand.latency("a")
            assert await stand.statuses() == {
                "a/gpu-0": WorkerStatus.HEALTHY,
                "b/gpu-1": WorkerStatus.COLD,
                "c/gpu-0": WorkerStatus.COLD,
                "c/gpu-1": WorkerStatus.HEALTHY,
            }
            if drains:
                await stand.pool.wind_down()
                assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}
                await asyncio.sleep(3.0)
        assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}


async def test_a_model_that_makes_room_while_its_host_drains_leaves_with_it(clock: Clock) -> None:
    async with Stand(clock, "ab", 1, 1) as stand:
        running = stand.asking("a")
        cold = stand.asking("b", timeout=20.0)
        while stand.on == ["a"]:
            running = stand.asking("a")
            await asyncio.sleep(CHECK_LOADS_EVERY / 20)
        assert stand.on == [""], "the one is leaving, the other does not load yet"
        await stand.pool.wind_down()
        await asyncio.sleep(3.0)  # The workers that left stop sending heartbeats.
        assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}
        cold.cancel()
        await asyncio.gather(running, cold, return_exceptions=True)


async def test_a_heartbeat_of_what_is_cold_that_is_under_way_comes_before_the_farewell(clock: Clock) -> None:
    async with Stand(clock, "abcd", 1, 1) as stand:
        told, slowly = stand.broker.heartbeat, asyncio.Event()

        async def slow(worker: WorkerInfo) -> None:
            if worker.status is WorkerStatus.COLD:
                slowly.set()
                await asyncio.sleep(CHECK_LOADS_EVERY)
            await told(worker)

        stand.broker.heartbeat = slow  # type: ignore[method-assign]
        await slowly.wait()
        await stand.pool.wind_down()
        await asyncio.sleep(3.0)
        assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}


async def test_heartbeats_tell_the_gpu_what_is_warm_there_and_what_share_it_can_have(clock: Clock) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        await asyncio.sleep(3.0)
        workers = {worker.worker_id: worker for worker in await stand.broker.workers()}
        assert {id: worker.status.value for id, worker in workers.items()} == {
            "a/gpu-0": "healthy", "b/gpu-0": "healthy", "c/gpu-0": "cold",
        }  # fmt: skip
        assert {worker.gpu for worker in workers.values()} == {"gpu-0"}
        flood = [stand.asking("a") for _ in range(400)]
        await asyncio.sleep(4.0)
        workers = {worker.worker_id: worker for worker in await stand.broker.workers()}
        assert workers["b/gpu-0"].share < 0.7
        assert workers["a/gpu-0"].share > 0.9
        await end(*flood)


async def test_who_comes_in_vain_for_a_cold_model_is_told_when_it_will_be_loaded(clock: Clock) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        stand.loads["c"] = 60.0
        kinds = stand.gateway.served
        await asyncio.sleep(3.0)
        kinds.learn(await stand.broker.workers())
        cold = failure_of(await stand.ask("c", timeout=2.0))
        assert cold.code == errors.NO_WORKERS
        assert cold.retry_after == pytest.approx(LOAD, abs=0.1), "as long as loads have been seen to take"
        kinds.learn(await stand.broker.workers())
        loading = failure_of(await stand.ask("c", timeout=2.0))
        assert 1.0 <= (loading.retry_after or 0.0) <= LOAD, "what is left of the load that is under way"
        assert kinds.in_time("a", loading) is loading, "one that is loaded has no load to wait for"


@pytest.mark.parametrize(("room", "on"), [(1, {"a", "b", "c"}), (2, {"ab", "ac"})])
async def test_hosts_that_start_together_begin_with_different_models(room: int, on: set[str], clock: Clock) -> None:
    one = Stand(clock, "abc", 1, room)
    two = Stand(clock, "abc", 1, room, beside=one)
    three = Stand(clock, "abc", 1, room, beside=two)
    hosts = one, two, three
    await asyncio.gather(*(host.pool.start() for host in hosts))
    assert clock() >= LOAD
    assert {host.on[0] for host in hosts} == on
    await asyncio.gather(*(host.pool.stop() for host in hosts))


async def test_a_host_that_starts_a_model_anew_for_ever_does_not_keep_others_from_loading_it(clock: Clock) -> None:
    async with Stand(clock, "ab", 1, 1) as stand:
        assert stand.on == ["a"]

        async def start_on() -> None:
            for number in itertools.count():
                loading = number % 4 * LOAD / 4
                status = WorkerStatus.STARTING
                await stand.broker.heartbeat(
                    WorkerInfo(worker_id="alone/gpu-0", model="b", status=status, loading=loading)
                )
                await asyncio.sleep(LOAD / 4)

        starting, begun = asyncio.ensure_future(start_on()), clock()
        assert (await stand.ask("b")).output == "X"
        assert clock() - begun >= LEAST_OVERDUE, "it was waited for as long as it might have come"
        starting.cancel()


async def test_the_fleet_knows_the_models_that_are_cold_before_their_host_is_ready(clock: Clock) -> None:
    stand = Stand(clock, "abc", 1, 1)
    starting = asyncio.ensure_future(stand.pool.start())
    await asyncio.sleep(LOAD / 2)
    assert await stand.statuses() == {
        "a/gpu-0": WorkerStatus.STARTING,
        "b/gpu-0": WorkerStatus.COLD,
        "c/gpu-0": WorkerStatus.COLD,
    }
    await starting
    await stand.pool.stop()
    assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}


async def _asked_of(stand: Stand, model: str, version: str = "") -> str:
    """Return the version that answers a request, once the gateway knows the current workers."""
    workers = await stand.broker.workers()
    stand.gateway.served.learn(workers)
    reply = await stand.ask(model, version=version)
    assert reply.ran is not None, reply.failure
    return reply.ran.version


async def test_a_cold_version_is_loaded_when_it_is_named_and_not_for_what_another_version_answers(clock: Clock) -> None:
    one = Stand(clock, "ab", 1, 1, version="1")
    async with one, Stand(clock, "a", 1, 1, beside=one, version="2") as two:
        assert (one.on, two.on) == (["a"], ["a"])
        assert await _asked_of(one, "b", "1") == "1"
        assert one.on == ["b"], "a of version 1 made room"
        flood = [asyncio.ensure_future(_asked_of(one, "a", "2")) for _ in range(100)]
        await asyncio.sleep(3 * LOAD)
        assert one.on == ["b"], "a host loaded a version that none of these requests is for"
        assert set(await asyncio.gather(*flood)) == {"2"}
        assert await _asked_of(one, "a", "1") == "1"


async def test_a_cold_version_gets_its_weight(clock: Clock) -> None:
    one = Stand(clock, "ab", 1, 1, version="1")
    async with one, Stand(clock, "a", 1, 1, beside=one, version="2"):
        assert await _asked_of(one, "b", "1") == "1"
        assert (await one.statuses())["a/gpu-0"] is WorkerStatus.COLD
        one.gateway.served.weigh({"": read_weights("1=3,2=1")})  # The random number 0.5 picks the first of them.
        assert await _asked_of(one, "a") == "1"


async def test_a_shared_gpu_that_is_never_idle_helps_a_version_that_has_left(clock: Clock) -> None:
    one = Stand(clock, "ab", 1, 2, version="1")
    async with one, Stand(clock, "a", 1, 1, beside=one, version="2") as two:
        watcher = StrayWatcher(lambda: (each.claims for each in one.pool.batchers), one.broker, clock)
        workers = await one.broker.workers()
        one.gateway.served.learn(workers)
        one.gateway.served.weigh({"": read_weights("2=1")})
        waiting = [one.asking("a") for _ in range(20)]
        await asyncio.sleep(0)
        await two.pool.wind_down()
        one.gateway.served.weigh({"": read_weights("1=1")})
        flood = [one.asking(model) for model in "ab" for _ in range(200)]
        await asyncio.sleep(BATCH / 2)
        await watcher.look()
        versions = [reply.ran.version for reply in await asyncio.gather(*waiting) if reply.ran is not None]
        assert versions[-8:] == ["1"] * 8, "what waited for the version that has left was answered by the other"
        assert not [one for one in flood if one.cancelled()]
        assert sum(not one.done() for one in flood) > 100, "it was helped while the GPU was in demand"
        await asyncio.gather(*flood)


HANGS = 3600.0


def status(stand: Stand, worker: str) -> WorkerStatus | None:
    told = stand.broker._workers.get(worker)
    return told.status if told is not None else None


def retry_in(stand: Stand, worker: str) -> float:
    return stand.broker._workers[worker].retry_in


async def line(stand: Stand, worker: str) -> WorkerInfo:
    return next(one for one in await stand.broker.workers() if one.worker_id == worker)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(BATCH)
    raise AssertionError("it never holds")


async def refused(stand: Stand, model: str, patience: float) -> Failure | None:
    stand.gateway.served.learn(await stand.broker.workers())
    return (await stand.ask(model, timeout=patience)).failure


async def test_a_load_that_hangs_shows_its_age_and_makes_room_for_another_model_that_is_asked_for(clock: Clock) -> None:
    async with Stand(clock, "abcd", 1, 2, a=1) as stand:
        stand.loads["c"] = HANGS
        hung = stand.asking("c", timeout=50.0)
        await until(lambda: "c" in stand.on[0])
        begun = clock()
        other = stand.asking("d")
        while clock() - begun < LEAST_OVERDUE - 2.0:
            assert await stand.latency("a") <= 2 * BATCH + 1e-6, "what is warm serves on"
        loading = await line(stand, "c/gpu-0")
        assert loading.status is WorkerStatus.STARTING
        assert 15.0 < loading.loading <= LEAST_OVERDUE
        assert loading.reason == f"has been loading for {loading.loading:.0f} s"
        assert (await other).output == "X"
        assert LEAST_OVERDUE - 1.0 <= clock() - begun <= LEAST_OVERDUE + LOAD + 2.0
        assert stand.on == ["ad"]
        failed = await line(stand, "c/gpu-0")
        assert failed.status is WorkerStatus.FAILED
        assert failed.reason.startswith(
            "its load was given up after 30 s because d needed its place; it is tried again"
        )
        assert (await hung).failure is not None


async def test_a_model_that_does_not_load_is_shown_as_failed_with_the_reason_until_it_loads(clock: Clock) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        ready = Readiness(stand.broker, lambda: False, stand.pool.slots, needs_own=True)
        stand.broken.add(("c", 0))
        cold = stand.asking("c")
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


async def test_a_model_that_failed_on_one_gpu_and_loads_on_another_is_failed_no_more(clock: Clock) -> None:
    async with Stand(clock, "abc", 2, 1) as stand:
        stand.broken |= {("a", 0), ("b", 1), ("c", 1)}
        stand.backends["b", 1][0].dead.set()
        await until(lambda: stand.on == ["a", ""])
        cold = stand.asking("c")
        await until(lambda: status(stand, "c/gpu-1") is WorkerStatus.FAILED)
        assert "c/gpu-1" in stand.pool.slots, "it counts as missing"
        stand.backends["a", 0][0].dead.set()
        assert (await cold).output == "X"
        assert stand.on == ["c", ""]
        await asyncio.sleep(1.0)
        statuses = await stand.statuses()
        assert (statuses["c/gpu-0"], statuses["c/gpu-1"]) == (WorkerStatus.HEALTHY, WorkerStatus.COLD)
        assert "c/gpu-1" not in stand.pool.slots


async def test_requests_for_a_failed_model_are_refused_at_once_where_a_retry_is_too_late(clock: Clock) -> None:
    async with Stand(clock, "abc", 1, 2) as stand:
        stand.broken.add(("c", 0))
        patient = stand.asking("c")
        await until(lambda: status(stand, "c/gpu-0") is WorkerStatus.FAILED and retry_in(stand, "c/gpu-0") >= 4.0)
        begun = clock()
        failure = await refused(stand, "c", 2.0)
        assert failure is not None and failure.code == errors.NO_WORKERS
        assert failure.message.startswith("the model 'c' failed to load, and is tried again in ")
        assert (failure.retry_after or 0.0) > 2.0
        assert clock() == begun, "at once"
        stand.broken.clear()
        assert (await stand.ask("c")).output == "X", "who has time waits"
        assert (await patient).output == "X"
        assert await refused(stand, "c", 2.0) is None


async def test_a_reload_tells_the_code_of_what_is_not_loaded(clock: Clock) -> None:
    async with Stand(clock, "ab", 1, 1) as stand:
        assert await stand.told("b") == (WorkerStatus.COLD, "old")
        stand.codes["b"] = "new"
        await stand.pool.replace()
        assert await stand.told("b") == (WorkerStatus.COLD, "new")
        stand.codes["b"] = "newer"  # Nothing is notified: loading the model reads it.
        await stand.ask("b")
        assert await stand.told("b") == (WorkerStatus.HEALTHY, "newer")
        assert await stand.told("a") == (WorkerStatus.COLD, "old")
        await stand.ask("a")
        for _ in range(2):  # The batcher reports first.
            assert await stand.told("b") == (WorkerStatus.COLD, "newer")
            await asyncio.sleep(3.0)
        await asyncio.sleep(14.0)
        await stand.pool.replace()
        assert await stand.latency("b") < LOAD + 2 * CHECK_LOADS_EVERY + BATCH, "what is loaded stays no longer for it"


async def test_changed_code_of_what_did_not_load_is_only_cold(clock: Clock) -> None:
    async with Stand(clock, "ab", 1, 1) as stand:
        stand.broken.add(("b", 0))
        assert (await stand.ask("b", timeout=20.0)).failure is not None
        await asyncio.sleep(60.0)  # No more requests for it arrive.
        assert (await stand.told("b"))[0] is WorkerStatus.FAILED
        stand.broken.clear()
        stand.codes["b"] = "new"
        await stand.pool.replace()
        assert await stand.told("b") == (WorkerStatus.COLD, "new")
        assert (await stand.ask("b")).output == "X"

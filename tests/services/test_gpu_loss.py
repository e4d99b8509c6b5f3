"""Lost GPUs, and GPUs that are short of memory: what happens to their workers and batches."""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace
from structlog.testing import capture_logs

from headway.errors import BatchRaised, WorkerCrashed
from headway.model import Entry, ItemResult, WorkerStatus
from tests.services.fake_backend import FakeBackend
from tests.services.fake_gpu import LOST, FakeGpu
from tests.services.stand import Stand
from tests.virtual_time import Clock

REASON = f"its GPU is lost: {LOST}"
BEAT = 1.5
"""Seconds within which a heartbeat comes, whether the slot rests or not."""


class Child(FakeBackend):
    """A fake backend with a process. When the process is stopped, its batch fails."""

    def __init__(self, seconds: float = 0.1) -> None:
        super().__init__(seconds)
        self.killed = asyncio.Event()

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        running = asyncio.ensure_future(super().run(entries, timeout))
        killed = asyncio.ensure_future(self.killed.wait())
        await asyncio.wait({running, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if not running.done():
            running.cancel()
            raise WorkerCrashed("its process was stopped")
        return running.result()

    async def stop(self) -> None:
        await super().stop()
        self.killed.set()


async def told(stand: Stand) -> dict[str, tuple[WorkerStatus, str]]:
    return {one.worker_id: (one.status, one.reason) for one in await stand.broker.workers()}


async def test_a_worker_at_rest_whose_gpu_is_lost_is_taken_out_and_stays_out(clock: Clock) -> None:
    backends, gpus = (Child(), Child()), (FakeGpu(), FakeGpu())
    with capture_logs() as logs:
        async with Stand(clock, *backends, gpus=gpus) as stand:
            gpus[0].lose()
            await asyncio.sleep(BEAT)
            assert await told(stand) == {"gpu-0": (WorkerStatus.DEGRADED, REASON), "gpu-1": (WorkerStatus.HEALTHY, "")}
            assert (backends[0].stops, backends[0].starts) == (1, 1)
            for number in range(20):
                assert (await stand.ask(f"{number}")).output == f"{number}"
            assert backends[0].batches == []
            await stand.pool.replace()
            await asyncio.sleep(60.0)
            assert (await told(stand))["gpu-0"] == (WorkerStatus.DEGRADED, REASON)
            assert (backends[0].starts, backends[1].starts) == (1, 2), "a reload leaves it alone"
    assert (await told(stand))["gpu-0"] == (WorkerStatus.OFFLINE, ""), "it ends with its process"
    [line] = [line for line in logs if line["event"] == "worker is taken out of service"]
    assert (line["worker"], line["reason"], line["gpu"], line["log_level"]) == ("gpu-0", REASON, "GPU-aa01", "error")


async def test_what_runs_when_a_gpu_is_lost_is_given_back_and_runs_elsewhere_soon(clock: Clock) -> None:
    backends, gpus = (Child(2.5), Child(2.5)), (FakeGpu(), FakeGpu())
    async with Stand(clock, *backends, gpus=gpus, gpu_timeout_ms=10_000, request_timeout_ms=30_000) as stand:
        asked = asyncio.ensure_future(stand.ask("held", timeout=30.0))
        await asyncio.sleep(0.1)
        [lost] = [number for number, backend in enumerate(backends) if backend.busy]
        begun = clock()
        gpus[lost].lose()
        reply = await asked
        assert (reply.output, reply.attempts) == ("HELD", 2)
        assert clock() - begun < BEAT + 2.5
        assert stand.counters.broker.retries == {"lease_lost": 1}
        assert await stand.dead.list() == []


async def test_inputs_are_not_blamed_for_a_gpu_whose_loss_was_not_read_yet(clock: Clock) -> None:
    """Each batch fails immediately on that GPU, long before the next heartbeat."""
    gpus = FakeGpu(), FakeGpu()

    def raised(entries: Sequence[Entry]) -> BatchRaised | None:
        return BatchRaised("CUDA error: unknown") if gpus[0].now.lost else None

    bad, good = FakeBackend(0.001, raised), FakeBackend(0.001)
    async with Stand(clock, bad, good, gpus=gpus) as stand:
        gpus[0].lose(read=False)
        replies = await asyncio.gather(*(stand.ask(f"x{number}", timeout=3.0) for number in range(40)))
        assert {reply.output for reply in replies} == {f"X{number}" for number in range(40)}
        assert await stand.dead.list() == []
        assert len(bad.batches) <= 1
        assert set(stand.counters.broker.retries) <= {"lease_lost"}


async def test_a_batch_that_fails_with_a_gpu_error_has_its_worker_probed_first(clock: Clock) -> None:
    """After most Xid errors, every CUDA call in the process fails, so a good input would be blamed."""
    gpu, poisoned = FakeGpu(), False

    def run(entries: Sequence[Entry]) -> BatchRaised | None:
        nonlocal poisoned
        if backend.starts == starts and poisoned:
            return BatchRaised("CUDA error: an illegal memory access was encountered")
        if entries[0].input == "poison":
            poisoned, gpu.now = True, replace(gpu.now, xids={31: gpu.now.xids.get(31, 0) + 1})
            return BatchRaised("CUDA error: an illegal memory access was encountered")
        return None

    backend = FakeBackend(0.01, run)
    async with Stand(clock, backend, gpus=[gpu]) as stand:
        starts = backend.starts
        reply = asyncio.ensure_future(stand.ask("poison", timeout=3.0))
        await asyncio.sleep(0.015)
        assert poisoned
        assert (await stand.ask("fine", timeout=3.0)).failure is None
        assert (await reply).failure is not None
        assert len(await stand.dead.list()) == 1


async def test_an_error_that_the_gpu_reported_earlier_has_the_worker_probed_once(clock: Clock) -> None:
    gpu = FakeGpu()
    backend = FakeBackend(0.01, lambda entries: BatchRaised("no") if "bad" in str(entries[0].input) else None)
    async with Stand(clock, backend, gpus=[gpu]) as stand:
        gpu.read = gpu.now = replace(gpu.now, xids={94: 1})
        await asyncio.sleep(BEAT)
        assert backend.batches == []
        for bad in range(2):
            assert (await stand.ask(f"bad {bad}", timeout=3.0)).failure is not None
        assert backend.starts == 1
        assert sum("bad" not in batch[0] for batch in backend.batches) == 1


async def test_a_start_that_a_lost_gpu_holds_up_is_given_up(clock: Clock) -> None:
    backend, gpu = FakeBackend(0.01), FakeGpu()
    async with Stand(clock, backend, gpus=[gpu]) as stand:
        backend.start_seconds = 600.0
        backend.dead.set()
        await asyncio.sleep(BEAT)
        gpu.lose()
        await asyncio.sleep(BEAT)
        assert await told(stand) == {"gpu-0": (WorkerStatus.DEGRADED, REASON)}


async def test_each_start_of_a_worker_is_told_to_its_gpu_and_its_figures_to_the_broker(clock: Clock) -> None:
    backend, gpu = FakeBackend(0.01), FakeGpu()
    async with Stand(clock, backend, gpus=[gpu]) as stand:
        assert gpu.loads == 1
        backend.dead.set()
        await asyncio.sleep(BEAT)
        assert (gpu.loads, backend.starts) == (2, 2)
        [worker] = await stand.broker.workers()
        assert worker.gpu_figures == gpu.read


async def test_each_xid_error_is_logged_once(clock: Clock) -> None:
    gpu = FakeGpu()
    with capture_logs() as logs:
        async with Stand(clock, FakeBackend(0.01), gpus=[gpu]):
            gpu.read = gpu.now = replace(gpu.now, xids={94: 1})
            await asyncio.sleep(2 * BEAT)
            gpu.read = gpu.now = replace(gpu.now, xids={94: 1, 31: 2})
            await asyncio.sleep(2 * BEAT)
    assert [line["xids"] for line in logs if line["event"] == "the GPU reports errors"] == ["94", "31"]

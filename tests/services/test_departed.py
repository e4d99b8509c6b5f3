"""How processes and workers have ended is known for minutes, each told apart from the others."""

import asyncio
import contextlib

from headway.core.health import OFFLINE_AFTER
from headway.errors import BatchTimeout, TargetError, WorkerCrashed
from headway.model import Drain, EndKind
from tests.services.fake_backend import FakeBackend
from tests.services.roles import Fleets
from tests.services.stand import Stand
from tests.virtual_time import Clock


async def endings(fleets: Fleets) -> dict[str, tuple[EndKind, str]]:
    return {one.id: (one.ending, one.reason) for one in await fleets.fleet.departed()}


async def test_a_process_that_says_goodbye_says_why_and_whether_it_was_drained(fleets: Fleets) -> None:
    told, drained = fleets.worker("told", FakeBackend()), fleets.worker("drained", FakeBackend(), FakeBackend())
    for service in (told, drained):
        await service.start()
    await fleets.fleet.drain([Drain(name=f"drained/gpu-{n}", process="drained", host="here") for n in range(2)])
    await asyncio.sleep(1.1)
    for service in (told, drained):
        service.ends("told to by SIGTERM")
        await service.drain()
        await service.stop()
    assert await endings(fleets) == {
        "told": (EndKind.STOPPED, "told to by SIGTERM"),
        "drained": (EndKind.DRAINED, "told to by SIGTERM"),
    }
    assert not await fleets.fleet.drains()


async def test_a_process_that_does_not_start_says_why(fleets: Fleets) -> None:
    broken = FakeBackend()
    broken.refuse_start, broken.refusal = 9, TargetError("no module named torch")
    worker = fleets.worker("broken", broken)
    with contextlib.suppress(TargetError):
        await worker.start()
    assert await endings(fleets) == {"broken": (EndKind.STOPPED, "did not start: no module named torch")}


async def test_a_process_without_a_goodbye_is_lost_until_it_is_back(fleets: Fleets) -> None:
    worker = fleets.worker("lost", FakeBackend())
    await worker.start()
    await worker._membership._periodic.stop()  # type: ignore[union-attr]  # As if it were killed.
    await asyncio.sleep(OFFLINE_AFTER + 1.0)
    ending, reason = (await endings(fleets))["lost"]
    assert ending is EndKind.LOST
    assert reason.startswith("nothing was heard of it for 10 s")


async def test_a_worker_whose_process_is_killed_is_told_with_the_reason(clock: Clock) -> None:
    fates = [BatchTimeout("worker gpu-0: its batch took longer than 3 s; it was killed", "late")]
    slow = FakeBackend(script=lambda entries: fates.pop() if fates else None)
    crash = FakeBackend(script=lambda entries: WorkerCrashed("worker gpu-1 died of SIGKILL", "died"))
    async with Stand(clock, slow, crash, slots=1) as stand:
        await stand.asking("a")
        await asyncio.sleep(1.1)
        [gone] = await stand.fleet.departed()
        assert (gone.id, gone.ending) == ("gpu-0", EndKind.KILLED)
        assert gone.reason == "worker gpu-0: its batch took longer than 3 s; it was killed"

"""Several versions of one model: which one answers, what is refused, and what happens when a version leaves."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, Self

import msgspec
import pytest

from headway import errors
from headway.config import Settings
from headway.core.health import DEGRADED_AFTER, UNKNOWN_FOR
from headway.core.versions import read_weights
from headway.errors import TargetError
from headway.gateway.pending import SeveralInputs
from headway.gateway.served_model import VersionChoice
from headway.model import Entry, ModelReport, Reply, RequestOptions, Slot, WorkerInfo, WorkerStatus
from headway.worker.batcher import Batcher
from headway.worker.helping import COMES_BACK, StrayWatcher
from headway.worker.pool import WorkerPool
from tests.core.test_versions import worker
from tests.services.calls import failure_of, several
from tests.services.fake_backend import FakeBackend
from tests.services.site import Site, make_batcher
from tests.services.stand import Stand
from tests.virtual_time import Clock


class Rollout(Site):
    """A gateway, and a slot for each version of a model."""

    def __init__(self, clock: Clock, *versions: str, **settings: Any) -> None:
        super().__init__(clock, model="m", rng=random.Random(3).random, **settings)
        self.backends = dict[str, FakeBackend]()
        self.of_versions = {version: self._pool_of(version) for version in versions}
        self.pools = self.of_versions.values()
        self.strays = StrayWatcher(
            lambda: [one.claims for pool in self.of_versions.values() for one in pool.batchers], self.broker, clock
        )

    def _pool_of(self, version: str) -> WorkerPool:
        backend = self.backends[version] = FakeBackend(0.1)
        slot = Slot(f"gpu-{version}", "m", 8, 0, ModelReport(version), version)
        return WorkerPool(lambda number: self.batcher(slot, lambda: backend), 1, 1)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self.look()
        return self

    async def come_up(self, version: str) -> None:
        """Start a slot with another version, which nothing else knows about yet."""
        self.of_versions[version] = pool = self._pool_of(version)
        await pool.start()
        pool.run(self.supervisor)

    async def look(self) -> None:
        """Tell the gateway about the workers, and the workers about the queues that nobody serves."""
        workers = await self.broker.workers()
        self.gateway.served.learn(workers)
        await self.strays.look()

    async def versions(self, count: int, **options: Any) -> Counter[str]:
        found: Counter[str] = Counter()
        while count > 0:
            part = min(count, 16)
            replies = await asyncio.gather(*(self.ask("m", str(count - number), **options) for number in range(part)))
            assert not [reply.failure for reply in replies if reply.failure]
            found.update(reply.ran.version for reply in replies if reply.ran is not None)
            count -= part
        return found


async def test_versions_answer_as_their_weights_say_until_one_drains(clock: Clock) -> None:
    async with Rollout(clock, "3", "4", version_weights="3=95,4=5") as rollout:
        assert await rollout.versions(32, version="4") == {"4": 32}
        assert (await rollout.versions(1600))["4"] == pytest.approx(80, abs=30)
        waiting = [rollout.asking("m", str(number)) for number in range(24)]
        await asyncio.sleep(0)
        rollout.gateway.served.weigh({"": read_weights("3=0,4=100")})
        assert await rollout.versions(64) == {"4": 64}
        answered = Counter(reply.ran.version for reply in await asyncio.gather(*waiting) if reply.ran is not None)
        assert answered["3"] > 12, "what waited for it when its weight fell to 0 still ran"
        await rollout.of_versions["3"].wind_down()
        await rollout.look()
        assert await rollout.versions(64) == {"4": 64}


@pytest.mark.parametrize("weights", ["", "3=1,4=0"])
async def test_an_unknown_or_draining_version_is_refused_with_those_there(weights: str, clock: Clock) -> None:
    async with Rollout(clock, "3", "4", version_weights=weights) as rollout:
        for version in ("9", *(("4",) if weights else ())):
            failure = failure_of(await rollout.ask(version=version))
            assert failure.code == errors.NOT_FOUND
            there = "3" if weights else "3, 4"
            assert failure.message.endswith(f"has no version '{version}' that takes requests; available: {there}")


async def test_a_version_whose_workers_the_registry_has_lost_is_not_known_for_a_while(clock: Clock) -> None:
    async with Rollout(clock, "3", "4") as rollout:

        async def refusal(*there: str, status: WorkerStatus = WorkerStatus.HEALTHY) -> tuple[str, float | None]:
            """Return the code and retry delay of a request for version 4 while the registry lists `there`."""
            workers = [one for one in known if one.version in there]
            gone = [msgspec.structs.replace(one, status=status) for one in workers if one.version == "4"]
            workers = [*(one for one in workers if one.version != "4"), *gone]
            rollout.gateway.served.learn(workers)
            by_path = rollout.gateway.served.refusal("m", "4")
            failure = (await rollout.ask(version="4")).failure
            assert failure == by_path
            return ("", None) if failure is None else (failure.code, failure.retry_after)

        known = await rollout.broker.workers()
        assert await refusal("3", "4") == await refusal() == ("", None), "of an empty registry the last one holds"
        assert await refusal("3") == (errors.NO_WORKERS, 1.0)
        await asyncio.sleep(UNKNOWN_FOR / 2)
        assert await refusal("3") == (errors.NO_WORKERS, 1.0)
        assert await refusal("3", "4") == ("", None)
        assert await refusal("3") == (errors.NO_WORKERS, 1.0)
        await asyncio.sleep(UNKNOWN_FOR + 1.0)
        assert await refusal("3") == (errors.NOT_FOUND, None)
        assert await refusal("3", "4") == ("", None)
        assert await refusal("3", "4", status=WorkerStatus.OFFLINE) == (errors.NOT_FOUND, None)
        assert await refusal("3") == (errors.NOT_FOUND, None), "its worker has said that it leaves"


def test_a_new_gateway_that_finds_only_workers_that_left_lets_nothing_in_that_names_a_version() -> None:
    """The request would wait in a queue that any worker serves, and the next worker may run another version."""
    for runs in ("3", "1"):  # The workers have reported the version in the settings, or haven't.
        choice = VersionChoice(runs, {}, lambda: 0.5)
        for there in ([worker("3", WorkerStatus.OFFLINE)], [], [worker("4")]):
            choice.learn(there)
            failure = choice.refusal("m", "3", in_doubt=False)
            assert failure is not None
            assert failure.code == errors.NOT_FOUND
        assert choice.version("t", "id", RequestOptions(1.0), None) == "4"
    unversioned = VersionChoice("3", {}, lambda: 0.5)
    unversioned.learn([worker("3", WorkerStatus.OFFLINE), worker("", WorkerStatus.STARTING)])
    assert unversioned.any
    assert unversioned.refusal("m", "3", in_doubt=False) is None


async def test_a_version_is_not_known_while_the_registry_has_not_been_read(clock: Clock) -> None:
    async with Rollout(clock, "3", version_weights="3=1,5=0") as rollout:
        kinds, in_doubt = rollout.gateway.served, True
        kinds.in_doubt = lambda: in_doubt
        for version, code in (("4", errors.NO_WORKERS), ("5", errors.NOT_FOUND), ("3", "")):
            failure = (await rollout.ask(version=version)).failure
            assert failure == kinds.refusal("m", version)
            assert ("" if failure is None else failure.code) == code, version
        in_doubt = False
        failure = kinds.refusal("m", "4")
        assert failure is not None
        assert failure.code == errors.NOT_FOUND


async def test_what_waits_for_a_version_that_has_left_is_run_by_another_unless_it_is_pinned(clock: Clock) -> None:
    async with Rollout(clock, "3", "4", version_weights="3=1") as rollout:
        free = [rollout.asking("m", f"free {number}") for number in range(20)]
        pinned = rollout.asking("m", "pinned", version="3")
        await asyncio.sleep(0.05)
        await rollout.of_versions["3"].wind_down()
        await rollout.look()
        replies = await asyncio.gather(*free)
        assert {reply.failure for reply in replies} == {None}
        assert {reply.ran.version for reply in replies if reply.ran is not None} == {"3", "4"}
        failure = failure_of(await pinned)
        assert (failure.code, failure.message) == (
            errors.NO_WORKERS, "no worker runs version '3' of the model any more",
        )  # fmt: skip
        assert all("pinned" not in batch for batch in rollout.backends["4"].batches)
        assert await rollout.broker._dead.count() == 0


async def test_a_slot_that_helps_is_woken_for_its_own_version_afterwards(clock: Clock) -> None:
    async with Rollout(clock, "3", "4") as rollout:
        await rollout.of_versions["3"].wind_down()
        lost = rollout.asking("m", "lost", version="3")
        await asyncio.sleep(0.01)
        rollout.gateway.served.learn(await rollout.broker.workers())
        await rollout.strays.look()
        assert (await lost).failure is not None
        for _ in range(3):
            begun = clock()
            assert (await rollout.ask(version="4")).failure is None
            assert clock() - begun == pytest.approx(0.1, abs=0.02)
            await asyncio.sleep(1.0)


@pytest.mark.parametrize(
    ("status", "age", "later", "helped"),
    [
        (WorkerStatus.STARTING, 0.0, 1.0, False),
        (WorkerStatus.DEGRADED, 0.0, 1.0, False),
        (WorkerStatus.STARTING, 0.0, COMES_BACK + 0.1, True),
        (WorkerStatus.DEGRADED, DEGRADED_AFTER, 1.0, True),
        (WorkerStatus.OFFLINE, 0.0, 1.0, True),
        (WorkerStatus.FAILED, 0.0, 1.0, True),
    ],
    ids=["starts anew", "rests", "starts for long", "is silent", "has left", "does not load"],
)
async def test_a_worker_that_comes_back_has_not_left(
    status: WorkerStatus, age: float, later: float, helped: bool, clock: Clock
) -> None:
    async with Rollout(clock, "4") as rollout:
        for become in (WorkerStatus.HEALTHY, status):
            there = WorkerInfo(worker_id="gpu-3", model="m", status=become, version="3")
            await rollout.broker.heartbeat(there)
            await asyncio.sleep(0.0 if become is WorkerStatus.HEALTHY else age)
            await rollout.strays.look()
            if become is WorkerStatus.HEALTHY:
                await asyncio.sleep(later)
                entry = Entry("x", "m", "x", 0, "acme", "g", 60.0, 60.0, version="3", pinned=True)
                assert list(await rollout.broker.enqueue([entry])) == [None]
        await asyncio.sleep(0.01)
        assert sum(depth.depth for depth in await rollout.broker.depths()) == (not helped)


@pytest.mark.parametrize("pinned", ["", "3"])
async def test_all_inputs_go_to_the_version_of_the_first_as_weights_change(pinned: str, clock: Clock) -> None:
    async with Rollout(clock, "3", "4", version_weights="3=1,4=0") as rollout:
        _, ended = several(rollout.gateway, list("abc"), options=RequestOptions(4.0, key="k", version=pinned))
        rollout.gateway.served.weigh({"": read_weights("3=0,4=1")})
        replies = await ended
        assert [reply.output for reply in replies] == list("ABC")
        assert {reply.ran.version for reply in replies if reply.ran is not None} == {"3"}


async def test_before_any_worker_is_known_a_list_goes_to_one_queue_and_what_names_a_version_to_no_other(
    clock: Clock,
) -> None:
    async with Rollout(clock) as rollout:
        inputs = SeveralInputs("id", list("ab"), b"")
        versions = rollout.gateway.served["m"].versions
        first = versions.version("t", "id", RequestOptions(4.0), inputs)
        named = rollout.asking(version=Settings.model_version)
        await asyncio.sleep(0.01)
        await rollout.come_up("3")
        await rollout.look()
        assert versions.version("t", "other", RequestOptions(4.0), None) == "3"
        assert versions.version("t", "second", RequestOptions(4.0), inputs) == first == ""
        assert failure_of(await named).code == errors.NO_WORKERS
        assert not rollout.backends["3"].batches


async def test_names_of_unknown_models_and_versions_are_not_kept(clock: Clock) -> None:
    async with Rollout(clock, "3", "4") as rollout:
        gateway = rollout.gateway
        await rollout.versions(16)

        def known() -> list[object]:
            counters = gateway.counters
            return [
                set(gateway.served), set(gateway.limiter.throttles), set(rollout.broker._queues),
                {(model, tier) for model, tier, _ in counters.requests}, len(gateway._recent._last), gateway.pending,
            ]  # fmt: skip

        await rollout.ask(version="none")
        before = known()
        for number in range(100):
            for model in ("m", f"strange-{number}"):
                assert failure_of(await rollout.ask(model, version=f"v{number}")).code == errors.NOT_FOUND
            if number == 0:
                before = known()
        assert known() == before


LOADS = 2.0


class Changing(Stand):
    """A stand whose slots read what they run from `code`, and which shares answers to identical requests."""

    def __init__(self, clock: Clock, *backends: FakeBackend) -> None:
        self.code = "old"
        super().__init__(clock, *backends, cache=True, collapse=True, gpu_timeout_ms=30_000, request_timeout_ms=60_000)

    def _batcher(self, index: int) -> Batcher:
        async def read() -> ModelReport:
            return ModelReport("", self.code)

        backend = self.backends[index]
        backend.start_seconds = LOADS
        slot = Slot(f"gpu-{index}", "m", 8)
        return make_batcher(
            slot, lambda: backend, self.broker, self.counters.worker, self._clock, gpu_timeout=30.0, read_report=read
        )

    async def told(self) -> list[str]:
        return [one.runs.target for one in await self.broker.workers()]


def of(reply: Reply) -> tuple[str, bool]:
    assert reply.ran is not None
    return reply.ran.target, reply.kept


async def test_a_reload_tells_the_code_of_its_slots_when_all_have_it_or_when_it_fails(clock: Clock) -> None:
    async with Changing(clock, FakeBackend(), FakeBackend()) as stand:
        assert of(await stand.ask("a")) == ("old", False)
        stand.code = "new"
        reloading = asyncio.ensure_future(stand.service.replace_workers())
        await asyncio.sleep(1.75 * LOADS)
        assert await stand.told() == ["old", "old"]
        assert of(await stand.ask("a")) == ("old", True)
        await reloading
        assert await stand.told() == ["new", "new"]
        assert of(await stand.ask("a")) == ("new", False)
        assert of(await stand.ask("a")) == ("new", True)
        stand.code, stand.backends[1].refuse_start = "newer", 1
        with pytest.raises(TargetError):
            await stand.service.replace_workers()
        assert await stand.told() == ["newer", "new"], "what each slot runs"
        stand.backends[1].dead.set()
        await asyncio.sleep(LOADS + 1.0)
        assert await stand.told() == ["newer", "newer"], "a process that starts anew tells what it has loaded"

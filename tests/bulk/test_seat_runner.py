"""The runner of bulk lines: each ends once, and bad ones fail alone, whatever happens to batches and the broker."""

import asyncio
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence

import pytest

from headway import errors
from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.bulk import seat_runner
from headway.bulk.seat_runner import SeatRunner
from headway.config import Settings
from headway.core import failures, suspects
from headway.core.bulk import QUIET
from headway.core.policies import build
from headway.core.queue_limits import QueueLimits
from headway.core.suspects import CLEAN, LEAST_REST
from headway.gateway.input_gate import InputGate
from headway.gateway.served_models import ServedModels
from headway.model import (
    MOST_OUTPUT,
    BatchFailure,
    BulkDepth,
    Cause,
    Entry,
    Failure,
    ItemResult,
    Lease,
    Reply,
    Slot,
    WorkerInfo,
    WorkerStatus,
)
from headway.model.bulk import BulkLine
from headway.runtime.counters import BULK, ITEM, OK, BrokerCounts, WorkerCounts
from headway.runtime.supervisor import Supervisor
from headway.worker.slot_figures import RunCounts, SlotFigures
from tests.scenes import Played
from tests.virtual_time import run

BATCH = 16


class Play:
    def __init__(self, clock: Callable[[], float], seed: int = 0, gate: InputGate | None = None) -> None:
        self.rng = random.Random(seed)
        counters = BrokerCounts()
        limits = QueueLimits(tiers=1, max_batch=BATCH)
        self.broker = MemoryBroker({"m": limits}, DeadLetterBox(), counters, clock, self.rng.random)
        served = ServedModels(["m"], Settings(max_batch_size=BATCH))
        ids = itertools.count()
        self.runner = SeatRunner(
            self.broker, served, "feeder", 1, gate, clock, self.rng.random, lambda: f"id-{next(ids)}"
        )
        self.supervisor = Supervisor()
        self.ended: dict[tuple[str, int], Reply] = {}
        self.news = asyncio.Event()
        self.asked = itertools.count()
        self.batches: list[Lease] = []
        self.cause: Cause = Cause.RAISED
        self.most_output = MOST_OUTPUT
        self.dies: Callable[[Lease], bool] = lambda lease: False

    def worker(self, name: str) -> None:
        self.supervisor.start(name, lambda: self._work(name))

    async def _work(self, name: str) -> None:
        slot, policy = Slot(name, "m", BATCH), build("paced", None)
        await self.broker.heartbeat(WorkerInfo(worker_id=name, model="m", status=WorkerStatus.HEALTHY))
        while True:
            claimed = await self.broker.claim(slot, policy)
            if not isinstance(claimed, Lease):
                await self.broker.wait_for_work(slot, claimed.until)
                continue
            self.batches.append(claimed)
            await asyncio.sleep(0.1)
            bad = any("bad" in str(entry.input) for entry in claimed.entries)
            if self.dies(claimed) or bad:
                await self.broker.release(claimed, BatchFailure(self.cause, "cannot", name))
            else:
                await self.broker.complete(claimed, self._items(claimed))

    def _items(self, lease: Lease) -> list[ItemResult]:
        """Return outputs like a backend. Those of bulk lines that are too large together are left out."""
        items, room = list[ItemResult](), self.most_output
        for entry in lease.entries:
            output = "x" * 100 if "large" in str(entry.input) else "out"
            fits = not entry.tier or len(output) <= room
            room -= len(output) if entry.tier and fits else 0
            items.append(ItemResult(output) if fits else ItemResult(None, crowded=True))
        return items

    async def keep_alive(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for name in ("gpu-0", "gpu-1"):
                await self.broker.heartbeat(WorkerInfo(worker_id=name, model="m", status=WorkerStatus.HEALTHY))
            await self.broker.reap()

    def done(self, line: BulkLine, reply: Reply) -> None:
        assert (line.job, line.number) not in self.ended
        self.ended[line.job, line.number] = reply
        self.news.set()

    async def feed(self, texts: Sequence[str], job: str = "job", tenant: str = "t") -> None:
        lines = [BulkLine(job, tenant, number, "m", "", text) for number, text in enumerate(texts, 1)]
        while lines:
            room = await self.runner.room("m")
            if self.runner.paused("m", tenant):
                await asyncio.sleep(0.05)
                continue
            self.runner.offer(lines[:room], self.done)
            del lines[:room]

    async def ask(self, count: int) -> None:
        for _ in range(count):
            await self.broker.enqueue([Entry(f"asked-{next(self.asked)}", "m", "asked", 0, "other", "g", 60.0, 60.0)])
            await asyncio.sleep(0.05)

    async def until(self, count: int, job: str = "") -> None:
        """Wait until `count` lines have ended, only of `job` if given."""
        async with asyncio.timeout(200_000):
            while sum(job in ("", of) for of, _ in self.ended) < count:
                self.news.clear()
                await self.news.wait()

    def failed(self, job: str = "job") -> set[int]:
        return {number for (of, number), reply in self.ended.items() if of == job and reply.output is None}


def play(script: Callable[[Play], Awaitable[None]], seed: int = 0) -> None:
    async def main(clock: Callable[[], float]) -> None:
        one = Play(clock, seed)
        one.runner.start(one.supervisor)
        one.supervisor.start("beats", one.keep_alive)
        for name in ("gpu-0", "gpu-1"):
            one.worker(name)
        try:
            await script(one)
        finally:
            await one.runner.close()
            await one.supervisor.stop()

    run(main)


@pytest.fixture
def one() -> Played:
    return Played(play)


async def test_a_tenant_of_large_lines_leaves_room_for_others(one: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat_runner, "MOST_BYTES", 6_000)
    sent: Counter[str] = Counter()
    for tenant in ("a", "b", "c"):
        while not one.runner.full(tenant):
            sent[tenant] += 1
            line = BulkLine(f"job-{tenant}", tenant, sent[tenant], "m", "", "x" * 100)
            one.runner.offer([line], one.done)
    assert sent == {"a": 30, "b": 15, "c": 8}
    assert not one.runner.full("d")
    await one.until(sent.total())
    assert not any(map(one.runner.full, sent))


async def test_all_lines_are_answered_in_full_batches(one: Play) -> None:
    await one.feed([f"text {number}" for number in range(500)])
    await one.until(500)
    assert not one.failed()
    assert len(one.batches) <= 500 / BATCH + 2


@pytest.mark.parametrize("cause", [Cause.RAISED, Cause.TIMEOUT])
async def test_bad_lines_end_alone_and_all_others_are_answered(one: Play, cause: Cause) -> None:
    one.cause = cause
    bad = {7, 8, 100, 133}
    await one.feed(["bad" if number in bad else "good" for number in range(1, 161)])
    await one.until(160)
    assert one.failed() == bad
    assert all(one.ended["job", number].failure.reason == cause.value for number in bad)  # type: ignore[union-attr]


async def test_a_tenant_of_bad_lines_costs_the_others_few_batches(one: Play) -> None:
    hit = Counter[tuple[bool, bool]]()

    feeding = asyncio.ensure_future(one.feed(["bad" if number % 20 == 0 else "good" for number in range(600)]))
    await one.ask(2_000)
    for lease in one.batches:
        inputs = [str(entry.input) for entry in lease.entries]
        hit["asked" in inputs, "bad" in inputs] += 1
    assert hit[True, True] <= 3
    assert hit[False, True] > 1
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)


async def test_lines_of_large_outputs_are_answered_mostly_without_riders(
    one: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first, the tenant's lines run separately, as many as fit in a batch, until small ones have come."""
    monkeypatch.setattr(suspects, "MOST_OUTPUT", 450)
    one.most_output = 450
    asking = asyncio.ensure_future(one.ask(400))
    await one.feed(["large"] * 100, "large", "a")
    await one.until(100)
    assert not one.failed("large")
    with_large = [lease for lease in one.batches if "large" in {str(entry.input) for entry in lease.entries}]
    assert sum(not lease.entries[0].tier for lease in with_large) <= 2
    assert max(len(lease.entries) for lease in with_large[4:]) == 4
    await asking
    await one.feed(["small"] * CLEAN, "owed", "a")
    await one.until(CLEAN, "owed")
    asking = asyncio.ensure_future(one.ask(100))
    await one.feed(["small"] * 10 * BATCH, "small", "a")
    await asking
    assert any({"asked", "small"} <= {str(entry.input) for entry in lease.entries} for lease in one.batches)


async def test_lines_that_end_workers_cost_a_small_share_of_them(one: Play) -> None:
    """This holds whether they come first, or after so many good ones that many are queued in the broker."""
    one.cause = Cause.CRASHED
    feeding = asyncio.ensure_future(one.feed([*["good"] * 2_000, *["bad"] * 2_000], tenant="bad"))
    await asyncio.sleep(300.0)
    assert (
        sum(any("bad" in str(entry.input) for entry in lease.entries) for lease in one.batches)
        <= 300.0 / LEAST_REST + 3
    )
    assert one.runner.paused("m", "bad") and not one.runner.paused("m", "t")
    before = len(one.batches)
    await one.feed(["good"] * 100, "other")
    await one.until(100, "other")
    assert len(one.batches) - before <= 100 / BATCH + 5
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)


async def test_a_remote_that_fails_is_waited_for(one: Play) -> None:
    one.cause, one.dies = Cause.REMOTE, lambda lease: True
    feeding = asyncio.ensure_future(one.feed(["good"] * 50))
    await asyncio.sleep(60.0)
    assert not one.ended
    one.dies = lambda lease: False
    await one.until(50)
    await feeding
    assert not one.failed()


async def test_refused_lines_of_a_resting_tenant_rest_too_and_leave_room_for_others(
    one: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, admit, refused = await one.runner.room("m"), one.broker._admit_bulk, set[str]()

    def refuse_once(entry: Entry, now: float) -> Failure | None:
        if entry.input == "late" and entry.id not in refused:
            refused.add(entry.id)
            return failures.enough_bulk()
        return admit(entry, now)

    monkeypatch.setattr(one.broker, "_admit_bulk", refuse_once)
    one.cause, one.dies = Cause.CRASHED, lambda lease: lease.attempt == 1
    await one.feed(["good"])
    await asyncio.sleep(0.05)
    await one.feed(["late"] * 3, "refused")
    await asyncio.sleep(0.5)
    assert refused and len(one.batches) == 1 and one.runner.waits("m", "t") is not None
    assert await one.runner.room("m") == room, "who rests takes no room"
    one.dies = lambda lease: False
    await one.until(4)
    assert not one.failed("refused")


async def test_lines_pause_while_no_worker_of_their_model_is_up(one: Play) -> None:
    assert not one.runner.paused("m")  # Nothing has looked yet.
    up, drained = "no worker of the model is up", "the workers of the model are drained"
    seen = (None, up), (WorkerStatus.STARTING, up), (WorkerStatus.DRAINED, drained), (WorkerStatus.HEALTHY, "")
    for status, paused in seen:
        workers = [] if status is None else [WorkerInfo(worker_id="gpu-0", model="m", status=status)]
        one.runner.learn(workers)
        assert one.runner.paused("m") == paused


async def test_what_is_withdrawn_never_ends(one: Play) -> None:
    one.dies = lambda lease: lease.attempt == 1 and one.rng.random() < 0.5
    await one.feed(["good"] * 200, "first")
    await one.feed(["good"] * 200, "second")
    one.runner.withdraw("first")
    before = sum(job == "first" for job, _ in one.ended)
    await one.until(200, "second")
    assert sum(job == "first" for job, _ in one.ended) == before
    one.runner.withdraw("second")
    one.cause, one.dies = Cause.REMOTE, lambda lease: True
    await one.feed(["good"] * 3, "third")
    one.runner.withdraw("third", [2])
    await asyncio.sleep(5.0)
    one.runner.withdraw("third", [1])
    one.dies = lambda lease: False
    await one.until(1, "third")
    assert [number for job, number in one.ended if job == "third"] == [3]
    assert await one.runner.room("m") > 0


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_each_line_ends_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "LEAST_REST", 0.1)
    monkeypatch.setattr(suspects, "RESTS", 1.0)

    async def script(one: Play) -> None:
        rng = one.rng
        causes = list(Cause)

        def dies(lease: Lease) -> bool:
            one.cause = rng.choice(causes)
            return rng.random() < 0.2

        one.dies = dies
        sent: dict[str, list[str]] = defaultdict(list)
        for job in range(4):
            sent[f"job-{job}"] = [rng.choice([*["good"] * 4, "bad"]) for _ in range(rng.randint(1, 80))]
        await asyncio.gather(*(one.feed(texts, job, rng.choice("ab")) for job, texts in sent.items()))
        await one.until(sum(map(len, sent.values())))
        for name, texts in sent.items():
            bad = {number for number, text in enumerate(texts, 1) if text == "bad"}
            assert bad <= one.failed(name)
            for number in one.failed(name) - bad:
                failure = one.ended[name, number].failure
                assert failure is not None
                assert failure.code in (errors.REJECTED_BY_MODEL, errors.BACKEND_ERROR)

    play(script, seed)


async def test_lines_that_wait_for_a_silence_say_so_and_for_how_long(one: Play) -> None:
    await one.feed(["a"])
    await one.until(1)
    await one.ask(1)
    await asyncio.sleep(1.0)
    [bulk] = [queue.bulk for queue in one.broker._queues.values() if queue.bulk is not None]
    bulk.credit = 0.0
    await one.feed(["a"] * BATCH, "other")
    await one.runner.look()
    assert one.runner.waits("m", "t") is None, "not yet"
    await asyncio.sleep(2.0)
    await one.runner.look()
    found = one.runner.waits("m", "t")
    assert found is not None
    assert "30 seconds without requests" in found[0]
    assert found[1] == pytest.approx(QUIET - 3.0, abs=0.2)
    await one.until(BATCH, "other")
    await one.runner.look()
    assert one.runner.waits("m", "t") is None


@pytest.mark.parametrize(
    ("queue", "words", "until"),
    [
        (BulkDepth("m", 5, 0, held=math.inf), "models share the GPU", math.inf),
        (BulkDepth("m", 5, 0, held=7.0), "there were requests recently", 107.0),
        (BulkDepth("m", 5, 0), "busy with requests", math.inf),
        (BulkDepth("m", 5, 0, busy=1), "", 0.0),
        (BulkDepth("m", 0, 0, held=7.0), "", 0.0),
    ],
)
def test_what_lines_wait_for(queue: BulkDepth, words: str, until: float) -> None:
    found = seat_runner._why_they_wait([queue], 100.0)
    assert (found is None) is (words == "")
    assert found is None or (words in found[0] and found[1] == until)


SLOT = Slot("gpu-0", "m", 8)
CRASHED = BatchFailure(Cause.CRASHED, "gone", "gpu-0")


class Counted:
    """One slot's counts after batches with these numbers of requests and lines."""

    def __init__(self) -> None:
        self.counters, self.figures = WorkerCounts(), SlotFigures(SLOT, lambda: 0.0)
        self.counts = RunCounts(SLOT, self.counters, self.figures, tiers=2)

    def lease(self, requests: int, lines: int) -> Lease:
        tiers = [0] * requests + [2] * lines
        entries = [Entry(f"{at}", "m", "a", tier, "t", "g", 1.0, 1.0) for at, tier in enumerate(tiers)]
        return Lease(1, SLOT, entries, "full", 0.0, 1.0, 1.0)

    @property
    def inputs(self) -> dict[str, int]:
        return {outcome: count for (_, _, outcome), count in self.counters.inputs.items() if count}


def test_lines_that_fail_are_counted_apart() -> None:
    one, bad = Counted(), ItemResult(None, "no")
    one.counts.came_back(one.lease(2, 3), [ItemResult("a"), bad, bad, bad, ItemResult("a")], 0.1)
    assert one.inputs == {OK: 2, ITEM: 1, BULK: 2}
    assert one.figures.failed == pytest.approx(1 / 200)
    one.counts.came_back(one.lease(0, 3), [bad] * 3, 0.1)
    assert one.inputs == {OK: 2, ITEM: 1, BULK: 5}
    fill = one.counters.batch_fill["m"]
    assert sum(fill.counts) == 1 and fill.sum == pytest.approx(2 / 8)


def test_a_batch_that_fails_with_lines_in_it_speaks_against_no_worker() -> None:
    one = Counted()
    for requests, lines in ((2, 3), (0, 3)):
        one.counts.failed(one.lease(requests, lines), CRASHED, 0.5)
        one.counts.killed(one.lease(requests, lines))
    assert one.inputs == {BULK: 8} and one.figures.failed == 0.0
    assert dict(one.counters.wasted_seconds) == {BULK: 1.0}
    assert one.counters.bulk_kills["gpu-0"] == 2
    one.counts.failed(one.lease(2, 0), CRASHED, 0.5)
    one.counts.killed(one.lease(2, 0))
    assert one.inputs == {BULK: 8, Cause.CRASHED.value: 2} and one.figures.failed > 0.0
    assert one.counters.bulk_kills["gpu-0"] == 2


def test_outputs_that_were_left_out_are_no_failures() -> None:
    one = Counted()
    one.counts.came_back(one.lease(3, 0), [ItemResult("a"), ItemResult(None, left_out=9), ItemResult(None, "no")], 0.1)
    assert one.inputs == {OK: 1, ITEM: 1}


def test_of_a_batch_in_several_calls_only_the_inputs_of_the_one_that_raised_count() -> None:
    """The others run again, are no longer suspected, and say nothing about the worker."""
    one = Counted()
    one.counts.failed(one.lease(8, 0), BatchFailure(Cause.RAISED, "no good", "gpu-0", places=(2, 5)), 0.5)
    assert one.inputs == {Cause.RAISED.value: 2}
    assert one.figures.failed == pytest.approx(2 / 200)
    assert sum(one.counters.batch_fill["m"].counts) == 1

"""Due work is done immediately, deadlines are reported in time, and idle processes poll less often than busy ones."""

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from headway.brokers.memory.fleet import MemoryBoard
from headway.controller.controller import LEADS_FOR
from headway.core.health import DEGRADED_AFTER, HEARTBEAT_EVERY, REST_AFTER, REST_EVERY, STANDBY_EVERY, heard
from headway.fleet.board_reporter import PERIOD, BoardReporter
from headway.fleet.pace import RESTS_AFTER, Pace
from headway.gateway.deadlines import DEADLINE_GRAIN, Deadlines
from headway.gateway.pending import NOBODY, Key, PendingRequest, PendingTable
from headway.model import Capacity, Entry, Lease, Principal, ProcessInfo, Role, WorkerInfo, WorkerStatus
from headway.runtime.counters import Counters
from headway.runtime.periodic import Periodic, ending_at_tick, until_tick
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import LeaseKeeper
from tests.contracts.brokers import MemoryHarness, ask
from tests.services.fake_backend import FakeBackend
from tests.services.roles import Fleets, asking
from tests.services.stand import Stand
from tests.virtual_time import Clock


@pytest.fixture
def harness() -> Iterator[MemoryHarness]:
    made = MemoryHarness()
    yield made
    made.close()


async def test_what_is_periodic_wakes_up_together(clock: Clock) -> None:
    seen: dict[float, list[str]] = {}
    supervisor = Supervisor()

    def loop(name: str, every: float) -> Periodic:
        async def act() -> None:
            seen.setdefault(round(clock(), 6), []).append(name)

        return Periodic(name, act, clock, every=every)

    loops = [loop("a", 1.0), loop("b", 0.5), loop("c", 1.0)]
    for number, one in enumerate(loops):
        await asyncio.sleep(0.13 * number)
        one.start(supervisor)
    await asyncio.sleep(4.0)
    begun = 1001.0
    together = {at: sorted(names) for at, names in seen.items() if begun <= at < begun + 2.0}
    assert together == {1001.0: ["a", "b", "c"], 1001.5: ["b"], 1002.0: ["a", "b", "c"], 1002.5: ["b"]}
    for one in loops:
        await one.stop()
    await supervisor.stop()


async def test_a_tick_that_is_near_counts_as_passed(clock: Clock) -> None:
    assert math.isclose(until_tick(1.0), 1.0)
    await asyncio.sleep(0.95)
    assert math.isclose(until_tick(1.0), 1.05)
    assert math.isclose(until_tick(0.5), 0.55)
    assert math.isclose(ending_at_tick(0.01), 0.01)
    assert math.isclose(ending_at_tick(0.8), 0.55)
    assert math.isclose(ending_at_tick(1.0), 0.55)
    await asyncio.sleep(0.55)
    assert math.isclose(ending_at_tick(1.0), 0.5), "who is between two seconds comes to a whole one"
    await asyncio.sleep(0.5)
    assert math.isclose(ending_at_tick(1.0), 1.0)


async def test_a_keeper_without_a_lease_rests_and_one_with_a_lease_renews_it(harness: MemoryHarness) -> None:
    extended: list[float] = []

    class Source:
        async def extend(self, lease: Lease) -> bool:
            extended.append(harness.now())
            return True

    keeper = LeaseKeeper(Source(), harness.now)  # type: ignore[arg-type]
    renewing = asyncio.ensure_future(keeper.renew_on())
    await asyncio.sleep(3.2)
    await harness.broker.enqueue([ask(id="a")])
    keeper.lease = lease = await harness.claim()
    await asyncio.sleep(1.5)
    keeper.lease = None
    await asyncio.sleep(3.0)
    assert len(extended) == 3 and all(b - a <= HEARTBEAT_EVERY + 1e-6 for a, b in pairwise(extended))
    assert extended[0] - lease.granted_at <= HEARTBEAT_EVERY * 1.1
    keeper.end()
    await renewing


def noting(of: Any, name: str, clock: Clock) -> list[tuple[float, Any]]:
    """Record the calls of a method: when they were made, and their first argument."""
    noted: list[tuple[float, Any]] = []
    act = getattr(of, name)

    async def call(*arguments: Any) -> Any:
        noted.append((clock(), arguments[0] if arguments else None))
        return await act(*arguments)

    setattr(of, name, call)
    return noted


def pauses(noted: list[tuple[float, Any]], since: float) -> list[float]:
    return [round(b - a, 3) for a, b in pairwise(at for at, _ in noted if at >= since)]


async def test_a_slot_that_rests_beats_once_a_second_and_says_so(clock: Clock) -> None:
    stand = Stand(clock, FakeBackend(0.3))
    beats = noting(stand.broker, "heartbeat", clock)
    async with stand:
        await asyncio.sleep(REST_AFTER + 1.0)
        rests = clock()
        await asyncio.sleep(5.0)
        assert pauses(beats, rests) == [REST_EVERY] * (len(pauses(beats, rests)))
        assert len(pauses(beats, rests)) >= 3 and beats[-1][1].every == REST_EVERY
        works = clock()
        for _ in range(20):
            await stand.ask("text")
        busy = [(at, told) for at, told in beats if at >= works + REST_EVERY * 1.1]
        assert {told.every for _, told in busy} == {HEARTBEAT_EVERY}
        assert pauses(busy, works) == [HEARTBEAT_EVERY] * (len(busy) - 1) and len(busy) > 6


async def test_the_utilisation_is_the_same_however_often_it_is_told(clock: Clock) -> None:
    stand = Stand(clock, FakeBackend(0.3))
    async with stand:
        [batcher] = stand.pool.batchers
        shares = []
        for every in (0.5, 1.0):
            batcher.figures.utilisation, now = 0.8, clock()
            batcher.figures.update_utilisation(now, 0.0)
            batcher.figures.utilisation = 0.8
            for step in range(1, round(4.0 / every) + 1):
                batcher.figures.update_utilisation(now + step * every, 0.0)
            shares.append(batcher.figures.utilisation)
        assert shares[0] == pytest.approx(shares[1])


async def test_a_leader_of_a_resting_fleet_looks_each_second_and_tells_news(fleets: Fleets, clock: Clock) -> None:
    await fleets.worker("host", FakeBackend(0.3)).start()
    control, controller = fleets.controller("control")
    asked = noting(fleets.fleet, "acquire_leadership", clock)
    told = noting(fleets.fleet, "publish", clock)
    await control.start()
    entrance, gateway = fleets.gateway()
    await entrance.start()
    await asyncio.sleep(REST_AFTER + 2.0)
    rests = clock()
    await asyncio.sleep(10.0)
    assert set(pauses(asked, rests)) == {REST_EVERY} and set(pauses(told, rests)) == {REST_EVERY}
    assert controller.leads_now
    await fleets.broker.heartbeat(WorkerInfo(worker_id="new", model="m", status=WorkerStatus.HEALTHY))
    await asyncio.sleep(1.1 * REST_EVERY)
    newest: Capacity = told[-1][1]
    assert newest.healthy == 2, "what has changed is told with the next look"
    await asyncio.sleep(DEGRADED_AFTER)
    works = clock()
    for _ in range(20):
        await asking(gateway, "text")
    assert set(pauses(asked, works + 2 * REST_EVERY)) == {0.5} == set(pauses(told, works + 2 * REST_EVERY))


@pytest.mark.parametrize("renewed", [0.0, 1.5, 7.3, 8.0, 8.9])
async def test_another_controller_leads_within_3_3_s(renewed: float, fleets: Fleets, clock: Clock) -> None:
    """The old leader renewed its lead once a second. In the long cases, the other controller is resting by then."""
    other, controller = fleets.controller("other")
    asked = noting(fleets.fleet, "acquire_leadership", clock)
    await fleets.fleet.acquire_leadership("gone", LEADS_FOR)
    await other.start()
    begun = clock()
    while clock() + 1.0 <= begun + renewed:
        await asyncio.sleep(1.0)
        await fleets.fleet.acquire_leadership("gone", LEADS_FOR)
    await asyncio.sleep(begun + renewed - clock())
    await fleets.fleet.acquire_leadership("gone", LEADS_FOR)
    leads = [controller.leads]
    await asyncio.sleep(3.3)
    assert [*leads, controller.leads] == [False, True]
    looks = [at - begun for at, who in asked if who == "other" and RESTS_AFTER + 1.0 <= at - begun <= renewed]
    assert len(looks) <= 2, "it has asked once in two seconds"


async def test_an_idle_gateway_looks_and_tells_once_in_two_seconds(fleets: Fleets, clock: Clock) -> None:
    await fleets.worker("host", FakeBackend(0.1)).start()
    entrance, gateway = fleets.gateway()
    looks = noting(fleets.fleet, "capacities", clock)
    beats = noting(fleets.fleet, "heartbeat", clock)
    await entrance.start()
    await asyncio.sleep(2.0)
    calm = clock()
    await asyncio.sleep(RESTS_AFTER - 2.0)
    assert set(pauses(looks, calm)) == {REST_EVERY}
    await asyncio.sleep(STANDBY_EVERY)
    rests = clock()
    await asyncio.sleep(10.0)
    own = [(at, told) for at, told in beats if told.id == gateway.name]
    assert set(pauses(looks, rests)) == {STANDBY_EVERY} == set(pauses(own, rests))
    assert {told.every for at, told in own if at >= rests} == {STANDBY_EVERY}
    works = clock()
    for _ in range(40):
        await asking(gateway, "text")
    assert set(pauses(looks, works + STANDBY_EVERY)) == {HEARTBEAT_EVERY}
    assert set(pauses(own, works)) <= {REST_EVERY}


async def test_a_process_that_rests_is_given_as_long_beyond_the_heartbeat_that_fails_to_come() -> None:
    def told(id: str, at: float, every: float) -> ProcessInfo:
        return ProcessInfo(id=id, role=Role.GATEWAY, host="h", pid=1, last_seen=at, every=every)

    now = told("now", 100.0, REST_EVERY)
    there = [told("works", 97.1, REST_EVERY), told("rests", 96.1, STANDBY_EVERY)]
    gone = [told("worked", 96.9, REST_EVERY), told("rested", 95.9, STANDBY_EVERY)]
    assert heard([now, *there, *gone]) == [now, *there]


async def test_a_resting_process_tells_only_news_and_records_no_figures(fleets: Fleets, clock: Clock) -> None:
    counters, board, pace = Counters(), MemoryBoard(clock), Pace(clock)
    posts = noting(board, "post", clock)
    reporter = BoardReporter("p", board, fleets.broker, fleets.fleet, counters, clock, 3, pace)
    supervisor = Supervisor()
    reporter.start(supervisor)
    await asyncio.sleep(RESTS_AFTER + 2.0)
    assert set(pauses(posts, 0.0)) == {PERIOD} and any(notice.fleet for _, notice in posts)
    quiet = len(posts)
    await asyncio.sleep(10.0)
    assert len(posts) == quiet, "it rests, and nothing is new"
    counters.gateway.requests["m", "paid", "ok"] += 1
    await asyncio.sleep(PERIOD)
    [(_, notice)] = posts[quiet:]
    assert notice.flow is not None and notice.fleet is None
    pace.stir()
    await asyncio.sleep(2 * PERIOD)
    assert posts[-1][1].fleet is not None
    await reporter.close()
    await supervisor.stop()


USUAL = 4.0
ANYBODY = Principal("u", "t", 0)


class Story:
    """A table of requests with watched deadlines. `told` is when each deadline was reported."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.pending, self.told = clock, PendingTable(), dict[str, float]()
        self.deadlines = Deadlines(clock, self.pending, USUAL, self._passed)

    def ask(self, id: str, timeout: float = USUAL) -> float:
        """Add a request, and return its deadline."""
        now, key = self.clock(), ("t", id)
        entry = Entry(id, "m", "input", 0, "t", "gateway", 1.0, timeout)
        self.pending[key] = PendingRequest(NOBODY, ANYBODY, entry, now, now + timeout, None)
        self.deadlines.watch(key, now + timeout, timeout)
        return now + timeout

    def answer(self, id: str) -> None:
        del self.pending["t", id]

    def _passed(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if (one := self.pending.get(key)) is not None and one.deadline <= self.clock():
                del self.pending[key]
                assert key[1] not in self.told
                self.told[key[1]] = self.clock()


async def test_nothing_is_looked_at_while_nobody_waits(clock: Clock) -> None:
    story = Story(clock)
    story.ask("once")
    story.answer("once")
    await asyncio.sleep(2 * USUAL)
    assert story.deadlines.runs is False
    due = story.ask("again")
    await asyncio.sleep(2 * USUAL)
    assert due <= story.told["again"] <= due + DEADLINE_GRAIN


@pytest.mark.parametrize("seed", range(4))
async def test_each_is_told_of_once_and_in_time(seed: int, clock: Clock) -> None:
    rng, story, due = random.Random(seed), Story(clock), dict[str, float]()
    for number in range(400):
        timeout = USUAL if rng.random() < 0.7 else rng.choice([0.01, 1.0, 3.99, 30.0])
        due[str(number)] = story.ask(str(number), timeout)
        await asyncio.sleep(rng.choice([0.0, 0.001, 0.05]))
        while story.pending and rng.random() < 0.5:
            _, id = rng.choice(list(story.pending))
            story.answer(id)
            del due[id]
    await asyncio.sleep(31.0)
    assert story.told.keys() == due.keys()
    assert all(due[id] <= told <= due[id] + DEADLINE_GRAIN + 1e-6 for id, told in story.told.items())

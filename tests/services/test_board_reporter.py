"""What a process reports to the departure board: its batches, slots and counts, and the fleet's figures."""

import asyncio

import pytest

from headway.fleet.board_reporter import PERIOD, WATCHED_PERIOD, FlowMeter
from headway.model import Lease, Slot, WorkerStatus
from headway.model.board import ARRIVED, RUNNING, BatchDeparture, Notice, RequestFlow
from headway.runtime.counters import MOST_UNTOLD, Counters, DepartureLog
from tests.contracts.brokers import ask
from tests.services.stand import Stand

SLOT = Slot("gpu-0", "m", 8)


async def told(stand: Stand) -> list[Notice]:
    _, news = await stand.board.history()
    return list(news.notices)


def lease(fence: int, *tiers: int) -> Lease:
    return Lease(fence, SLOT, [ask(tier=tier) for tier in tiers], "headway", float(fence), 9.0, 9.0)


def test_a_batch_is_told_with_its_tiers_and_how_it_came_back() -> None:
    log = DepartureLog()
    log.left(lease(1, 0, 2, 2, 1))
    running = BatchDeparture("gpu-0", "m", "", 1.0, 4, 0.5, "headway", (1, 1, 2))
    assert log.take() == ((running,), (), 0)
    log.arrived("gpu-0", 0.25)
    [came], _, _ = log.take()
    assert (came.left, came.seconds, came.outcome, came.tiers) == (1.0, 0.25, ARRIVED, (1, 1, 2))
    log.arrived("gpu-0", 0.5, "crashed")
    assert log.take() == ((), (), 0), "it has ended already"
    for fence in (1, 2):
        log.left(lease(fence, 0))
        log.arrived("gpu-0", 0.1, "raised")
    ended = [(one.left, one.outcome) for one in log.take()[0]]
    assert ended == [(1.0, "raised"), (2.0, "raised")], "what left and came back in between is told once"


def test_the_log_is_bounded_and_counts_the_rest() -> None:
    log = DepartureLog()
    for fence in range(MOST_UNTOLD + 5):
        log.left(lease(fence, 0))
        log.became(SLOT, WorkerStatus.STARTING if fence % 2 else WorkerStatus.HEALTHY, fence)
    departures, changes, untold = log.take()
    assert (len(departures), len(changes), untold) == (MOST_UNTOLD, MOST_UNTOLD, 10)
    assert log.take() == ((), (), 0)


def test_a_status_is_told_once() -> None:
    now = 0.0
    log = DepartureLog(lambda: now)
    for status in (WorkerStatus.STARTING, WorkerStatus.HEALTHY, WorkerStatus.HEALTHY):
        log.became(SLOT, status, 0)
    now = 0.5
    _, changes, _ = log.take()
    assert [(change.status, change.ago) for change in changes] == [("starting", 0.5), ("healthy", 0.5)]


def test_counts_of_requests_are_told_as_they_grow() -> None:
    now, counters = 0.0, Counters()
    meter = FlowMeter(counters, lambda: now)
    assert meter.read() is None
    now = 2.0
    counters.gateway.requests["m", "paid", "ok"] += 3
    counters.gateway.requests["m", "free", "shed"] += 1
    counters.gateway.requests["n", "paid", "internal"] += 1
    counters.gateway.refusals["shed", "free", "m"] += 1
    counters.broker.retries["crashed"] += 2
    counters.gateway.request_seconds["m", "paid"].observe_all([0.003, 0.003, 0.2])
    flow = meter.read()
    assert flow == RequestFlow(
        2.0,
        {"paid": 3},
        {"shed": 1},
        {"shed": 1, "internal": 1},
        {"m": 4, "n": 1},
        {"paid": {3: 2, 14: 1}},
        {"crashed": 2},
    )
    assert meter.read() is None
    counters.gateway.request_seconds["m", "paid"].observe(0.003)
    counters.gateway.requests["m", "paid", "ok"] += 1
    flow = meter.read()
    assert flow is not None and flow.latencies == {"paid": {3: 1}}


async def test_a_batch_a_crash_and_the_figures_reach_the_board(stand: Stand) -> None:
    await asyncio.gather(*(stand.asking(f"text {number}", tier=number % 3) for number in range(6)))
    await asyncio.sleep(2 * PERIOD)
    notices = await told(stand)
    arrived = [one for notice in notices for one in notice.departures if one.outcome == ARRIVED]
    assert sum(one.size for one in arrived) == 6
    assert all(one.seconds == pytest.approx(0.1, abs=0.05) and 0 < one.fill <= 1 for one in arrived)
    assert sum(sum(notice.flow.answered.values()) for notice in notices if notice.flow is not None) == 6
    figures = [notice.fleet for notice in notices if notice.fleet is not None]
    assert (figures[-1].healthy, figures[-1].workers, len(figures[-1].waiting)) == (1, 1, 3)
    assert {notice.process for notice in notices} == {stand.gateway.name}
    stand.backends[0].dead.set()
    await asyncio.sleep(2 * PERIOD)
    statuses = [change.status for notice in await told(stand) for change in notice.changes]
    assert statuses[-2:] == ["starting", "healthy"]


async def test_while_somebody_looks_a_batch_is_seen_as_it_leaves(stand: Stand) -> None:
    await told(stand)
    await asyncio.sleep(PERIOD + 0.05)  # From now on, it reports four times a second.
    stand.backends[0].seconds = 2 * WATCHED_PERIOD
    asked = stand.asking("text")
    await asyncio.sleep(1.5 * WATCHED_PERIOD)
    [running] = [one for notice in await told(stand) for one in notice.departures]
    assert running.outcome == RUNNING
    await asked

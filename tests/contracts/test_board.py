"""Promises of every departure board: any process can read what was posted, in order, and the board is bounded."""

import asyncio

import pytest
from msgspec.structs import replace

from headway.core.departure_board import HISTORY_SECONDS, RECORD_SECONDS, STEP, WATCH_SECONDS
from headway.model.board import (
    ARRIVED,
    BatchDeparture,
    FleetFigures,
    HistoryRow,
    Notice,
    RequestFlow,
    ScalingChange,
    SlotChange,
)
from tests.contracts.brokers import Harness

LEFT = BatchDeparture("host/gpu-0", "m", "1", 7.25, 3, 0.75, "headway", (1, 0, 2))
CAME = replace(LEFT, seconds=0.125, outcome=ARRIVED)
FLOW = RequestFlow(1.0, {"paid": 2}, {"shed": 1}, {"internal": 1}, {"m": 4}, {"paid": {3: 2}}, {"crashed": 1})
FIGURES = FleetFigures((0, 1, 2), (0.0, 0.5, 1.5), 100.0, 85.0, 1, 2)
WHOLE = Notice("a", (CAME,), (SlotChange("host/gpu-0", "m", "starting", 1, 0.5),), 2, FLOW, FIGURES)


async def test_a_notice_is_read_whole_by_any_process_and_its_counts_are_kept(harness: Harness) -> None:
    await harness.board.post(WHOLE)
    [row], news = await harness.board_peer.history()
    [read] = news.notices
    assert read.at == pytest.approx(harness.now(), abs=harness.grain)
    assert replace(read, at=0.0) == WHOLE
    assert row == HistoryRow(int(read.at // STEP), 4, 2, 1, 1, {3: 2}, FIGURES)


async def test_the_counts_and_scalings_of_all_processes_are_added_up_step_by_step(harness: Harness) -> None:
    await harness.advance(STEP - harness.now() % STEP)
    changes = tuple(ScalingChange("m", number, number + 1, "up", "long queue", 0.5) for number in range(2))
    for _ in range(2):
        for process in ("a", "b"):
            await harness.board.post(Notice(process, flow=FLOW, scalings=changes if process == "a" else ()))
            await harness.board_peer.post(Notice(process, flow=FLOW, untold=1))
        await harness.advance(STEP)
    rows, _ = await harness.board.history()
    assert [(row.ended, row.answered, row.refused, row.failed, row.latencies) for row in rows] == [
        (16, 8, 4, 4, {3: 8})
    ] * 2
    assert [tuple(row.scalings) for row in rows] == [changes] * 2
    assert rows[1].step - rows[0].step == 1


async def test_half_an_hour_is_kept_of_ten_processes_in_bounded_room(harness: Harness) -> None:
    every, flow = 60, RequestFlow(1.0, {"paid": 5}, ended={"m": 5}, latencies={"paid": dict.fromkeys(range(5), 1)})
    for _ in range(HISTORY_SECONDS // every + 5):
        for process in range(10):
            await harness.board.post(Notice(f"process-{process}", flow=flow))
        await harness.advance(every)
    rows, _ = await harness.board_peer.history()
    assert HISTORY_SECONDS - 2 * every <= (rows[-1].step - rows[0].step) * STEP <= HISTORY_SECONDS
    assert {row.ended for row in rows} == {50}


async def test_notices_come_in_order_and_once_and_a_reader_waits_for_the_next(harness: Harness) -> None:
    await harness.board.post(Notice("a"))  # It says nothing, so it isn't kept.
    rows, begun = await harness.board_peer.history()
    assert (list(rows), list(begun.notices), bool(begun.cursor), begun.lost_at) == ([], [], True, 0.0)
    reading = asyncio.ensure_future(harness.board_peer.read(begun.cursor))
    await harness.settle()
    assert not reading.done()
    for number in range(3):
        await harness.board.post(Notice("a", (LEFT,), untold=number + 1, flow=FLOW))
    news = await reading
    seen = [*news.notices]
    while len(seen) < 3:
        news = await harness.board_peer.read(news.cursor)
        seen += news.notices
    assert [(notice.untold, notice.departures) for notice in seen] == [(number, (LEFT,)) for number in (1, 2, 3)]
    [row], news = await harness.board_peer.history()
    assert [notice.untold for notice in news.notices] == [1, 2, 3], "whoever comes later gets the last minutes"
    await harness.board.post(Notice("a", flow=FLOW))
    news = await harness.board_peer.read(news.cursor)
    assert (row.ended, [notice.flow for notice in news.notices]) == (12, [FLOW]), "rows count up to their cursor"


async def test_a_process_hears_whether_somebody_looks_and_whether_it_records_the_fleets_figures(
    harness: Harness,
) -> None:
    first = await harness.board.post(Notice("a"))
    assert (first.watched, first.records) == (False, True)
    await harness.board_peer.history()
    assert (await harness.board.post(Notice("a"))).watched
    await harness.advance(WATCH_SECONDS + harness.grain)
    again = await harness.board.post(Notice("a"))
    assert (again.watched, again.records) == (False, True)
    if harness.board_peer is not harness.board:
        await harness.advance(RECORD_SECONDS / 2)
        assert not (await harness.board_peer.post(Notice("b"))).records
        await harness.advance(RECORD_SECONDS)
        assert (await harness.board_peer.post(Notice("b"))).records
        assert not (await harness.board.post(Notice("a"))).records

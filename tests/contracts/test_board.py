"""Promises of every departure board: what was posted is read by any process, in order, and bounded."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from headway.core.departure_board import RECORD_SECONDS, WATCH_SECONDS
from headway.model.board import ARRIVED, BatchDeparture, FleetFigures, Notice, RequestFlow, SlotChange
from tests.contracts.brokers import Harness, story

LEFT = BatchDeparture("host/gpu-0", "m", "1", 7.25, 3, 0.75, "headway", (1, 0, 2))
CAME = replace(LEFT, seconds=0.125, outcome=ARRIVED)
FLOW = RequestFlow(1.0, {"paid": 2}, {"shed": 1}, {"internal": 1}, {"m": 4}, {"paid": {3: 2}}, {"crashed": 1})
FIGURES = FleetFigures((0, 1, 2), (0.0, 0.5, 1.5), 100.0, 85.0, 1, 2)
WHOLE = Notice("a", (CAME,), (SlotChange("host/gpu-0", "m", "starting", 1, 0.5),), 2, FLOW, FIGURES)


@story
async def test_an_empty_board_has_nothing_and_does_not_wait(harness: Harness) -> None:
    assert list(await harness.board.history()) == []
    notices, cursor = await harness.board.read("")
    assert (list(notices), bool(cursor)) == ([], True)


@story
async def test_a_notice_is_read_whole_by_any_process_and_its_counts_are_kept(harness: Harness) -> None:
    await harness.board.post(WHOLE)
    [read], _ = await harness.board_peer.read("")
    assert read.at == pytest.approx(harness.now(), abs=harness.grain)
    assert replace(read, at=0.0) == WHOLE
    [kept] = await harness.board_peer.history()
    assert replace(kept, at=0.0) == Notice("a", flow=FLOW, fleet=FIGURES)


@story
async def test_notices_come_in_order_and_once(harness: Harness) -> None:
    _, cursor = await harness.board_peer.read("")
    for number in range(3):
        await harness.board.post(Notice("a", untold=number + 1))
    seen: list[int] = []
    while len(seen) < 3:
        notices, cursor = await harness.board_peer.read(cursor)
        seen += [notice.untold for notice in notices]
    assert seen == [1, 2, 3]
    notices, _ = await harness.board_peer.read("")
    assert [notice.untold for notice in notices] == [1, 2, 3], "whoever comes later gets the last minutes"


@story
async def test_a_reader_waits_for_news(harness: Harness) -> None:
    _, cursor = await harness.board_peer.read("")
    reading = asyncio.ensure_future(harness.board_peer.read(cursor))
    await harness.settle()
    assert not reading.done()
    await harness.board.post(Notice("a", (LEFT,)))
    notices, _ = await reading
    assert [notice.departures for notice in notices] == [(LEFT,)]


@story
async def test_what_tells_nothing_is_not_kept(harness: Harness) -> None:
    await harness.board.post(Notice("a"))
    assert (list((await harness.board.read(""))[0]), list(await harness.board.history())) == ([], [])


@story
async def test_a_process_hears_whether_somebody_looks(harness: Harness) -> None:
    assert not (await harness.board.post(Notice("a"))).watched
    await harness.board_peer.read("")
    assert (await harness.board.post(Notice("a"))).watched
    await harness.advance(WATCH_SECONDS + harness.grain)
    assert not (await harness.board.post(Notice("a"))).watched


@story
async def test_a_process_records_the_figures_of_the_fleet_until_it_is_gone(harness: Harness) -> None:
    assert (await harness.board.post(Notice("a"))).records
    await harness.advance(RECORD_SECONDS / 2)
    assert (await harness.board.post(Notice("a"))).records
    if harness.board_peer is not harness.board:
        await harness.advance(RECORD_SECONDS / 2)
        assert not (await harness.board_peer.post(Notice("b"))).records
        await harness.advance(RECORD_SECONDS)
        assert (await harness.board_peer.post(Notice("b"))).records
        assert not (await harness.board.post(Notice("a"))).records

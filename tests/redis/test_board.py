"""The departure board over Redis: what a loss of data says, and what the board takes of the server's memory."""

from __future__ import annotations

import pytest

from headway.brokers.redis.board import RedisBoard
from headway.core.departure_board import RECENT_BYTES
from headway.model.board import BatchDeparture, Notice, RequestFlow
from tests.contracts.brokers import story
from tests.redis.stand import Stand

FLOW = RequestFlow(1.0, {"paid": 2}, ended={"m": 2}, latencies={"paid": {3: 2}})


@story
async def test_a_board_that_is_new_has_lost_nothing(harness: Stand) -> None:
    for board in (harness.board, harness.board_peer):
        await board.post(Notice("a", flow=FLOW))
        assert (await board.history())[1].lost_at == 0.0


@pytest.mark.parametrize("first", ["one that knew it", "a new one"])
@story
async def test_a_loss_of_the_brokers_data_is_told_with_its_instant(harness: Stand, first: str) -> None:
    await harness.board.post(Notice("a", flow=FLOW))
    await harness.advance(60)
    harness.server.command("FLUSHALL")
    posts = [harness.board, harness.board_peer]  # The peer has not known the board that was lost.
    lost = harness.now()
    for board in posts if first == "one that knew it" else reversed(posts):
        await board.post(Notice("b", flow=FLOW))
    await harness.advance(5)
    await harness.board.post(Notice("a", flow=FLOW))
    for board in (*posts, RedisBoard(harness._links[1])):
        rows, news = await board.history()
        assert news.lost_at == pytest.approx(lost, abs=harness.grain)
        assert len(rows) == 2
        assert (await board.read("0-0")).lost_at == news.lost_at


@story
async def test_whole_notices_take_bounded_memory(harness: Stand) -> None:
    batch = BatchDeparture("host/gpu-0", "m", "1", 7.25, 3, 0.75, "headway", (1, 0, 2))
    large = Notice("a", (batch,) * 200)
    for _ in range(3 * RECENT_BYTES // 10_000):
        await harness.board.post(large)
    taken = int(harness.server.command("MEMORY", "USAGE", "headway:{fleet}:board"))
    assert RECENT_BYTES / 2 < taken < 1.3 * RECENT_BYTES
    assert not harness.endless()

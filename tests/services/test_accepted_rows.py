"""Rows of the ledger for requests that were taken in and have no outcome yet, between a real gateway and a worker."""

import asyncio
from typing import Any

import pytest

from headway.gateway.ledger_writer import INTERVAL, OPEN_AT_ONCE
from tests.services.fake_backend import FakeBackend
from tests.services.stand import EPOCH, Stand, recorded
from tests.virtual_time import Clock


def scene(clock: Clock, **settings: Any) -> Stand:
    """A service whose requests are to be recorded; batches take 1 s each."""
    patient: dict[str, Any] = {"ledger_rows": "all", "request_timeout_ms": 60_000.0, "queue_timeout_ms": 60_000.0}
    return Stand(clock, FakeBackend(1.0), max_batch=1, **patient | settings)


async def test_a_request_has_a_row_while_it_waits_and_its_outcome_in_place_of_that(clock: Clock) -> None:
    async with recorded(clock, stand := scene(clock)) as ledger:
        begun = clock()
        asked = [stand.asking(text, timeout=30.0) for text in "ab"]
        await asyncio.sleep(2 * INTERVAL)
        assert [one.status for one in ledger.waiting.values()] == ["queued", "queued"]
        for one in ledger.waiting.values():
            assert abs(one.created_at - (EPOCH + begun)) < 0.01
            assert abs(one.completed_at - (EPOCH + begun + 30.0)) < 0.01
            assert (one.tenant, one.user, one.model, one.tier) == ("default", "anonymous", "m", "paid")
        await asked[0]
        await asyncio.sleep(2 * INTERVAL)
        assert len(ledger.waiting) == 1
        await asked[1]
        await asyncio.sleep(2 * INTERVAL)
        assert ledger.waiting == {}
        assert [one.status for one in ledger.records] == ["completed", "completed"]
        assert ledger.noted == 2


@pytest.mark.parametrize("rows", ["all", "ended"])
async def test_what_ends_before_the_next_bulk_costs_one_row_and_by_default_nothing_else_is_written(
    rows: str, clock: Clock
) -> None:
    async with recorded(clock, stand := scene(clock, ledger_rows=rows)) as ledger:
        stand.backends[0].seconds = 0.01
        for number in range(30):
            await stand.ask(str(number))
        if rows == "ended":
            stand.backends[0].seconds = 2.0
            await stand.ask("slow")
        await asyncio.sleep(2 * INTERVAL)
        assert len(ledger.records) >= 30
        assert ledger.noted <= (2 if rows == "all" else 0)


async def test_while_the_ledger_is_away_answers_go_on_and_only_what_still_waits_is_noted_later(clock: Clock) -> None:
    async with recorded(clock, stand := scene(clock)) as ledger:
        ledger.away = True
        asked = [stand.asking(str(number), timeout=30.0) for number in range(6)]
        assert (await asked[0]).output == "0"
        assert (await asked[3]).output == "3"
        ledger.away = False
        await asyncio.sleep(1.5)
        assert ledger.noted < 6, "what has ended meanwhile is noted no more"
        await asyncio.gather(*asked)
        await asyncio.sleep(3.0)
        assert ledger.waiting == {}
        assert len(ledger.records) == 6


async def test_more_requests_than_one_call_takes_are_all_noted_and_all_forgotten(clock: Clock) -> None:
    async with recorded(clock, stand := scene(clock, max_queue=100_000)) as ledger:
        count = 2 * OPEN_AT_ONCE + 7
        asked = [stand.asking(str(number), timeout=60.0) for number in range(count)]
        await asyncio.sleep(4 * INTERVAL + 0.1)
        held = stand.gateway.pending
        assert held > OPEN_AT_ONCE
        assert len(ledger.waiting) >= held - 1
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(8 * INTERVAL)
        assert ledger.waiting == {}

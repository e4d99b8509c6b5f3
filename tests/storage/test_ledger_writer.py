import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from unittest.mock import AsyncMock

import pytest
import structlog

from headway import errors
from headway.config import Settings
from headway.core.ledger_records import MINUTE
from headway.errors import SettingError
from headway.gateway import ledger_writer
from headway.gateway.ledger_writer import BULK, FLUSH_WITHIN, INTERVAL, PRUNE_BITE, PRUNE_EVERY, LedgerWriter
from headway.gateway.pending import NOBODY, Ending, PendingRequest
from headway.model import BatchRun, Entry, Failure, Principal, Reply
from headway.runtime.counters import StoreCounts
from headway.runtime.supervisor import Supervisor
from tests.storage.fake_ledger import FakeLedger

Clock = Callable[[], float]

ALICE = Principal("alice", "acme", 0)
NOW = 1_790_000_000.0
ENDED = 1000.0
RAN = BatchRun("gpu-0", 32, 0.1, 5.0)


def note(
    number: int = 0, *, caller: Principal = ALICE, seconds: float = 0.25, model: str = "m", **reply: Any
) -> PendingRequest:
    entry = Entry(f"id-{number}", model, "secret input", 2, caller.tenant, "g", 1.0, 1.0)
    given: dict[str, Any] = {"output": "secret output", "ran": RAN} | reply
    ended = Reply(entry.id, entry.tenant, **given)
    return PendingRequest(NOBODY, caller, entry, ENDED - seconds, 4.0, None, reply=ended)


def notes(count: int, first: int = 0) -> list[PendingRequest]:
    return [note(number) for number in range(first, first + count)]


class Stand:
    def __init__(self, clock: Clock, **settings: Any) -> None:
        self.counters = StoreCounts()
        self.ledger = FakeLedger()
        self.supervisor = Supervisor()
        self.wall = NOW
        self.journal = LedgerWriter(
            self.ledger, Settings(**settings), self.counters, clock, lambda: self.wall, rng=lambda: 0.5
        )

    def noted(self, requests: Sequence[PendingRequest]) -> None:
        self.journal.finished(requests, Ending.REPLIED, ENDED)

    async def stop(self) -> None:
        await self.supervisor.stop()
        await self.journal.close()

    @property
    def ids(self) -> list[int]:
        return [int(record.id.removeprefix("id-")) for record in self.ledger.records]


@contextlib.asynccontextmanager
async def keeping(clock: Clock, *, away: bool = False, **settings: Any) -> AsyncIterator[Stand]:
    stand = Stand(clock, **settings)
    stand.ledger.away = away
    await stand.journal.open()
    stand.journal.start(stand.supervisor)
    try:
        yield stand
    finally:
        await stand.stop()


@pytest.mark.parametrize("content", [False, True])
async def test_a_note_becomes_a_record(content: bool, clock: Clock) -> None:
    async with keeping(clock, ledger_content=content) as it:
        it.noted([note()])
        it.wall += 100.0
        await asyncio.sleep(INTERVAL)
    [record] = it.ledger.records
    assert (record.id, record.user, record.tenant, record.tier) == ("id-0", "alice", "acme", "free")
    assert (record.model, record.status, record.error) == ("m", "completed", "")
    assert (record.created_at, record.completed_at, record.latency_ms) == (NOW - 0.25, NOW, 250.0)
    assert (record.batch_size, record.worker) == (32, "gpu-0")
    assert (record.input, record.output) == (("secret input", "secret output") if content else (None, None))


async def test_records_are_written_in_bulk_four_times_a_second(clock: Clock) -> None:
    async with keeping(clock) as it:
        for number in range(100):
            it.noted([note(number)])
            await asyncio.sleep(INTERVAL / 50)
        await asyncio.sleep(INTERVAL)
        assert it.ids == list(range(100))
        assert it.ledger.calls <= 4
        began = clock()
        it.noted(notes(BULK * 3, 100))  # Many do not wait.
        await asyncio.sleep(0.001)
        assert it.ids == list(range(100 + BULK * 3))
        assert {len(batch) for batch in it.ledger.batches} <= set(range(1, BULK + 1))
        assert clock() - began < INTERVAL / 10


async def test_during_an_outage_records_wait_up_to_the_bound_and_more_are_counted_as_lost(clock: Clock) -> None:
    with structlog.testing.capture_logs() as logs:
        async with keeping(clock, max_queue=200) as it:
            it.ledger.away = True
            for first in range(0, 3000, 30):
                it.noted(notes(30, first))
                await asyncio.sleep(0.1)
                assert it.journal.waiting <= 1000
            assert it.counters.ledger_dropped == 2000
            before = it.ledger.calls
            await asyncio.sleep(60.0)
            assert 60 <= it.ledger.calls - before <= 200, "it is asked again, ever more seldom, but each second"
            it.ledger.away = False
            await asyncio.sleep(1.0)
            assert it.ids == list(range(1000))
            it.noted(notes(1000, 5000))
            await asyncio.sleep(INTERVAL)
            assert it.ids[1000:] == list(range(5000, 6000))
            assert it.counters.ledger_dropped == 2000
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("the ledger is out of reach", "warning"),
        ("the ledger is back", "info"),
    ]


async def test_the_bound_holds_for_notes_that_come_at_once_and_while_a_batch_is_under_way(clock: Clock) -> None:
    async with keeping(clock, max_queue=200) as it:
        it.ledger.slow = 1.0
        it.noted(notes(1700))
        assert it.journal.waiting == 1000
        await asyncio.sleep(0.5)
        it.noted(notes(10, 2000))
        assert (it.journal.waiting, it.counters.ledger_dropped) == (1000, 710)
        await asyncio.sleep(1000 / ledger_writer.FIRST_BULK)
        assert it.ids == list(range(1000))
        it.noted(notes(10, 3000))
        assert (it.journal.waiting, it.counters.ledger_dropped) == (10, 710)


async def test_an_idle_process_learns_within_seconds_that_the_ledger_is_away_and_that_it_is_back(clock: Clock) -> None:
    async with keeping(clock) as stand:
        await asyncio.sleep(60)
        assert stand.journal.trouble() == ""
        stand.ledger.away = True
        await asyncio.sleep(ledger_writer.ASK_EVERY + 0.1)
        assert stand.journal.trouble().endswith("0 records are waiting, of at most 100000")
        stand.ledger.away = False
        await asyncio.sleep(ledger_writer.ASK_EVERY + 1.1)
        assert stand.journal.trouble() == ""
        assert stand.ledger.calls == 0, "nothing was written"


async def test_a_process_starts_without_its_ledger_and_finds_it_later(clock: Clock) -> None:
    async with keeping(clock, away=True) as it:
        it.noted(notes(5))
        await asyncio.sleep(5.0)
        assert (it.ledger.opened, it.ledger.calls) == (0, 0)
        it.ledger.away = False
        await asyncio.sleep(1.0)
        assert (it.ledger.opened, it.ids) == (1, list(range(5)))


async def test_a_process_does_not_start_with_a_ledger_that_will_never_do(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Stand(clock).journal
    monkeypatch.setattr(FakeLedger, "open", AsyncMock(side_effect=SettingError("ledger", "…", "no", "Yes.")))
    with pytest.raises(SettingError):
        await it.open()
    await it.close()


async def test_a_record_that_the_ledger_cannot_take_costs_no_other_one(clock: Clock) -> None:
    with structlog.testing.capture_logs() as logs:
        async with keeping(clock) as it:
            it.ledger.unloved = {"id-7", "id-500"}
            it.noted(notes(3000))
            await asyncio.sleep(1.0)
            assert it.ids == [number for number in range(3000) if number not in (7, 500)]
            assert it.counters.ledger_dropped == 2
            assert it.ledger.calls < 100
    assert [line["request_id"] for line in logs] == ["id-7", "id-500"]


async def test_a_slow_ledger_is_drained_as_fast_as_it_goes(clock: Clock) -> None:
    async with keeping(clock) as it:
        it.ledger.row_seconds = 1 / 230
        it.noted(notes(3006))
        await asyncio.sleep(3006 / 230 + 1.0)
        assert it.ids == list(range(3006))
        assert it.ledger.calls == len(it.ledger.batches), "one was not taken in time"


async def test_what_a_ledger_cannot_take_in_time_it_is_given_in_halves(clock: Clock) -> None:
    """The bulks had grown before the ledger became slow."""
    async with keeping(clock) as it:
        it.noted(notes(3 * BULK))
        await asyncio.sleep(INTERVAL)
        assert max(map(len, it.ledger.batches)) == BULK
        it.ledger.row_seconds = 1 / 10
        it.noted(notes(1000, 3 * BULK))
        await asyncio.sleep(200.0)
        assert it.ids == list(range(3 * BULK + 1000))


async def test_at_the_end_a_slow_ledger_gets_the_rows_that_it_can_take(clock: Clock) -> None:
    async with keeping(clock) as it:
        it.noted(notes(3 * BULK))
        await asyncio.sleep(INTERVAL)
        it.ledger.row_seconds = 1 / 230
        it.noted(notes(3006, 3 * BULK))
        await asyncio.sleep(2 * INTERVAL)
    written = len(it.ledger.records) - 3 * BULK
    assert written > 0.95 * 230 * FLUSH_WITHIN
    assert it.counters.ledger_dropped == 3006 - written


@pytest.mark.parametrize("count", [1, 100])
async def test_a_record_that_was_refused_once_is_tried_again(count: int, clock: Clock) -> None:
    async with keeping(clock) as it:
        it.ledger.refusals = 1
        it.noted(notes(count))
        await asyncio.sleep(1.0)
        assert it.ids == list(range(count))
        assert it.counters.ledger_dropped == 0


async def test_at_the_end_all_that_waits_or_is_under_way_is_written(clock: Clock) -> None:
    async with keeping(clock) as it:
        it.ledger.slow = 1.0
        it.noted(notes(10))
        await asyncio.sleep(INTERVAL + 0.5)
        assert it.ledger.calls == 1
        it.ledger.slow = 0.0
        it.noted(notes(BULK * 2 + 5, 10))
    assert it.ids == list(range(BULK * 2 + 15))
    assert (it.counters.ledger_dropped, it.ledger.closed) == (0, 1)


async def test_the_end_waits_for_a_ledger_that_is_away_only_so_long_and_counts_what_is_lost(clock: Clock) -> None:
    with structlog.testing.capture_logs() as logs:
        stand = Stand(clock)
        await stand.journal.open()
        stand.journal.start(stand.supervisor)
        stand.ledger.away = True
        stand.noted(notes(10))
        began = clock()
        await stand.stop()
        assert clock() - began <= FLUSH_WITHIN + 0.001
        assert (stand.counters.ledger_dropped, stand.ledger.closed, stand.journal.waiting) == (10, 1, 0)
    assert [line["event"] for line in logs] == [
        "the ledger is out of reach",
        "the last records could not be written to the ledger",
    ]


async def test_waiting_content_is_bounded_too(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(ledger_writer, "CONTENT_CHARS", 10 * len("secret input" + "secret output"))
    async with keeping(clock, ledger_content=True) as it:
        it.ledger.away = True
        it.noted(notes(15))
        await asyncio.sleep(5.0)
        assert (it.journal.waiting, it.counters.ledger_dropped) == (10, 5)
        it.ledger.away = False
        await asyncio.sleep(1.0)
        it.noted(notes(10, 20))
        await asyncio.sleep(INTERVAL)
        assert it.ids == [*range(10), *range(20, 30)]
        assert it.counters.ledger_dropped == 5


async def test_what_is_too_old_is_removed_now_and_then_in_bites(clock: Clock) -> None:
    async with keeping(clock, keep_days=2.0) as it:
        it.ledger.old = 2 * PRUNE_BITE + 1
        await asyncio.sleep(PRUNE_EVERY)
        assert it.ledger.old == 0
        assert {(before, limit) for _, before, limit in it.ledger.pruned} == {(NOW - 2 * 86_400, PRUNE_BITE)}
        assert len(it.ledger.pruned) == 3
        it.ledger.away = True
        it.ledger.old = 1
        await asyncio.sleep(2 * PRUNE_EVERY)
        it.ledger.away = False
        await asyncio.sleep(PRUNE_EVERY)
        assert it.ledger.old == 0
    async with keeping(clock, keep_days=0.0) as for_ever:
        await asyncio.sleep(10 * PRUNE_EVERY)
        assert for_ever.ledger.pruned == []


async def test_rows_that_may_not_be_removed_are_said_once_and_once_that_they_are_again(clock: Clock) -> None:
    with structlog.testing.capture_logs() as logs:
        async with keeping(clock) as it:
            it.ledger.unfit = "permission denied"
            await asyncio.sleep(3 * PRUNE_EVERY)
            it.ledger.unfit = ""
            await asyncio.sleep(2 * PRUNE_EVERY)
    assert [(line["event"], line["who"], line.get("error")) for line in logs] == [
        ("the ledger is out of reach", "ledger retention", "permission denied"),
        ("the ledger is back", "ledger retention", None),
    ]


def refused(number: int, code: str = errors.RATE_LIMITED, **changes: Any) -> PendingRequest:
    return note(number, output=None, ran=None, failure=Failure(code, "…"), **changes)


async def test_refusals_of_one_caller_are_counted_in_one_row_a_minute(clock: Clock) -> None:
    async with keeping(clock, ledger_content=True) as it:
        for number in range(1200):
            it.noted([refused(10 * number + more) for more in range(10)])
            it.wall += 0.1
            await asyncio.sleep(0.1)
        assert len([(record.requests, record.error, record.input) for record in it.ledger.records]) <= 4
    kept = it.ledger.records
    assert sum(record.requests for record in kept) == 12_000
    assert [record.requests == 1 for record in kept[:3]] == [True, False, True]
    assert (kept[0].id, kept[1].id) == ("id-0", "id-1")
    counted = kept[1]
    assert (counted.created_at, counted.input) == (NOW - 0.25, None)
    assert MINUTE - 1.0 < counted.completed_at - NOW < MINUTE + 1.0
    assert it.counters.ledger_dropped == 0

"""Requests with several inputs, as ledger and look-up tell of them: by its id what the client got, and its parts as parts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from headway import errors
from headway.errors import BackendError
from headway.gateway.fan_out import FanOut
from headway.gateway.ledger_writer import LedgerWriter
from headway.model import Entry, EntryState, LedgerRecord, Principal, Reply, RequestOptions, RequestStatus
from headway.runtime.supervisor import Supervisor
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand
from tests.storage.fake_ledger import FakeLedger
from tests.virtual_time import Clock, run

ADA = Principal("ada", "acme", 1)
ID = "0189f7a4-1111-7222-8333-444455556666"
AT = 1_790_000_000.0


def reject(entries: Sequence[Entry]) -> BackendError | None:
    return BackendError("no good") if any(entry.input == "bad" for entry in entries) else None


class Told:
    """What ledger and look-up tell of one request with these inputs, and what its client got."""

    def __init__(self) -> None:
        self.replies: Sequence[Reply] = ()
        self.records: Sequence[LedgerRecord] = ()
        self.status: RequestStatus | None = None
        self.letters: list[str] = []
        self.part_of: list[tuple[str, str]] = []
        """Requests of which the inputs are told to be parts: by the gateway while they waited, and after they ended."""

    @property
    def row(self) -> LedgerRecord:
        [row] = [record for record in self.records if record.id == ID]
        return row

    @property
    def parts(self) -> list[LedgerRecord]:
        return [record for record in self.records if record.id != ID]


async def part_of(stand: Stand, id: str) -> str:
    status = await stand.gateway.status(id)
    return "forgotten" if status is None else status.part_of


def told(inputs: Sequence[str], timeout: float = 30.0, leave_after: float | None = None, **settings: Any) -> Told:
    found = Told()

    async def main(clock: Clock) -> None:
        stand = Stand(clock, FakeBackend(0.1, reject), max_batch=2, **settings)
        ledger, supervisor = FakeLedger(), Supervisor()
        writer = LedgerWriter(ledger, stand.settings, stand.counters, clock, lambda: AT + clock(), rng=lambda: 0.5)
        stand.gateway._observers = (*stand.gateway._observers, writer)
        await writer.open()
        writer.start(supervisor)
        async with stand:
            ended: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()
            whole = FanOut(stand.gateway, ADA, ID, RequestOptions(timeout, 1), "m", inputs, b"", ended.set_result)
            whole.start()
            held = dict.fromkeys(pending.entry.id for pending in stand.gateway._pending.values())
            before = {id: await part_of(stand, id) for id in held}
            if leave_after is None:
                found.replies = await ended
            else:
                await asyncio.sleep(leave_after)
                whole.abandon()
            await asyncio.sleep(5.0)
            found.status = await stand.gateway.status(ID)
            found.part_of = [(before[id], await part_of(stand, id)) for id in held if id != ID]
            found.letters = [letter.entry.id for letter in await stand.dead.list()]
        await supervisor.stop()
        await writer.close()
        found.records = ledger.records

    run(main)
    return found


def test_a_list_that_fails_is_failed_by_its_id_and_names_the_part_that_failed() -> None:
    found = told(["a", "b", "c", "bad", "e", "f"])
    [reply] = found.replies
    assert reply.failure is not None
    assert reply.failure.code == errors.REJECTED_BY_MODEL
    assert (found.row.status, found.row.error, found.row.part_of) == ("failed", errors.REJECTED_BY_MODEL, "")
    assert {part.part_of for part in found.parts} == {ID}
    assert len(found.parts) == 5
    assert [part.id for part in found.parts if part.error == errors.REJECTED_BY_MODEL] == found.letters
    assert found.status is not None
    assert (found.status.state, found.status.failure) == (EntryState.FAILED, reply.failure)
    assert [found.status.failed_part] == found.letters
    assert found.status.seconds == pytest.approx(found.row.latency_ms / 1000)
    assert found.row.completed_at == pytest.approx(found.row.created_at + found.status.seconds)


def test_a_further_input_is_told_to_be_a_part_from_the_beginning() -> None:
    found = told(["a", "b", "c"])
    assert found.part_of == [(ID, ID)] * 2
    assert found.status is not None
    assert found.status.part_of == ""


def test_a_list_whose_first_input_fails_or_waits_while_another_fails_is_failed_by_its_id() -> None:
    for inputs in (["bad", "b", "c"], ["a", "bad"], ["bad", "bad"]):
        found = told(inputs)
        [reply] = found.replies
        assert found.status is not None
        assert (found.row.status, found.row.error) == ("failed", errors.REJECTED_BY_MODEL)
        assert (found.status.state, found.status.failure) == (EntryState.FAILED, reply.failure)


def test_a_list_that_misses_its_deadline_has_that_by_its_id() -> None:
    found = told(["a"] * 8, timeout=0.25)
    assert (found.row.status, found.row.error) == ("failed", errors.DEADLINE_EXCEEDED)
    assert found.status is not None
    assert found.status.state is EntryState.FAILED


def test_a_list_that_is_answered_took_as_long_as_its_last_input() -> None:
    found = told(["a"] * 6)
    assert len(found.replies) == 6
    assert (found.row.status, found.row.error) == ("completed", "")
    assert found.row.latency_ms == pytest.approx(300, abs=30)
    assert {part.status for part in found.parts} == {"completed"}
    assert found.status is not None
    assert (found.status.state, found.status.failed_part) == (EntryState.COMPLETED, "")
    assert found.status.seconds == pytest.approx(0.3, abs=0.03)


def test_a_list_whose_client_leaves_is_cancelled_by_its_id_also_where_its_first_input_was_answered() -> None:
    found = told(["a"] * 8, leave_after=0.15)
    assert (found.row.status, found.row.error) == ("failed", errors.CANCELLED)
    assert any(part.status == "completed" for part in found.parts)


async def test_a_list_of_which_the_first_input_is_answered_is_processed_until_the_last_is(
    clock: Clock,
) -> None:
    stand = Stand(clock, FakeBackend(0.1), max_batch=1)
    async with stand:
        ended: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()
        FanOut(stand.gateway, ADA, ID, RequestOptions(9.0, 1), "m", list("abc"), b"", ended.set_result).start()
        await asyncio.sleep(0.15)
        status = await stand.gateway.status(ID)
        assert status is not None
        assert (status.state, status.since) == (EntryState.PROCESSING, None)
        assert status.seconds == pytest.approx(0.15, abs=0.03)
        await ended


async def test_the_outcome_of_a_list_that_is_remembered_holds_none_of_its_inputs_and_outputs(
    clock: Clock,
) -> None:
    async with Stand(clock, FakeBackend(0.1)) as stand:
        ended: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()
        FanOut(stand.gateway, ADA, ID, RequestOptions(9.0, 1), "m", ["secret", "b"], b"", ended.set_result).start()
        await ended
        assert "secret" not in repr(stand.gateway._recent._last).lower()

"""Promises of every ledger: rows are stored whole and once, and can be found by their id."""

import asyncio
import re
import uuid
from functools import partial
from typing import Any

import msgspec
import pytest

from headway.errors import SettingError
from headway.model import LedgerRecord
from headway.ports import Ledger
from headway.runtime.request_id import new_id
from headway.storage.schema import POSTGRES, SQLITE, VERSIONS
from tests.contracts.ledgers import Database, opened
from tests.scenes import Played

AT = 1_790_000_000.25
STEPS = [*range(1, len(SQLITE) + 1)]
"""Schema steps that this version knows."""


def record(id: str = "", tenant: str = "acme", completed_at: float = AT, **changes: Any) -> LedgerRecord:
    plain = LedgerRecord(
        id=id or new_id(),
        user="alice",
        tenant=tenant,
        tier="paid",
        model="default",
        status="completed",
        created_at=completed_at - 0.25,
        completed_at=completed_at,
        latency_ms=250.0,
        batch_size=32,
        worker="gpu-0",
        version="7",
        batch_id="gpu-0@1790000000.123456",
        tokens=7,
    )
    return msgspec.structs.replace(plain, **changes)


@pytest.fixture
def ledger(database: Database) -> Played:
    return Played(partial(opened, database.ledger))


async def test_a_record_comes_back_as_it_was_and_an_unknown_id_has_none(ledger: Ledger) -> None:
    one = record()
    odd: dict[str, Any] = {"user": "ürsula ☃", "tenant": "", "status": "failed", "batch_size": 0, "error": "SHED"}
    odd |= {"worker": "", "version": "", "requests": 70_000, "part_of": new_id(), "input": "\n", "output": "🦆" * 9}
    other = record(**odd)
    await ledger.write([one, other])
    for kept in (one, other):
        assert list(await ledger.find(kept.id)) == [kept]
    for id in ("", "unknown", "'; DROP TABLE headway_requests; --", new_id()):
        assert list(await ledger.find(id)) == [], id


async def count(database: Database) -> int:
    found: int = (await asyncio.to_thread(database.query, "SELECT count(*) FROM headway_requests"))[0][0]
    return found


async def test_any_number_of_records_is_written(ledger: Ledger, database: Database) -> None:
    counts = (0, 1, 49, 50, 51, 1234)
    for number in counts:
        records = [record(latency_ms=float(one)) for one in range(number)]
        await ledger.write(records)
        for kept in records[:1] + records[-1:]:
            assert list(await ledger.find(kept.id)) == [kept]
    assert await count(database) == sum(counts)


async def test_what_is_there_already_is_left_as_it_is(ledger: Ledger, database: Database) -> None:
    first, fresh = record(), record()
    await ledger.write([first])
    again = msgspec.structs.replace(first, status="failed", error="BACKEND_ERROR")
    await ledger.write([fresh, again, fresh])
    assert list(await ledger.find(first.id)) == [first]
    assert list(await ledger.find(fresh.id)) == [fresh]
    after = record()
    await ledger.write([after])
    assert list(await ledger.find(after.id)) == [after]
    assert await count(database) == 3


async def test_requests_of_one_id_have_a_record_each_the_newest_first(ledger: Ledger) -> None:
    """A client uses an id again, while its first request waits and afterwards. Another tenant may use it too."""
    id = new_id()
    refused = msgspec.structs.replace(record(id), status="failed", error="IDEMPOTENCY_CONFLICT")
    first, second, other = (
        record(id, completed_at=AT + 1),
        record(id, completed_at=AT + 2),
        record(id, "globex", AT + 3),
    )
    for records in ([refused], [first, refused], [second], [second, first], [other]):
        await ledger.write(records)
    for asked in (id, id.upper()):
        assert list(await ledger.find(asked)) == [other, second, first, refused]
    assert await ledger.prune(AT + 1.5, 10) == 2
    assert list(await ledger.find(id)) == [other, second]


async def test_records_are_written_all_or_none(ledger: Ledger) -> None:
    good = [record() for _ in range(200)]
    for wrong in (record("no uuid"), record(user="lone \ud800 surrogate")):
        with pytest.raises(ValueError):
            await ledger.write([*good, wrong])
        assert list(await ledger.find(good[0].id)) == []
    await ledger.write(good)
    assert list(await ledger.find(good[0].id)) == good[:1]


async def test_old_records_are_removed_in_bites_the_oldest_first(ledger: Ledger) -> None:
    records = [record(completed_at=AT + number) for number in range(10)]
    await ledger.write(records[::-1])
    assert await ledger.prune(AT, 100) == 0
    assert await ledger.prune(AT + 5, 3) == 3
    assert [bool(await ledger.find(one.id)) for one in records] == [False] * 3 + [True] * 7
    assert await ledger.prune(AT + 5, 3) == 2
    assert await ledger.prune(AT + 5, 3) == 0
    assert [bool(await ledger.find(one.id)) for one in records] == [False] * 5 + [True] * 5


def test_several_open_one_database_at_once_and_all_write(database: Database) -> None:
    async def story(*ledgers: Ledger) -> None:
        shared = record()
        await asyncio.gather(*(ledger.write([record(), shared]) for ledger in ledgers))
        assert await count(database) == 5

    opened(database.ledger, story, count=4)
    assert [row[0] for row in database.query("SELECT version FROM headway_schema")] == STEPS


def waiting(id: str, tenant: str = "acme", created_at: float = AT) -> LedgerRecord:
    ended = record(
        id, tenant, created_at + 4.0, status="queued", created_at=created_at, latency_ms=0.0, part_of=new_id()
    )
    return msgspec.structs.replace(ended, batch_size=0, worker="", batch_id="", tokens=None)


async def test_requests_without_an_outcome_are_found_until_they_are_forgotten_or_old(ledger: Ledger) -> None:
    id, other = new_id(), new_id()
    one, twin, further = waiting(id), waiting(id, "globex"), waiting(other)
    await ledger.note_open([one, twin, further], [])
    assert sorted(await ledger.find(id), key=lambda found: found.tenant) == [one, twin]
    later = waiting(id, created_at=AT + 9.0)
    await ledger.note_open([later], [("globex", id), ("acme", other), ("nobody", other)])
    assert list(await ledger.find(id)) == [later], "one that is noted anew replaces the one before"
    assert list(await ledger.find(other)) == []
    await ledger.note_open([young := waiting(new_id(), created_at=AT + 100.0)], [])
    await ledger.prune(AT + 50.0, 10)
    assert list(await ledger.find(id)) == []
    assert list(await ledger.find(young.id)) == [young]
    await ledger.write([ended := record(completed_at=AT + 100.0)])
    await ledger.note_open([waiting(ended.id, created_at=ended.created_at)], [])
    assert list(await ledger.find(ended.id)) == [ended], "one with its outcome is told by that"
    again = waiting(ended.id, created_at=ended.completed_at + 1.0)
    await ledger.note_open([again], [])
    assert list(await ledger.find(ended.id)) == [ended, again]


def test_rows_of_a_ledger_without_versions_stay_and_have_none(database: Database) -> None:
    sqlite = database.is_sqlite
    database.query(VERSIONS)
    for number, statements in enumerate((SQLITE if sqlite else POSTGRES)[:3], 1):
        for statement in statements:
            database.query(statement)
        database.query(f"INSERT INTO headway_schema VALUES ({number})")
    kept = record(version="", batch_id="", tokens=None)
    id = f"x'{uuid.UUID(kept.id).hex}'" if sqlite else f"'{kept.id}'"
    created, completed = (str(at) if sqlite else f"to_timestamp({at})" for at in (kept.created_at, kept.completed_at))
    database.query(f"""
        INSERT INTO headway_requests VALUES
        ({id}, 'alice', 'acme', 'paid', 'default', 'completed', {created}, {completed}, 250.0, 32, 'gpu-0', '', NULL, NULL, 1)
    """)
    other = record()

    async def story(ledger: Ledger) -> None:
        assert list(await ledger.find(kept.id)) == [kept]
        await ledger.write([other])
        assert list(await ledger.find(other.id)) == [other]

    opened(database.ledger, story)


def test_a_database_is_opened_again_unless_it_is_of_a_later_version(database: Database) -> None:
    kept = record()

    async def write(ledger: Ledger) -> None:
        await ledger.write([kept])

    async def read(ledger: Ledger) -> None:
        assert list(await ledger.find(kept.id)) == [kept]
        await ledger.close()  # It can be closed twice, and before it was opened.

    asyncio.run(database.ledger().close())
    opened(database.ledger, write)
    opened(database.ledger, read)
    database.query("INSERT INTO headway_schema VALUES (99)")
    with pytest.raises(SettingError, match=re.escape(f"migration 99; this version has {len(STEPS)}")):
        opened(database.ledger, read)
    assert [row[0] for row in database.query("SELECT version FROM headway_schema ORDER BY 1")] == [*STEPS, 99]

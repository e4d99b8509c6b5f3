"""Promises of every store of bulk jobs: quotas hold, a job has one holder, and earlier holders can't change it."""

import asyncio
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from headway.model.bulk import BulkFile, BulkJob, JobDelay, JobFault, JobStatus, Stored
from headway.ports import BulkStore
from headway.runtime.request_id import new_id
from tests.contracts.ledgers import Database, opened
from tests.scenes import Played

AT = 1_790_000_000.25
TENANTS = ("acme", "other", "acme", "acme")


@pytest.fixture
def store(database: Database) -> Played:
    return Played(partial(opened, database.bulk))


def job(tenant: str = "acme", **changes: Any) -> BulkJob:
    id = "batch_" + new_id().replace("-", "")
    known = {"endpoint": "/v1/completions", "input_file": "file-1", "created_at": AT, "expires_at": AT + 86_400}
    return BulkJob(id=id, tenant=tenant, user="ann", **{**known, **changes})


def file(tenant: str = "acme", size: int = 10, at: float = AT) -> BulkFile:
    return BulkFile("file-" + new_id().replace("-", ""), tenant, "ünits.jsonl", size, "batch", at)


async def test_a_job_comes_back_as_it_was_and_what_is_no_id_is_unknown(store: BulkStore) -> None:
    """PostgreSQL strings can't contain NUL, SQLite's can."""
    faults = (JobFault("empty", "no line", 3),)
    one = job(
        models=("a", "b"),
        metadata={"k": "☃"},
        reached={"failed": AT},
        faults=faults,
        total=3,
        delay=JobDelay("no workers"),
    )
    for tenant, id in (("other", one.id), ("acme", "a\0"), ("acme", "\0")):
        assert await store.file(tenant, id) is None
        assert await store.job(tenant, id) is None
        assert await store.cancel(tenant, id) is None
        assert not await store.remove_file(tenant, id)
        assert not await store.files(tenant, id, 9)
        assert not await store.jobs(tenant, id, 9)
    assert await store.add_job(one, 1)
    assert await store.job("acme", one.id) == one
    assert await store.job("other", one.id) is None


async def ended(store: BulkStore, status: JobStatus = JobStatus.COMPLETED) -> BulkJob:
    held = await store.claim("a", 30.0, 9)
    assert held is not None
    assert await store.keep(replace(held, status=status), 0.0)
    return held


async def test_a_tenants_bytes_are_bounded_and_a_file_is_there_once(store: BulkStore) -> None:
    first, second = file(size=60), file(size=41)
    assert await store.add_file(first, Stored(100, 9))
    assert not await store.add_file(second, Stored(100, 9))
    assert await store.add_file(replace(second, tenant="other"), Stored(100, 9))
    assert await store.add_file(file(size=40), Stored(100, 9))
    output = file(size=500)
    assert await store.add_file(output)
    assert await store.add_file(output)
    assert await store.stored("acme") == (600, 3)
    assert await store.stored("nobody") == (0, 0)
    assert not await store.add_file(file(size=0), Stored(1000, 3))
    assert await store.add_file(file(size=0), Stored(1000, 4))
    assert await store.file("acme", second.id) is None
    assert await store.file("acme", first.id) == first
    assert await store.remove_file("acme", first.id)
    assert not await store.remove_file("acme", first.id)
    assert not await store.remove_file("other", output.id)


async def test_jobs_and_files_are_read_page_by_page(store: BulkStore) -> None:
    jobs, files = [job(tenant) for tenant in TENANTS], [file(tenant) for tenant in TENANTS]
    for one, other in zip(jobs, files, strict=True):
        assert await store.add_job(one, 10) and await store.add_file(other)
    output = replace(file(), purpose="batch_output")
    assert await store.add_file(output)
    assert [one.id for one in await store.jobs("acme", "", 2)] == [jobs[3].id, jobs[2].id]
    assert [one.id for one in await store.jobs("acme", jobs[2].id, 9)] == [jobs[0].id]
    assert [one.id for one in await store.files("acme", files[3].id, 1)] == [files[2].id]
    assert [one.id for one in await store.files("acme", "", 2, "batch")] == [files[3].id, files[2].id]
    assert [one.id for one in await store.files("acme", "", 2, "batch_output")] == [output.id]
    assert [one.id for one in await store.open_jobs("", 2)] == [jobs[0].id, jobs[1].id]
    assert (await ended(store)).id == jobs[0].id
    assert [one.id for one in await store.open_jobs("", 9)] == [one.id for one in jobs[1:]]
    assert list(await store.file_ids("", 2)) == [files[0].id, files[1].id]
    assert list(await store.file_ids(files[1].id, 9)) == [files[2].id, files[3].id, output.id]


async def test_open_jobs_of_a_tenant_are_bounded_and_so_are_those_that_run(store: BulkStore) -> None:
    assert await store.add_job(job(), 1)
    assert not await store.add_job(job(), 1)
    assert await store.add_job(job("other"), 1)
    done = await ended(store)
    found = await store.cancel("acme", done.id)
    assert found is not None and (found.cancelling_at, found.status) == (None, JobStatus.COMPLETED)
    for _ in range(3):
        assert await store.add_job(job(), 3)
    assert await store.counts() == {"completed": 1, "validating": 4}
    held = [await store.claim("a", 30.0, 2) for _ in range(4)]
    assert [one and one.tenant for one in held] == ["other", "acme", "acme", None]


async def test_a_tenant_keeps_its_newest_jobs_that_have_ended(store: BulkStore) -> None:
    ids = []
    for _ in range(4):
        await store.add_job(job(), 9, 2)
        ids.append((await ended(store, JobStatus.CANCELLED)).id)
    await store.add_job(job("other"), 9, 0)
    running = job()
    await store.add_job(running, 9, 2)
    assert [one.id for one in await store.jobs("acme", "", 9)] == [running.id, ids[3], ids[2]]


async def test_a_job_has_one_holder_until_its_lease_ends(store: BulkStore) -> None:
    await store.add_job(job(), 1)
    first = await store.claim("a", 0.0, 9)
    assert first is not None and (first.owner, first.generation) == ("a", 1)
    second = await store.claim("b", 30.0, 9)
    assert second is not None and (second.owner, second.generation) == ("b", 2)
    assert await store.claim("c", 30.0, 9) is None
    assert await store.keep(replace(first, completed=9), 30.0) is None
    output = file()
    assert not await store.add_file(output, holder=first)
    assert await store.add_file(output, holder=second)
    kept = await store.keep(replace(second, completed=5, status=JobStatus.IN_PROGRESS), 30.0)
    assert kept is not None and kept.completed == 5
    assert await store.job("acme", second.id) == kept
    assert await store.keep(kept, 0.0) is not None
    third = await store.claim("a", 30.0, 9)
    assert third is not None and (third.generation, third.completed) == (3, 5)


async def test_the_wish_to_cancel_survives_what_a_holder_writes(store: BulkStore) -> None:
    one = job()
    await store.add_job(one, 1)
    held = await store.claim("a", 30.0, 9)
    assert held is not None and held.cancelling_at is None
    assert await store.cancel("other", one.id) is None
    wished = await store.cancel("acme", one.id)
    assert wished is not None and wished.cancelling_at is not None
    kept = await store.keep(held, 30.0)
    assert kept is not None and kept.cancelling_at == wished.cancelling_at
    again = await store.cancel("acme", one.id)
    assert again is not None and again.cancelling_at == wished.cancelling_at
    assert await store.keep(replace(held, status=JobStatus.CANCELLED), 0.0) is not None
    assert await store.keep(held, 30.0) is None, "what has ended stays as it is"


async def test_old_files_and_jobs_go_but_not_those_in_use(store: BulkStore) -> None:
    read, old, new = file(at=AT - 9), file(at=AT - 8), file(at=AT)
    for one in (read, old, new):
        await store.add_file(one)
    await store.add_job(job(input_file=read.id, created_at=AT - 9), 9)
    assert [one.id for one in await store.old_files(AT, 9)] == [old.id]
    assert await store.remove_jobs(AT, 9) == 0
    assert not await store.remove_file("acme", read.id), "a job reads it"
    await ended(store, JobStatus.FAILED)
    assert await store.remove_jobs(AT, 9) == 1
    assert [one.id for one in await store.old_files(AT, 9)] == [read.id, old.id]
    assert await store.remove_file("acme", read.id)


def test_of_many_who_claim_one_job_one_gets_it(database: Database) -> None:
    async def story(*stores: BulkStore) -> None:
        await stores[0].add_job(job(), 1)
        held = await asyncio.gather(*(store.claim(str(at), 30.0, 9) for at, store in enumerate(stores)))
        assert len([one for one in held if one is not None]) == 1

    opened(database.bulk, story, count=4)

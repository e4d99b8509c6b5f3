"""What the feeder promises: each line has one record, whichever process dies and whatever fails."""

import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.bulk.job_run import AHEAD, LEASE, AnswerLog, Record
from headway.bulk.jobs import BITE, STRAYS_EVERY, BulkJobs
from headway.config import Settings
from headway.model.bulk import BulkFile, JobDelay, JobStatus
from tests.bulk.stand import FakeRunner, Stand
from tests.scenes import Played
from tests.virtual_time import run


def on_a_stand(path: Path, story: Callable[[Stand], Coroutine[Any, Any, None]]) -> None:
    async def main(clock: Callable[[], float]) -> None:
        stand = Stand(path, clock)
        await stand.begin()
        try:
            await story(stand)
        finally:
            await stand.end()

    run(main)


@pytest.fixture
def stand(tmp_path: Path) -> Played:
    return Played(partial(on_a_stand, tmp_path))


async def test_each_line_has_its_record(stand: Stand) -> None:
    job = await stand.submit(["a", "", "BAD", "b", "RAISE", "  ", "other c"])
    found = await stand.until_ended(job)
    assert (found.status, found.total, found.completed, found.failed) == (JobStatus.COMPLETED, 5, 3, 2)
    answers = {one["line"]: one["output"] for one in stand.records(found.output_file)}
    assert answers == {1: "A", 4: "B", 7: "OTHER C"}
    assert {one["line"]: one["error"] for one in stand.records(found.error_file)} == {3: "bad", 5: "REJECTED_BY_MODEL"}
    assert list(found.reached) == ["in_progress", "finalizing", "completed"]
    assert found.model == "default"
    assert {one.id for one in await stand.store.files("acme", "", 9)} == {
        job.input_file,
        found.output_file,
        found.error_file,
    }
    assert [*stand.path.glob("jobs/*")] == [*stand.path.glob("incoming/*")] == []
    assert [one.id for one in stand.ended] == [job.id]


@pytest.mark.parametrize(("allowed", "code"), [(None, "key_not_valid"), (("other",), "model_not_allowed")])
async def test_a_job_ends_with_what_is_done_when_its_key_may_ask_for_it_no_more(
    stand: Stand, allowed: tuple[str, ...] | None, code: str
) -> None:
    job = await stand.submit(["a"] * 1000, models=("default", "other"))
    await asyncio.sleep(3.0)
    stand.allowed, at = lambda job: allowed, stand.clock()
    found = await stand.until_ended(job)
    assert stand.clock() - at < 5.0
    assert (found.status, [one.code for one in found.faults]) == (JobStatus.FAILED, [code])
    assert 0 < found.completed < 1000
    assert len(stand.records(found.output_file)) == found.completed
    assert [*stand.path.glob("jobs/*")] == []


async def test_a_job_runs_on_without_a_model_that_it_has_no_line_for_and_not_at_all_without_a_key(stand: Stand) -> None:
    job = await stand.submit(["a"] * 1000, models=("default", "other"))
    await asyncio.sleep(3.0)
    stand.allowed = lambda job: ("default",)
    found = await stand.until_ended(job)
    assert (found.status, found.models) == (JobStatus.COMPLETED, ("default",))
    stand.runner.ran.clear()
    stand.allowed = lambda job: None
    found = await stand.until_ended(await stand.submit(["a"] * 10))
    assert (found.status, found.faults[0].code, found.output_file) == (JobStatus.FAILED, "key_not_valid", "")
    assert not stand.runner.ran


async def test_what_is_no_job_fails_as_a_whole(stand: Stand) -> None:
    for lines, code in (([" ", ""], "empty_file"), (["a"] * 10_001, "too_many_lines")):
        found = await stand.until_ended(await stand.submit(lines))
        assert (found.status, [one.code for one in found.faults]) == (JobStatus.FAILED, [code])
    job = await stand.submit(["a"])
    (stand.path / "files" / job.input_file).unlink()
    found = await stand.until_ended(job)
    assert (found.status, found.faults[0].code) == (JobStatus.FAILED, "no_input_file")


async def test_answers_beyond_a_tenants_bytes_keep_its_next_job_from_running(stand: Stand) -> None:
    """Otherwise a small file could fill the disk, one job after another."""
    await stand.until_ended(await stand.submit(["a"] * 4_000))
    found = await stand.until_ended(await stand.submit(["a"]))
    assert (found.status, found.faults[0].code) == (JobStatus.FAILED, "too_many_bytes")
    other = await stand.until_ended(await stand.submit(["a"], tenant="globex"))
    assert other.status is JobStatus.COMPLETED
    for file in await stand.store.files("acme", "", 10):
        await stand.store.remove_file("acme", file.id)
    assert (await stand.until_ended(await stand.submit(["a"]))).status is JobStatus.COMPLETED


async def test_many_files_of_a_tenant_keep_its_next_job_from_running(stand: Stand) -> None:
    for number in range(101):
        await stand.store.add_file(BulkFile(f"file-{number}", "acme", "lines", 0, "batch", stand.wall()))
    found = await stand.until_ended(await stand.submit(["a"]))
    assert (found.status, found.faults[0].code) == (JobStatus.FAILED, "too_many_files")


async def test_what_nobody_knows_goes_after_a_while(stand: Stand) -> None:
    """A process died between a file's last step and its row, or between deleting the row and deleting the file."""

    def leave(*paths: Path) -> None:
        for path in paths:
            path.mkdir(exist_ok=True) if path.name.startswith("batch_") else path.touch()
            os.utime(path, (0.0, 0.0))

    files, logs = stand.path / "files", stand.path / "jobs"
    jobs = BulkJobs(stand.store, stand.folder, stand.feeder, Settings(keep_days=0), stand.clock, stand.wall)
    stand.runner.why = "no workers"
    job = await stand.submit(["a"])
    await asyncio.sleep(1.0)
    leave(files / job.input_file, logs / job.id, files / ".nfs0001")
    made = replace(await stand.job(job), status=JobStatus.FINALIZING, output_file="file-made")
    stand.store._database.execute("UPDATE headway_bulk_jobs SET document = ?", [msgspec.json.encode(made).decode()])
    known = {*files.iterdir(), *logs.iterdir(), files / "file-made", files / "file-new"}
    leave(files / "file-made", files / "file-stray", logs / "batch_stray")
    (files / "file-new").touch()
    await jobs.sweep()
    assert {*files.iterdir(), *logs.iterdir()} == known
    leave(*(files / f"file-{number}" for number in range(9)))
    await asyncio.sleep(STRAYS_EVERY)
    await jobs.sweep()
    assert len([*files.iterdir()]) == 13, "what most of it is tells of another database"
    stand.runner.go_on()


async def test_one_sweep_removes_all_that_is_old(stand: Stand) -> None:
    for number in range(2 * BITE + 1):
        await stand.store.add_file(BulkFile(f"file-{number}", "acme", "lines", 1, "batch", 0.0))
    await stand.store.add_file(BulkFile("file-new", "acme", "lines", 1, "batch", stand.wall()))
    kept = Settings(bulk_dir=str(stand.path))
    await BulkJobs(stand.store, stand.folder, stand.feeder, kept, stand.clock, stand.wall).sweep()
    assert [one.id for one in await stand.store.files("acme", "", 9)] == ["file-new"]


async def test_lines_are_read_no_faster_than_their_records_are_written(stand: Stand) -> None:
    """Otherwise ten million invalid lines would be in memory while the disk is slow."""
    sizes: list[int] = []
    flush = AnswerLog.flush

    async def slowly(log: AnswerLog) -> None:
        sizes.append(log.waiting)
        await asyncio.sleep(5.0)
        await flush(log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerLog, "flush", slowly)
        patch.setattr("headway.bulk.job_run.MOST_WAITING", 1_000)
        found = await stand.until_ended(await stand.submit(["BAD"] * 9_999))
    assert found.failed == 9_999
    assert 0 < max(sizes) <= 1_000


async def test_large_records_that_wait_keep_further_lines_from_being_read(stand: Stand) -> None:
    stand.runner.answer, stand.runner.seats = "x" * 10_000, 100
    flush = AnswerLog.flush

    async def slowly(log: AnswerLog) -> None:
        await asyncio.sleep(5.0)
        assert log._bytes < 100_000 + (AHEAD + stand.runner.seats) * 11_000
        await flush(log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerLog, "flush", slowly)
        patch.setattr("headway.bulk.job_run.MOST_WAITING_BYTES", 100_000)
        found = await stand.until_ended(await stand.submit(["a"] * 3_000))
    assert found.completed == 3_000


async def test_a_line_that_is_too_long_is_read_no_further(stand: Stand) -> None:
    found = await stand.until_ended(await stand.submit(["x" * 5000, "a"]))
    lengths = {one["line"]: len(one["output"]) for one in stand.records(found.output_file)}
    assert lengths == {1: 1001, 2: 1}


@pytest.mark.parametrize("lines", [["a"] * 1200, ["|".join("a" * 450)] * 20], ids=["lines", "parts"])
async def test_tenants_take_turns(stand: Stand, lines: list[str]) -> None:
    await stand.submit(lines)
    await asyncio.sleep(2.0)
    late = await stand.submit(["b"] * 100, "other")
    await stand.until_ended(late)
    order = stand.runner.order
    assert 90 <= order[order.index("other") :][:200].count("other") <= 110


async def test_a_line_of_several_parts_is_answered_once_all_of_them_are(stand: Stand) -> None:
    found = await stand.until_ended(await stand.submit(["a|b|c", "a|RAISE|" + "b|" * 450, "|".join("d" * 400), "e"]))
    assert (found.total, found.completed, found.failed) == (4, 3, 1)
    answers = {one["line"]: one["output"] for one in stand.records(found.output_file)}
    assert answers == {1: "A|B|C", 3: "|".join("D" * 400), 4: "E"}
    [failed] = stand.records(found.error_file)
    assert (failed["line"], failed["error"]) == (2, "REJECTED_BY_MODEL")
    assert failed["message"].startswith("input 1 of")
    assert sum(number == 2 for _, number, _ in stand.runner.ran) <= stand.runner.seats + 2


async def test_lines_that_fail_together_are_withdrawn_together(stand: Stand) -> None:
    """Each withdrawal searches everything in flight, so one per line would block the loop if many lines are bad."""
    stand.runner.seats = 40
    assert (await stand.until_ended(await stand.submit(["RAISE|a"] * 20))).failed == 20
    withdrawn = [numbers for numbers in stand.runner.withdrawn if numbers]
    assert [*itertools.chain(*withdrawn)] == [*range(1, 21)]
    assert len(withdrawn) <= 3


async def test_outputs_of_one_line_have_a_bound_together(stand: Stand) -> None:
    stand.runner.answer = "x" * 4_000
    found = await stand.until_ended(await stand.submit(["a|b", "a|b|c", "a"]))
    assert (found.completed, found.failed) == (2, 1)
    assert stand.records(found.error_file)[0]["error"] == "PAYLOAD_TOO_LARGE"


async def test_a_tenant_whose_bytes_are_on_their_way_keeps_nobody_waiting(stand: Stand) -> None:
    stand.runner.full_of = "acme"
    large, small = await stand.submit(["a"] * 100), await stand.submit(["b"] * 100, "other")
    assert (await stand.until_ended(small, 10.0)).completed == 100
    assert "acme" not in stand.runner.order
    stand.runner.full_of = ""
    assert (await stand.until_ended(large, 10.0)).completed == 100


async def test_a_job_cancelled_half_way_keeps_what_is_done(stand: Stand) -> None:
    job = await stand.submit(["a"] * 1000)
    await asyncio.sleep(3.0)
    await stand.store.cancel("acme", job.id)
    stand.feeder.hurry(job.id)
    found = await stand.until_ended(job, 3.0)
    assert found.status is JobStatus.CANCELLED and 100 < found.completed < 500
    assert len(stand.records(found.output_file)) == found.completed
    assert found.error_file == ""


async def test_a_job_that_expires_tells_of_each_line_that_was_not_run(stand: Stand) -> None:
    found = await stand.until_ended(await stand.submit(["a"] * 1000, seconds=3.0))
    assert found.status is JobStatus.EXPIRED and found.completed > 100
    assert found.completed + found.failed == 1000
    lines = [one["line"] for id in (found.output_file, found.error_file) for one in stand.records(id)]
    assert sorted(lines) == [*range(1, 1001)]
    assert {one["error"] for one in stand.records(found.error_file)} == {"batch_expired"}


async def test_a_job_expires_though_its_input_is_gone(stand: Stand) -> None:
    job = await stand.submit(["a"] * 1000, seconds=3.0)
    await asyncio.sleep(2.0)
    (stand.path / "files" / job.input_file).unlink()
    found = await stand.until_ended(job)
    assert (found.status, [one.code for one in found.faults]) == (JobStatus.EXPIRED, ["no_input_file"])
    assert len(stand.records(found.output_file)) == found.completed > 100
    assert (found.failed, found.error_file) == (0, "")


async def test_a_folder_that_is_away_is_no_file_that_is_lost(stand: Stand) -> None:
    """A network folder may come back with all its files."""
    names = [one.name for one in stand.path.iterdir() if one.is_dir()]

    def move(source: Path, target: Path) -> None:
        target.mkdir(exist_ok=True)
        for name in names:
            (source / name).rename(target / name)

    job = await stand.submit(["a"] * 1000)
    move(stand.path, stand.path / "away")
    await asyncio.sleep(10.0)
    assert "No such file" in (await stand.job(job)).delay.paused
    move(stand.path / "away", stand.path)
    assert (await stand.until_ended(job)).completed == 1000


async def test_a_full_disk_pauses_a_job_that_goes_on_by_itself(stand: Stand) -> None:
    job = await stand.submit(["a"] * 1000)
    await asyncio.sleep(3.0)
    stand.disk.full = True
    await asyncio.sleep(30.0)
    before, told = sum(stand.runner.ran.values()), await stand.job(job)
    assert told.delay.paused == stand.feeder.folder_trouble == "the disk of the bulk folder is full"
    await asyncio.sleep(30.0)
    assert sum(stand.runner.ran.values()) == before
    stand.disk.full = False
    found = await stand.until_ended(job)
    assert (found.completed, found.delay.paused) == (1000, "")
    assert set(stand.runner.ran.values()) == {1}


async def test_a_store_that_is_away_pauses_a_job_once_its_lease_is_over(stand: Stand) -> None:
    stand.runner.seconds = 1.0
    job = await stand.submit(["a"] * 1000)
    await asyncio.sleep(3.0)
    stand.store.away = True
    await asyncio.sleep(2 * LEASE)
    before = sum(stand.runner.ran.values())
    await asyncio.sleep(LEASE)
    assert sum(stand.runner.ran.values()) == before < 500
    stand.store.away = False
    found = await stand.until_ended(job)
    assert found.completed == 1000 and set(stand.runner.ran.values()) == {1}


async def test_a_job_says_what_its_lines_wait_for_and_until_when(stand: Stand) -> None:
    stand.runner.waiting, stand.runner.seconds = ("requests came of late", 27.2), 10.0
    job = await stand.submit(["a"] * 10)
    await asyncio.sleep(3.0)
    found = await stand.job(job)
    assert (found.delay.paused, found.delay.waits) == ("", "requests came of late")
    assert found.delay.until - stand.wall() == pytest.approx(27.0, abs=2.0)
    stand.runner.why = "lines rest"
    await asyncio.sleep(3.0)
    assert (await stand.job(job)).delay == JobDelay("lines rest")
    stand.runner.waiting = None
    stand.runner.go_on()
    found = await stand.until_ended(job)
    assert found.delay == JobDelay()


async def test_a_line_of_which_nobody_can_tell_yet_is_waited_for(stand: Stand) -> None:
    stand.form.in_doubt = "the models are not known yet"
    job = await stand.submit(["a"] * 10)
    await asyncio.sleep(20.0)
    found = await stand.job(job)
    assert (found.delay.paused, found.completed + found.failed) == ("the models are not known yet", 0)
    stand.form.in_doubt = ""
    found = await stand.until_ended(job)
    assert (found.completed, found.failed) == (10, 0)


async def test_who_ends_in_good_order_hands_over_at_once(stand: Stand) -> None:
    job = await stand.submit(["a"] * 1000)
    await asyncio.sleep(3.5)
    await stand.end()
    done = sum(stand.runner.ran.values())
    await stand.begin()
    await asyncio.sleep(1.0)
    assert (await stand.job(job)).generation == 2
    assert (await stand.until_ended(job)).completed == 1000
    assert sum(stand.runner.ran.values()) <= 1000 + 10, done


async def test_who_lost_the_job_writes_nothing_of_it(stand: Stand) -> None:
    job = await stand.submit(["a"] * 1000)
    await asyncio.sleep(3.0)
    lost, supervisor = stand.feeder, stand.supervisor
    stand.store._database.execute("UPDATE headway_bulk_jobs SET held_until = 0")
    other = await stand.begin()
    await asyncio.sleep(5.0)
    assert job.id in other.runs and job.id not in lost.runs
    found = await stand.until_ended(job)
    assert found.completed == 1000
    assert len(stand.records(found.output_file)) == 1000
    await supervisor.stop()
    await lost.close()


async def test_who_makes_files_of_a_log_that_is_half_gone_spoils_none(stand: Stand) -> None:
    """A holder pauses before it looks at the log. When it resumes, its successor has ended the job."""
    records, goes_on = AnswerLog.records, asyncio.Event()

    async def late(log: AnswerLog) -> AsyncGenerator[list[Record], None]:
        if log._generation == 1 and not goes_on.is_set() and log.counts["out"]:
            await goes_on.wait()
            (stand.path / "jobs" / job.id).mkdir()
            (stand.path / "jobs" / job.id / "out.1.part").write_bytes(b'1 {"line": 1}\n')
        async for page in records(log):
            yield page

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerLog, "records", late)
        job = await stand.submit(["a"] * 100)
        await asyncio.sleep(5.0)
        lost, supervisor = stand.feeder, stand.supervisor
        assert (await stand.job(job)).status is JobStatus.FINALIZING
        stand.store._database.execute("UPDATE headway_bulk_jobs SET held_until = 0")
        await stand.begin()
        found = await stand.until_ended(job)
        goes_on.set()
        await asyncio.sleep(5.0)
    assert job.id not in lost.runs
    assert len(stand.records(found.output_file)) == found.completed == 100
    assert len(await stand.store.files("acme", "", 9)) == 2
    await supervisor.stop()
    await lost.close()


@contextlib.contextmanager
def as_a_bucket() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(ImportError):
            from fsspec.config import conf

            patch.setitem(conf, "file", {"auto_mkdir": True})
        yield


@pytest.mark.parametrize("bucket", [False, True], ids=["folder", "bucket"])
@settings(max_examples=15, deadline=None)
@given(
    crashes=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    lines=st.lists(st.sampled_from(["a", "BAD", "RAISE", "", "a|b|c", "a|RAISE|b"]), min_size=1, max_size=300),
    ending=st.sampled_from(["", "", "expires", "cancelled"]),
)
def test_each_line_has_one_record_after_kills(bucket: bool, crashes: list[int], lines: list[str], ending: str) -> None:
    async def main(clock: Callable[[], float]) -> None:
        stand = Stand(Path(folder), clock, FakeRunner(10, 0.5), bucket)
        seconds = 20.0 if ending == "expires" else 1e6
        job = await stand.submit([*lines, "a"], seconds=seconds)
        for at in crashes:
            feeder = await stand.begin()
            stand.disk.dies_at = stand.disk.steps + at
            dead = asyncio.ensure_future(stand.disk.died.wait())
            await asyncio.wait({dead}, timeout=60.0)
            dead.cancel()
            await stand.kill()
            assert feeder is stand.feeder
            if ending == "cancelled":
                await stand.store.cancel("acme", job.id)
        swept_later = (await stand.job(job)).status.ended
        await stand.begin()
        found = await stand.until_ended(job)
        await stand.end()
        wanted = [at for at, line in enumerate([*lines, "a"], 1) if line]
        out, err = stand.records(found.output_file), stand.records(found.error_file)
        numbers = [one["line"] for one in (*out, *err)]
        assert len(numbers) == len(set(numbers)) == found.completed + found.failed
        assert (found.completed, found.failed) == (len(out), len(err))
        if found.status is not JobStatus.CANCELLED:
            assert sorted(numbers) == wanted and found.total == len(wanted)
        assert set(numbers) <= set(wanted)
        assert swept_later or [*stand.path.glob("jobs/*/*")] == []

    with tempfile.TemporaryDirectory() as folder, as_a_bucket():
        run(main)


def test_a_stand_needs_a_folder_that_may_be_written_to(tmp_path: Path) -> None:
    from headway.bulk.folder import BulkFolder
    from headway.errors import SettingError

    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="bulk_dir"):
        asyncio.run(BulkFolder(str(tmp_path / "file")).open())

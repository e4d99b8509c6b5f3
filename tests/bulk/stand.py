"""A test bench for bulk job feeders on virtual time: a store in memory, a folder whose disk may fail, a fake runner."""

import asyncio
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.bulk.feeder import Feeder
from headway.bulk.folder import BulkFolder
from headway.bulk.job_run import JobContext
from headway.bulk.lines import AskedLine, Making, NotYet, Turns
from headway.core.json_pages import Steps
from headway.errors import StoreUnavailable
from headway.model import Failure, Reply
from headway.model.bulk import BulkFile, BulkJob, BulkLine, Stored
from headway.runtime.request_id import new_id
from headway.runtime.supervisor import Supervisor
from headway.storage.rows import BulkRows
from headway.storage.schema import SQLITE

EPOCH = 1_790_000_000.0


class MemoryStore(BulkRows):
    """An in-memory store on the virtual clock. Calls fail while it is `away`."""

    now = "virtual_now()"

    def __init__(self, clock: Callable[[], float]) -> None:
        self._database = sqlite3.connect(":memory:", isolation_level=None)
        self._database.create_function("virtual_now", 0, lambda: EPOCH + clock())
        for statement in SQLITE[-1]:
            self._database.execute(statement)
        self.away = False

    async def open(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        self._database.close()

    async def _write(self, sql: str, *values: object) -> Sequence[Any]:
        await asyncio.sleep(0)
        if self.away:
            raise StoreUnavailable("the store is away")
        return self._database.execute(sql, {str(at): value for at, value in enumerate(values, 1)}).fetchall()

    _read = _write


_Key = tuple[str, int, int]


class FakeRunner:
    """Answers each line after `seconds`. Inputs with `RAISE` fail; others return in capitals, or as `answer`. `ran`
    counts runs by job, number and part. `order` has the tenants of the lines. `withdrawn` has the line numbers of each
    withdrawal, empty for a whole job. Nothing runs while `why` is set, and the tenant `full_of` can't offer more."""

    def __init__(self, seats: int = 10, seconds: float = 0.1) -> None:
        self.seats, self.seconds = seats, seconds
        self.ran: Counter[_Key] = Counter()
        self.order: list[str] = []
        self.withdrawn: list[list[int]] = []
        self.why = self.answer = self.full_of = ""
        self.waiting: tuple[str, float] | None = None
        self._out: dict[_Key, asyncio.TimerHandle] = {}
        self._freed = asyncio.Event()

    async def room(self, model: str) -> int:
        while self.why or len(self._out) >= self.seats:
            self._freed.clear()
            await self._freed.wait()
        return self.seats - len(self._out)

    def offer(self, lines: Sequence[BulkLine], done: Callable[[BulkLine, Reply], None]) -> None:
        for line in lines:
            key = line.job, line.number, line.part
            self.ran[key] += 1
            self.order.append(line.tenant)
            self._out[key] = asyncio.get_running_loop().call_later(self.seconds, self._end, key, line, done)

    def withdraw(self, job: str, numbers: Collection[int] = ()) -> None:
        self.withdrawn.append(sorted(numbers))
        for key in [key for key in self._out if key[0] == job and (not numbers or key[1] in numbers)]:
            self._out.pop(key).cancel()
        self._freed.set()

    def full(self, tenant: str) -> bool:
        return tenant == self.full_of

    async def look(self) -> None:
        """Does nothing."""

    def waits(self, model: str, tenant: str) -> tuple[str, float] | None:
        return self.waiting

    def paused(self, model: str, tenant: str = "") -> str:
        return self.why

    def go_on(self) -> None:
        self.why = ""
        self._freed.set()

    def _end(self, key: _Key, line: BulkLine, done: Callable[[BulkLine, Reply], None]) -> None:
        del self._out[key]
        self._freed.set()
        text = str(line.input)
        failed = Failure("REJECTED_BY_MODEL", "no") if "RAISE" in text else None
        done(line, Reply("id", line.tenant, None if failed else self.answer or text.upper(), failed))


class PlainForm:
    """Lines of plain text; bars separate parts. `BAD` lines are invalid. While `in_doubt`, none can be read yet."""

    in_doubt = ""

    def read(self, job: BulkJob, number: int, text: bytes) -> Steps[AskedLine | bytes]:
        yield from ()
        if self.in_doubt:
            raise NotYet(self.in_doubt)

        def record(ended: Sequence[Reply] | Failure) -> Making:
            if isinstance(ended, Failure):
                told: dict[str, Any] = {"line": number, "output": None, "error": ended.code, "message": ended.message}
                yield False, json.dumps(told).encode()
                return
            for _ in ended[1:]:
                yield None
            output = "|".join(str(reply.output) for reply in ended)
            yield True, json.dumps({"line": number, "output": output, "error": None}).encode()

        if text.startswith(b"BAD"):
            return json.dumps({"line": number, "error": "bad"}).encode()
        model = "other" if text.startswith(b"other") else "default"
        parts = [
            BulkLine(job.id, job.tenant, number, model, "", one, part=part)
            for part, one in enumerate(text.decode().split("|"))
        ]
        return AskedLine(parts, len(text), record, 10_000)

    def expired(self, number: int, text: bytes) -> bytes:
        return json.dumps({"line": number, "error": "batch_expired"}).encode()


class Disk:
    """A folder's disk. It may be `full`, or kill its user at a step. Once `buried`, a dead user's cleanup fails."""

    def __init__(self) -> None:
        self.full = False
        self.steps = 0
        self.dies_at = -1
        self.died = asyncio.Event()
        self.buried = False

    async def run(self, work: Callable[[], object]) -> object:
        self.steps += 1
        if self.steps == self.dies_at:
            self.died.set()
        if self.buried:
            raise OSError(5, "its process is gone")
        if self.died.is_set():
            await asyncio.Event().wait()
        await asyncio.sleep(0.001)
        if self.full:
            raise OSError(28, "No space left on device")
        return work()


class Stand:
    def __init__(
        self, path: Path, clock: Callable[[], float], runner: FakeRunner | None = None, bucket: bool = False
    ) -> None:
        self.path, self.clock, self.bucket = path, clock, bucket
        self.store = MemoryStore(clock)
        self.runner = runner or FakeRunner()
        self.form = PlainForm()
        self.disk = Disk()
        self.folder = self.make_folder()
        self.ended: list[BulkJob] = []
        self.allowed: Callable[[BulkJob], tuple[str, ...] | None] = lambda job: job.models
        self._lives = 0
        self.supervisor = Supervisor()
        self.feeder: Feeder

    def make_folder(self) -> BulkFolder:
        """Make a folder on the disk: a bucket, if there is one, or a directory."""
        if not self.bucket:
            return BulkFolder(str(self.path), self.disk.run)
        pytest.importorskip("fsspec")
        from headway.bulk.bucket import Bucket

        return Bucket(f"file://{self.path}", self.disk.run)

    def wall(self) -> float:
        return EPOCH + self.clock()

    async def begin(self) -> Feeder:
        self._lives += 1
        self.disk = Disk()
        self.folder = self.make_folder()
        await self.folder.open()
        context = JobContext(
            self.store, self.folder, self.runner, self.form, Turns(), lambda model: None, self.clock, self.wall,
            new_id, 1000, 10_000, Stored(100_000, 100), defaultdict(int), lambda job: self.allowed(job),
        )  # fmt: skip
        self.supervisor = Supervisor()
        self.feeder = Feeder(f"life-{self._lives}", context, self.ended.append)
        self.feeder.start(self.supervisor)
        return self.feeder

    async def end(self) -> None:
        await self.supervisor.stop()
        await self.feeder.close()

    async def kill(self) -> None:
        """Kill it: nothing more is written to disk or store, and the last record is torn."""
        self.disk.died.set()
        self.disk.buried = True
        tasks = [*self.feeder._tasks.values(), *self.feeder._pumps.values()]
        for task in tasks:
            task.cancel()
        await self.supervisor.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        for part in self.path.glob("jobs/*/*.part"):
            with part.open("ab") as file:
                file.write(b'7 {"line": 7, "outp')

    async def submit(
        self, lines: Sequence[str], tenant: str = "acme", seconds: float = 86_400.0, **known: Any
    ) -> BulkJob:
        hexed = new_id().replace("-", "")
        (self.path / "files").mkdir(parents=True, exist_ok=True)
        (self.path / "files" / f"file-{hexed}").write_bytes("\n".join(lines).encode())
        await self.store.add_file(BulkFile(f"file-{hexed}", tenant, "lines", 1, "batch", self.wall()))
        job = BulkJob(
            id=f"batch_{hexed}", tenant=tenant, user="ann", endpoint="/plain", input_file=f"file-{hexed}",
            created_at=self.wall(), expires_at=self.wall() + seconds, **known,
        )  # fmt: skip
        assert await self.store.add_job(job, 100)
        if self._lives:
            self.feeder.tell()
        return job

    async def job(self, one: BulkJob) -> BulkJob:
        found = await self.store.job(one.tenant, one.id)
        assert found is not None
        return found

    async def until_ended(self, one: BulkJob, within: float = 600.0) -> BulkJob:
        end = self.clock() + within
        while not (found := await self.job(one)).status.ended:
            assert self.clock() < end, found
            await asyncio.sleep(0.5)
        return found

    def records(self, id: str) -> list[dict[str, Any]]:
        if not id:
            return []
        return [json.loads(line) for line in (self.path / "files" / id).read_bytes().splitlines()]

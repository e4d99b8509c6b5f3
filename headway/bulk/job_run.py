"""Run of one job in the process that holds it.

    validating ─▶ in_progress ─▶ finalizing ─▶ completed | expired | cancelled | failed (its key was revoked)
         └──────────▶ failed

A process that takes over can repeat any step. The store accepts changes only from the latest holder, so a process that has
lost its lease can't change anything. While the disk is full or the store is unavailable, the job pauses."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from headway.bulk.folder import BulkFolder, FileWriter, PartLog, why
from headway.bulk.lines import AskedLine, LineForm, LineSet, LineSplitter, Making, NotYet, Turns, pages
from headway.errors import BrokerUnavailable, FileLost, FolderUnavailable, StoreUnavailable
from headway.model import Reply
from headway.model.bulk import BulkFile, BulkJob, BulkLine, JobDelay, JobFault, JobStatus, Stored
from headway.ports import BulkRunner, BulkStore
from headway.runtime.fair_turns import in_turns
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)

OUT, ERR = "out", "err"  # Kinds of records: answers, and errors.

_PART = re.compile(r"(out|err)\.([0-9]+)(?:\.([0-9]+))?\.part")
_RECORD = re.compile(rb"([0-9]+) (\{.*\})", re.DOTALL)
_MOST = 1 << 40
MOST_WAITING, MOST_WAITING_BYTES = 8_192, 64 << 20  # Unwritten records, and their bytes, at which a log is full.
TOGETHER = 64  # Records to write at a time.

Record = tuple[str, int, bytes]  # Kind, number of the input line, and JSON for the final file.


class AnswerLog:
    """Log of a job. Each holder of the job writes its own files. `answered` contains the lines that have a record."""

    def __init__(self, folder: BulkFolder, job: str, generation: int) -> None:
        self._folder, self._job, self._generation = folder, job, generation
        self._logs: dict[str, PartLog] = {}
        self._waiting: dict[str, list[tuple[int, bytes]]] = {OUT: [], ERR: []}  # Unwritten records, by kind.
        self._bytes = 0
        self.answered = LineSet()
        self.counts = {OUT: 0, ERR: 0}

    @property
    def dirty(self) -> bool:
        return any(self._waiting.values())

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def full(self) -> bool:
        """True if so many records are unwritten that no more lines should be read."""
        return self.waiting >= MOST_WAITING or self._bytes >= MOST_WAITING_BYTES

    async def recover(self) -> None:
        """Find the lines that already have a record. Raises FolderUnavailable."""
        await self._folder.do(lambda: self._folder.begin_log(self._job))
        async with aclosing(self.records()) as pages:
            async for page in pages:
                for kind, number, _ in page:
                    self.answered.add(number)
                    self.counts[kind] += 1

    def add(self, kind: str, number: int, record: bytes) -> None:
        """Add a record, unless its line already has one."""
        if self.answered.add(number):
            self._waiting[kind].append((number, record))
            self._bytes += len(record)
            self.counts[kind] += 1

    async def flush(self) -> None:
        """Write the added records to disk. If this raises FolderUnavailable, the next call tries again."""
        for kind, waiting in self._waiting.items():
            if records := [*waiting]:
                await self._folder.do(partial(self._put, kind, records))
                del waiting[: len(records)]
                self._bytes -= sum(len(record) for _, record in records)

    def close(self) -> None:
        """Close the files and drop unwritten records."""
        for log in self._logs.values():
            log.close()

    async def records(self) -> AsyncGenerator[list[Record], None]:
        """Yield pages of all holders' records, at most one record per line of the input. Raises FolderUnavailable."""
        seen = LineSet()
        for kind, path in await self._folder.do(self._parts):
            splitter = LineSplitter(_MOST)
            async with aclosing(self._folder.pieces(path)) as pieces:
                async for piece in pieces:
                    matches = (_RECORD.fullmatch(line) for line in splitter.feed(piece) if b"\0" not in line)
                    records = [(kind, int(match[1]), match[2]) for match in matches if match is not None]
                    yield [record for record in records if seen.add(record[1])]

    def _parts(self) -> list[tuple[str, str]]:
        names = [match for name in self._folder.parts(self._job) if (match := _PART.fullmatch(name))]
        names.sort(key=lambda match: (match[1] != OUT, int(match[2]), int(match[3] or 0)))
        return [(match[1], self._folder.part(self._job, match[0])) for match in names]

    def _put(self, kind: str, records: Sequence[tuple[int, bytes]]) -> None:
        log = self._logs.get(kind)
        if log is None:
            log = self._logs[kind] = self._folder.log(self._job, f"{kind}.{self._generation}")
        together = range(0, len(records), TOGETHER)
        log.append(b"".join([b"%d %b\n" % record for record in records[at : at + TOGETHER]]) for at in together)


LEASE = 15.0  # Seconds after which another process may take over a job if its holder doesn't renew its lease.
TICK = 1.0  # Seconds between writes of a job's progress and records.
RENEW = 5.0  # Seconds between writes that renew a job's lease if there is no progress.
AHEAD = 512  # Number of ready parts of a job's lines at which reading stops.
AHEAD_BYTES = 8 << 20  # Bytes of a job's lines and outputs in memory at which reading stops.
YIELD = 16  # Parts of lines to read before yielding to the event loop.
PAUSE = 5.0  # Seconds before a failed disk operation is retried.

_NOT_VALID = (
    "the API key that created this batch is no longer valid: it was revoked or deleted, it has expired, or its tier was removed; "
    "the files contain the lines that had finished by then, and the others did not run"
)
_NO_FILE = JobFault("no_input_file", "the input file no longer exists")


class Fenced(Exception):
    """Another process holds the job now."""


class JobContext(NamedTuple):
    """Context shared by all jobs of a process."""

    store: BulkStore
    folder: BulkFolder
    runner: BulkRunner
    form: LineForm
    turns: Turns
    wake: Callable[[str], None]  # Called with each model that has new ready lines.
    clock: Callable[[], float]
    wall: Callable[[], float]  # Returns Unix time in seconds.
    new_id: Callable[[], str]
    most_line: int  # Maximum length of a line in bytes.
    most_lines: int  # Maximum number of lines in a job.
    most: Stored  # Quota for stored files. A tenant that exceeds it can't start jobs.
    lines: defaultdict[str, int]  # Counts the lines that were `answered` or `failed`.
    allowed: Callable[[BulkJob], tuple[str, ...] | None]  # Models for a job, or () for all; None if its key is invalid.


class JobLines:
    """Lines of a running job, from reading to record. `moved` is set when waiting callers should check again."""

    def __init__(self, job: BulkJob, context: JobContext, answers: AnswerLog) -> None:
        self._job, self._tenant = job.id, job.tenant
        self._of = context
        self._answers = answers
        self._asked: dict[int, AskedLine] = {}  # Lines that are ready or in flight, by number.
        self._ready: dict[tuple[int, int], BulkLine] = {}  # Unsent parts of lines, by line and part number.
        self._making: deque[tuple[int, Making]] = deque()  # Finished lines, with the writers of their records.
        self._over: set[int] = set()  # Numbers of failed lines whose other parts may be in flight.
        self._made = asyncio.Event()
        self._bytes = 0
        self._held_back = False
        self.all_read = False
        self.moved = asyncio.Event()

    def __contains__(self, number: int) -> bool:
        return number in self._answers.answered or number in self._asked

    @property
    def models(self) -> Iterable[str]:
        """Models of the lines that are ready or in flight."""
        return dict.fromkeys(asked.parts[0].model for asked in self._asked.values())

    @property
    def all_ended(self) -> bool:
        return self.all_read and not self._asked

    def add(self, number: int, asked: AskedLine) -> None:
        self._asked[number] = asked
        self._ready.update({(number, part.part): part for part in asked.parts})
        self._bytes += asked.size
        if not self._held_back:
            self._of.turns.add(asked.parts)
            self._of.wake(asked.parts[0].model)

    def wants(self, line: BulkLine) -> bool:
        """Return True if this part of a line still has to run: it hasn't been sent, and no other part has failed."""
        return (line.number, line.part) in self._ready

    def went(self, line: BulkLine) -> None:
        self._ready.pop((line.number, line.part), None)
        self.moved.set()

    def ended(self, line: BulkLine, reply: Reply) -> None:
        """Handle the reply to a line, or to one part of it."""
        asked = self._asked.get(line.number)
        if asked is None:
            return
        held = asked.held
        making = asked.take(line.part, reply)
        self._bytes += asked.held - held
        if making is None:
            return
        if asked.failure is not None and len(asked.parts) > 1:
            for part in asked.parts:
                self._ready.pop((part.number, part.part), None)
            if not self._over:
                asyncio.get_running_loop().call_soon(self._withdraw_parts)
            self._over.add(line.number)
        if not self._further(line.number, making):
            self._making.append((line.number, making))
            self._made.set()

    def _withdraw_parts(self) -> None:
        """Withdraw the other parts of all failed lines in one call, because the lines of a batch usually fail together."""
        over, self._over = self._over, set()
        if over:
            self._of.runner.withdraw(self._job, over)

    def _further(self, number: int, making: Making) -> bool:
        """Write the next piece of a line's record. Return True if it was the last piece."""
        result = next(making)
        if result is None:
            return False
        asked = self._asked.pop(number)
        self._bytes -= asked.size + asked.held
        answered, record = result
        self.record(OUT if answered else ERR, number, record)
        self.moved.set()
        return True

    async def make(self) -> None:
        """Write long records in pieces, so that they don't block the event loop."""
        while True:
            while self._making:
                await asyncio.sleep(0)
                number, making = self._making[0]
                if self._further(number, making):
                    self._making.popleft()
            self._made.clear()
            await self._made.wait()

    def record(self, kind: str, number: int, record: bytes) -> None:
        self._answers.add(kind, number, record)
        self._of.lines["answered" if kind == OUT else "failed"] += 1
        if self._answers.full:
            self.moved.set()

    async def room(self) -> None:
        """Wait until another line may be read."""
        while (
            self._held_back
            or self._answers.full
            or len(self._ready) >= AHEAD
            or (self._bytes >= AHEAD_BYTES and self._asked)
        ):
            self.moved.clear()
            await self.moved.wait()

    async def wait(self, seconds: float, disk_works: bool) -> None:
        """Wait until all lines have ended, the log is full and can be written (`disk_works`), or `seconds` have passed."""
        end = self._of.clock() + seconds
        while (left := end - self._of.clock()) > 0 and not (self.all_ended or (self._answers.full and disk_works)):
            self.moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.moved.wait()

    def hold_back(self, pausing: bool) -> None:
        """Send no more lines to the runner while the job is pausing."""
        if pausing == self._held_back:
            return
        self._held_back = pausing
        if pausing:
            self._of.turns.drop(self._tenant, self._job)
        else:
            self._of.turns.add(self._ready.values())
            for model in {line.model for line in self._ready.values()}:
                self._of.wake(model)
        self.moved.set()

    def let_go(self) -> None:
        """Withdraw and forget all lines without a record."""
        self._of.turns.drop(self._tenant, self._job)
        self._of.runner.withdraw(self._job)
        self._asked.clear()
        self._ready.clear()
        self._making.clear()
        self._over.clear()
        self._bytes = 0


class JobRun:
    """Run of one claimed job. `job` is its current state."""

    def __init__(self, job: BulkJob, context: JobContext) -> None:
        self.job = job
        self._of = context
        self._answers = AnswerLog(context.folder, job.id, job.generation)
        self.lines = JobLines(job, context, self._answers)
        self._kept = self._written = context.clock()
        self._shown = job
        self.disk_trouble = self._store_trouble = self._in_doubt = ""
        self._fault: JobFault | None = None
        self._barred: JobFault | None = None

    async def run(self) -> None:
        """Run the job until it has ended. Raises Fenced if another process holds it now."""
        try:
            if self.job.status is JobStatus.VALIDATING:
                await self._until_done(self._validate)
            if self.job.status is JobStatus.IN_PROGRESS:
                await self._until_done(self._answers.recover)
                await self._answer()
            if self.job.status is JobStatus.FINALIZING:
                await self._until_done(self._name_files)
                await self._until_done(self._finalize)
        finally:
            self.lines.let_go()
            self._answers.close()

    def hurry(self) -> None:
        """Check soon whether the client has cancelled the job."""
        self._written -= RENEW

    def standing(self) -> BulkJob:
        """Return the job with its current progress and delay, which the store may not know yet."""
        counts, runner, tenant = self._answers.counts, self._of.runner, self.job.tenant
        paused = self.disk_trouble or self._store_trouble or self._in_doubt
        waits, until = "", 0.0
        if not paused:
            paused = next(filter(None, (runner.paused(model, tenant) for model in self.lines.models)), "")
            wait = next(filter(None, (runner.waits(model, tenant) for model in self.lines.models)), None)
            if wait is not None and paused in ("", wait[0]):
                waits, seconds = ("" if paused else wait[0]), wait[1]
                until = float(round(self._of.wall() + seconds)) if seconds < math.inf else 0.0
        job = replace(self.job, delay=JobDelay(paused, waits, until))
        if job.status is not JobStatus.IN_PROGRESS:
            return job
        return replace(job, completed=counts[OUT], failed=counts[ERR])

    @property
    def is_held_up(self) -> bool:
        """True if the job is paused for any reason other than its tenant's lines."""
        if self.disk_trouble or self._store_trouble or self._in_doubt:
            return True
        return any(map(self._of.runner.paused, self.lines.models))

    async def release(self) -> None:
        """Write all records, and let another process claim the job immediately."""
        self.lines.let_go()
        with contextlib.suppress(StoreUnavailable):
            if self._answers.dirty:
                await self._answers.flush()
            if not self.job.status.ended:
                await self._of.store.keep(self.standing(), 0.0)
        self._answers.close()

    async def _validate(self) -> None:
        total, of = 0, self._of
        stored = await of.store.stored(self.job.tenant)
        for code, number, most in (
            ("too_many_bytes", stored.size, of.most.size),
            ("too_many_files", stored.number, of.most.number),
        ):
            if number > most:
                unit = code.rpartition("_")[2]
                message = f"you store more than {most} {unit}; delete some files, then create the batch again"
                await self._fail(JobFault(code, message))
                return
        path = of.folder.file(self.job.input_file)
        async with aclosing(pages(of.folder, path, of.most_line)) as line_pages:
            async for page in line_pages:
                total += len(page)
                await self._beat()
                if self._ending() is not None:
                    break
        if self._ending() is not None:
            await self._reach(JobStatus.IN_PROGRESS)
        elif not total:
            await self._fail(JobFault("empty_file", "the input file has no lines"))
        elif total > of.most_lines:
            message = f"the input file has more than {of.most_lines} lines, the maximum for a batch"
            await self._fail(JobFault("too_many_lines", message, of.most_lines + 1))
        else:
            await self._reach(JobStatus.IN_PROGRESS, total=total)

    async def _answer(self) -> None:
        """Run lines until all are answered, the job expires, its client cancels it, or its key becomes invalid."""
        tasks = [asyncio.create_task(step()) for step in (self._read, self.lines.make)]
        try:
            while not self.lines.all_ended and self._ending() is None and self._fault is None:
                for task in tasks:
                    if task.done():
                        task.result()
                await self.lines.wait(TICK, not self.disk_trouble)
                await self._tick()
        finally:
            done = self.lines.all_ended
            await end(*tasks)
            self.lines.let_go()
        await self._until_done(self._answers.flush)
        if self._fault is not None:
            await self._until_done(partial(self._fail, self._fault))
            return
        ending = JobStatus.COMPLETED if done else self._ending()
        self.job = replace(self.standing(), delay=JobDelay())
        if ending is JobStatus.FAILED and self._barred is not None:
            self.job = replace(self.job, faults=(*self.job.faults, self._barred))
        await self._until_done(partial(self._reach, JobStatus.FINALIZING, ending=ending))

    async def _name_files(self) -> None:
        """Choose new names for the output files, so that a previous holder can't overwrite them if it resumes."""
        of = self._of
        for id in filter(None, (self.job.output_file, self.job.error_file)):
            await of.store.remove_file(self.job.tenant, id)
            await of.folder.remove_file(id)
        names = {name: f"file-{of.new_id().replace('-', '')}" for name in ("output_file", "error_file")}
        await self._keep(replace(self.job, **names))

    async def _finalize(self) -> None:
        of, job = self._of, self.job
        out, err = of.folder.writer(job.output_file), of.folder.writer(job.error_file)
        counts = {OUT: 0, ERR: 0}
        try:
            seen = LineSet()
            async with aclosing(self._answers.records()) as record_pages:
                async for page in record_pages:
                    for kind, writer in ((OUT, out), (ERR, err)):
                        await writer.write([record + b"\n" for of_kind, _, record in page if of_kind == kind])
                    for kind, number, _ in page:
                        seen.add(number)
                        counts[kind] += 1
                    await self._beat()
            changes: dict[str, Any] = {}
            if job.ending is JobStatus.EXPIRED:
                try:
                    counts[ERR] += await self._write_expired(err, seen)
                except FileLost:
                    changes["faults"] = (*job.faults, _NO_FILE)
            changes.update(completed=counts[OUT], failed=counts[ERR])
            for kind, name, writer in ((OUT, "output_file", out), (ERR, "error_file", err)):
                if counts[kind]:
                    shown = f"{job.id}_{'output' if kind == OUT else 'error'}.jsonl"
                    await self._add_file(getattr(job, name), shown, writer)
                else:
                    changes[name] = ""
        finally:
            await out.discard()
            await err.discard()
        await self._reach(job.ending or JobStatus.COMPLETED, 0.0, **changes)
        await of.folder.remove_job(job.id)

    async def _add_file(self, id: str, name: str, writer: FileWriter) -> None:
        of = self._of
        await writer.commit()
        file = BulkFile(id, self.job.tenant, name, writer.size, "batch_output", of.wall())
        if not await of.store.add_file(file, holder=self.job):
            raise Fenced

    async def _write_expired(self, err: FileWriter, seen: LineSet) -> int:
        """Write an error for each line that has no record. Return the number of errors. Raises FileLost."""
        of, count = self._of, 0
        path = of.folder.file(self.job.input_file)
        async with aclosing(pages(of.folder, path, of.most_line)) as line_pages:
            async for page in line_pages:
                errors = [of.form.expired(number, text) + b"\n" for number, text in page if seen.add(number)]
                await err.write(errors)
                count += len(errors)
                await self._beat()
        return count

    async def _fail(self, fault: JobFault) -> None:
        await self._reach(JobStatus.FAILED, 0.0, faults=(*self.job.faults, fault))
        await self._of.folder.remove_job(self.job.id)

    async def _read(self) -> None:
        while not self.lines.all_read:
            try:
                await self._read_on()
                self.lines.all_read = True
            except FileLost:
                self._fault = _NO_FILE
                return
            except FolderUnavailable as exc:
                self._note_disk(exc)
                await asyncio.sleep(PAUSE)
        self.lines.moved.set()

    async def _read_on(self) -> None:
        of, done = self._of, 0
        async with aclosing(pages(of.folder, of.folder.file(self.job.input_file), of.most_line)) as line_pages:
            async for page in line_pages:
                for number, text in page:
                    if number in self.lines:
                        continue
                    await self.lines.room()
                    while True:
                        if taken := await self._read_line(number, text):
                            break
                        await asyncio.sleep(PAUSE)
                    done += taken
                    if done >= YIELD:
                        done = 0
                        await asyncio.sleep(0)

    async def _read_line(self, number: int, text: bytes) -> int:
        """Make a line ready, or record its error. Return its number of parts, or 0 if the line can't be checked yet."""
        try:
            asked = await in_turns(self._of.form.read(self.job, number, text))
            self._in_doubt = ""
        except NotYet as exc:
            self._in_doubt = str(exc)
            return 0
        if isinstance(asked, bytes):
            self.lines.record(ERR, number, asked)
            return 1
        if not self.job.model:
            self.job = replace(self.job, model=asked.parts[0].model)
        self.lines.add(number, asked)
        return len(asked.parts)

    def _ending(self) -> JobStatus | None:
        if self.job.cancelling_at is not None:
            return JobStatus.CANCELLED
        self._look_at_key()
        if self._barred is not None:
            return JobStatus.FAILED
        return JobStatus.EXPIRED if self._of.wall() >= self.job.expires_at else None

    def _look_at_key(self) -> None:
        """End the job if its API key no longer allows it. Lines that have already run keep their answers."""
        models, job = self._of.allowed(self.job), self.job
        if models is None:
            self._barred = JobFault("key_not_valid", _NOT_VALID)
        elif models != job.models:
            self.job = replace(job, models=models)  # Later lines are checked against these.
            lost = [model for model in (job.model, *self.lines.models) if model and models and model not in models]
            if lost:
                message = f"the API key that created this batch may no longer use the model {lost[0]}"
                self._barred = JobFault("model_not_allowed", message)

    async def _tick(self) -> None:
        try:
            await self._answers.flush()
            self.disk_trouble = ""
            self.lines.moved.set()
        except FolderUnavailable as exc:
            self._note_disk(exc)
        with contextlib.suppress(BrokerUnavailable):
            await self._of.runner.look()
        with contextlib.suppress(StoreUnavailable):  # `_keep` has recorded it.
            await self._beat()
        self.lines.hold_back(bool(self.disk_trouble or self._store_trouble))

    async def _beat(self) -> None:
        """Save the progress if it is time to. Raises Fenced or StoreUnavailable."""
        waited = self._of.clock() - self._written
        if waited < TICK:
            return
        standing = self.standing()
        if standing != self._shown or waited >= RENEW or self._store_trouble:
            await self._keep(standing)

    async def _keep(self, job: BulkJob, seconds: float | None = None) -> None:
        began = self._of.clock()
        try:
            kept = await self._of.store.keep(job, LEASE if seconds is None else seconds)
        except StoreUnavailable as exc:
            if began - self._kept > LEASE:
                self._note_store(exc)
            raise
        if kept is None:
            raise Fenced
        if self._store_trouble:
            log.info("bulk job resumed", job=job.id)
        self._kept = self._written = began
        self._store_trouble = ""
        self._shown, self.job = job, kept

    async def _reach(self, status: JobStatus, seconds: float | None = None, **changes: Any) -> None:
        reached = {**self.job.reached, status.value: self._of.wall()}
        await self._keep(replace(self.job, status=status, reached=reached, **changes), seconds)

    async def _until_done(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
                self.disk_trouble = ""
                return
            except FileLost as exc:
                if self.job.status is JobStatus.VALIDATING:
                    step = partial(self._fail, _NO_FILE)
                    continue
                self._note_disk(exc)
            except FolderUnavailable as exc:
                self._note_disk(exc)
            except StoreUnavailable as exc:
                self._note_store(exc)
            await asyncio.sleep(PAUSE)
            with contextlib.suppress(StoreUnavailable):
                await self._beat()

    def _note_disk(self, exc: FolderUnavailable) -> None:
        if not self.disk_trouble:
            log.warning("a bulk job pauses", job=self.job.id, error=why(exc))
        self.disk_trouble = str(exc)

    def _note_store(self, exc: StoreUnavailable) -> None:
        if not self._store_trouble:
            log.warning("a bulk job pauses", job=self.job.id, error=str(exc))
        self._store_trouble = "the database is unreachable"  # Clients needn't know where it is.

"""Bulk jobs of one process: a feeder runs them, and a sweeper removes old files.

    store ─claim─▶ job run ─ready lines─▶ turns ─as many as there is room for─▶ runner ─replies─▶ job run

A job is held by one gateway of the fleet at a time. Only a few jobs of a tenant run at the same time, and tenants take
turns line by line, so a tenant with many jobs doesn't delay others."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial

from msgspec.structs import replace

from headway.bulk.folder import BulkFolder
from headway.bulk.job_run import LEASE, Fenced, JobContext, JobRun
from headway.config import Settings
from headway.core.budget import Budget
from headway.errors import RATE_LIMITED, SERVICE_OVERLOADED, PayloadTooLarge, RequestError, StoreUnavailable
from headway.model import Reply
from headway.model.bulk import OPEN_STATUSES, BulkJob, BulkLine, Stored
from headway.ports import BulkStore
from headway.runtime.availability import Availability
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic
from headway.runtime.race import TIDIES, end
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

LOOK_EVERY = 5.0  # Seconds between searches for jobs that nobody holds.
SHARE = 4  # Maximum number of running jobs of one tenant, in the whole fleet.
MOST_RUNS = 64  # Maximum number of jobs that one process holds.
SPIN = 0.05  # Seconds of pause if the runner has no room for any tenant with lines.
AGAIN = 1.0  # Seconds of pause after the runner has failed.


class Feeder:
    """Claims jobs, runs them, and sends their lines to the runner. `owner` must be unique in the fleet. `wake` of the
    context is ignored. `ended` is called with each job that has ended. `runs` contains the runs of the held jobs by id."""

    def __init__(self, owner: str, context: JobContext, ended: Callable[[BulkJob], None] = lambda job: None) -> None:
        self._owner = owner
        self._of = context._replace(wake=self._wake)
        self._ended = ended
        self.runs: dict[str, JobRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._availability = Availability("bulk jobs", context.clock, "ledger")

    @property
    def statuses(self) -> dict[str, int]:
        """Number of held jobs by status."""
        held = Counter(run.job.status.value for run in self.runs.values())
        return {status.value: held[status.value] for status in OPEN_STATUSES}

    @property
    def paused(self) -> int:
        """Number of held jobs that are paused, not counting those whose own lines are the cause."""
        return sum(run.is_held_up for run in self.runs.values())

    @property
    def store_trouble(self) -> str:
        """Why the job database is unavailable, or "" while it responds."""
        return self._availability.error

    @property
    def folder_trouble(self) -> str:
        """Why the files of a held job are unavailable, or "" if all are available."""
        return next((run.disk_trouble for run in self.runs.values() if run.disk_trouble), "")

    def start(self, supervisor: Supervisor) -> None:
        supervisor.start("bulk jobs", self._look)

    def tell(self) -> None:
        """Look for jobs that nobody holds, without waiting for the next search."""
        self._news.set()

    def hurry(self, job: str) -> None:
        """Check soon whether the client has cancelled a job."""
        if (run := self.runs.get(job)) is not None:
            run.hurry()

    async def close(self) -> None:
        """Release all jobs, so that other processes can claim them immediately."""
        runs = [*self.runs.values()]
        await end(*self._tasks.values(), *self._pumps.values(), tidies=TIDIES)
        await asyncio.gather(*(run.release() for run in runs), return_exceptions=True)

    async def _look(self) -> None:
        while True:
            began = self._of.clock()
            try:
                while len(self.runs) < MOST_RUNS and (job := await self._of.store.claim(self._owner, LEASE, SHARE)):
                    await self._begin(job)
                self._availability.over()
            except StoreUnavailable as exc:
                self._availability.failed(began, exc)
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY):
                    await self._news.wait()

    async def _begin(self, job: BulkJob) -> None:
        if (before := self._tasks.get(job.id)) is not None:
            # Its lease expired and this process claimed it again, so the previous run is fenced.
            await end(before, tidies=TIDIES)
        log.info("a bulk job runs here", job=job.id, tenant=job.tenant, generation=job.generation)
        run = self.runs[job.id] = JobRun(job, self._of)
        task = self._tasks[job.id] = asyncio.create_task(self._hold(run), name=f"bulk job {job.id}")
        task.add_done_callback(partial(self._over, run))

    async def _hold(self, run: JobRun) -> None:
        try:
            await run.run()
        except Fenced:
            log.warning("another process holds a bulk job now", job=run.job.id)
            return
        job = run.job
        log.info(
            "a bulk job has ended", job=job.id, tenant=job.tenant, status=job.status.value, total=job.total,
            completed=job.completed, failed=job.failed,
        )  # fmt: skip
        self._ended(job)

    def _over(self, run: JobRun, task: asyncio.Task[None]) -> None:
        if self.runs.get(run.job.id) is run:
            del self.runs[run.job.id]
            self._tasks.pop(run.job.id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a bulk job was interrupted and will be resumed", job=run.job.id, exc_info=error)
        self.tell()

    def _wake(self, model: str) -> None:
        if model not in self._pumps:
            self._pumps[model] = asyncio.create_task(self._pump(model), name=f"bulk lines of {model}")

    async def _pump(self, model: str) -> None:
        try:
            while model in self._of.turns:
                try:
                    await self._send(model)
                except Exception as exc:
                    log.error("the bulk line runner failed", model=model, exc_info=exc)
                    await asyncio.sleep(AGAIN)
        finally:
            del self._pumps[model]

    async def _send(self, model: str) -> None:
        runner, turns, sent = self._of.runner, self._of.turns, 0
        room = await runner.room(model)
        while sent < room and (line := turns.take(model, partial(self._rests, model))) is not None:
            if (run := self.runs.get(line.job)) is None or not run.lines.wants(line):
                continue
            try:
                runner.offer((line,), self._done)
            except Exception:
                turns.add((line,))
                raise
            run.lines.went(line)
            sent += 1
        if not sent:
            await asyncio.sleep(SPIN)

    def _rests(self, model: str, tenant: str) -> bool:
        return self._of.runner.full(tenant) or bool(self._of.runner.paused(model, tenant))

    def _done(self, line: BulkLine, reply: Reply) -> None:
        if (run := self.runs.get(line.job)) is not None:
            run.lines.ended(line, reply)


SWEEP_EVERY = 60.0  # Seconds between removals of old files.
STRAYS_EVERY = 3_600.0  # Seconds between searches for files that belong to no job.
BITE = 100  # Old files or jobs to request from the store in one call.
TRANSFERS = 128
"""Maximum number of concurrent uploads and downloads. A tenant may have nine times as many as are free, or 115 if no other has any."""
PAGE = 1_000  # Ids to request from the store in one call.
DAY = 86_400.0


class BulkJobs:
    """Bulk jobs of one process. `most` is how much a tenant may store. `wall` returns Unix time in seconds."""

    def __init__(
        self,
        store: BulkStore,
        folder: BulkFolder,
        feeder: Feeder,
        settings: Settings,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.store, self.folder, self.feeder, self.settings = store, folder, feeder, settings
        self.most = Stored(settings.bulk_max_bytes, settings.bulk_max_files)
        self.wall = wall
        self._uploading = Counter[str]()  # Bytes that each tenant is uploading.
        self._transfers = Budget(TRANSFERS)
        self._strays_at = 0.0
        self._sweeper = Periodic("bulk files", self.sweep, clock, "ledger", SWEEP_EVERY)

    async def open(self) -> None:
        await self.folder.open()
        await self.store.open()

    def start(self, supervisor: Supervisor) -> None:
        self.feeder.start(supervisor)
        self._sweeper.start(supervisor)

    async def close(self) -> None:
        await self.feeder.close()
        await self.store.close()

    async def job(self, tenant: str, id: str) -> BulkJob | None:
        """Return a job. If this process runs it, include its current delay, which the store may not know.
        Raises StoreUnavailable if the store doesn't respond and this process doesn't run the job."""
        run = self.feeder.runs.get(id)
        current = run.standing() if run is not None and run.job.tenant == tenant else None
        try:
            stored = await self.store.job(tenant, id)
        except StoreUnavailable:
            if current is None:
                raise
            return current
        if current is None or stored is None or stored.generation != current.generation or stored.status.ended:
            return stored
        return replace(stored, delay=current.delay)

    def begin_transfer(self, tenant: str) -> Callable[[], None]:
        """Count a file transfer. Return a function to call when it ends. Raises RequestError if too many are in progress."""
        if self._transfers.take(tenant, 1):
            return partial(self._transfers.give, tenant, 1)
        used = self._transfers.used(tenant)
        if not used:
            message = f"{TRANSFERS} files are being transferred, the maximum; try again when some have finished"
            raise RequestError(message, code=SERVICE_OVERLOADED, retry_after=1.0, reason="files")
        message = f"{used} of your files are being transferred; let some finish before you start another"
        raise RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="files")

    @contextlib.asynccontextmanager
    async def upload(self, tenant: str) -> AsyncIterator[Callable[[int], None]]:
        """Count the bytes of an upload. The block reports them by calling the yielded function. Raises PayloadTooLarge,
        here or in that function, if the tenant would exceed its quota."""
        stored, held = await self.store.stored(tenant), 0
        if stored.number >= self.most.number:
            raise self.too_much()

        def count(more: int) -> None:
            nonlocal held
            if stored.size + self._uploading[tenant] + more > self.most.size:
                raise self.too_much()
            held += more
            self._uploading[tenant] += more

        try:
            yield count
        finally:
            self._uploading[tenant] -= held
            if not self._uploading[tenant]:
                del self._uploading[tenant]

    def too_much(self) -> PayloadTooLarge:
        """Return the error for a file that exceeds the tenant's quota."""
        return PayloadTooLarge(
            f"this would exceed your quota of {self.most.number} files and {self.most.size} bytes in total (bulk_max_bytes); "
            "delete some files that you no longer need"
        )

    async def sweep(self) -> None:
        """Remove old files and jobs, and files left behind by dead processes. Raises StoreUnavailable."""
        await self.folder.do(self.folder.remove_left)
        if self.wall() >= self._strays_at:
            await self._sweep_strays()
            self._strays_at = self.wall() + STRAYS_EVERY
        if not self.settings.keep_days:
            return
        before = self.wall() - self.settings.keep_days * DAY
        while files := await self.store.old_files(before, BITE):
            for file in files:
                if await self.store.remove_file(file.tenant, file.id):
                    await self.folder.remove_file(file.id)
        while await self.store.remove_jobs(before, BITE):
            pass

    async def _sweep_strays(self) -> None:
        """Remove files that belong to no job or upload, because a process died while it created or deleted them. The files
        are listed before the store is read, so newer files are kept. Output files of a job that is being finalized are
        known from the job, or from their own rows."""
        names = await self.folder.names()
        unknown = set(names)
        after = ""
        while jobs := await self.store.open_jobs(after, PAGE):
            unknown -= {name for job in jobs for name in (job.id, job.output_file, job.error_file)}
            after = jobs[-1].id
        after = ""
        while ids := await self.store.file_ids(after, PAGE):
            unknown.difference_update(ids)
            after = ids[-1]
        strays = [name for name in unknown if names[name]]
        if len(strays) > len(names) - len(unknown):
            log.warning(
                "most bulk files belong to no known job, so no file was removed; is this the wrong database?",
                number=len(strays),
            )
            return
        for name in strays:
            log.info("removing a file that belongs to no bulk job", file=name)
            await (self.folder.remove_job(name) if name.startswith("batch_") else self.folder.remove_file(name))

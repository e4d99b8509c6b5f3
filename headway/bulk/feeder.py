"""The feeder of a process: it claims bulk jobs, and sends their ready lines to the runner.

    store ─claim─▶ job run ─ready lines─▶ turns ─as many as there is room for─▶ runner ─replies─▶ job run

A job is held by one gateway of the fleet at a time. Only a few jobs of a tenant run at the same time, and tenants take
turns line by line, so a tenant with many jobs doesn't delay others."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial

from headway.bulk.job_run import LEASE, Fenced, JobContext, JobRun
from headway.errors import StoreUnavailable
from headway.model import Reply
from headway.model.bulk import OPEN_STATUSES, BulkJob, BulkLine
from headway.runtime.availability import Availability
from headway.runtime.logger import get_logger
from headway.runtime.race import TIDIES, end
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

LOOK_EVERY = 5.0  # Seconds between searches for jobs that nobody holds.
SHARE = 4  # Maximum number of running jobs of one tenant, in the whole fleet.
MOST_RUNS = 64  # Maximum number of jobs that one process holds.
SPIN = 0.05  # Seconds of pause if the runner has no room for any tenant with lines.
AGAIN = 1.0  # Seconds of pause after the runner has failed.


class Feeder:
    """Claims jobs, runs them, and sends their lines to the runner. `owner` must be unique in the fleet. The context's
    `wake` is ignored. `ended` is called with each job that has ended. `runs` contains the runs of the held jobs by id."""

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
            log.warning("another process took over a bulk job", job=run.job.id)
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

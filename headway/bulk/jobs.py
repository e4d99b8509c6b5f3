"""Bulk jobs of one process: their store, their folder and the feeder, and what removes files that are old."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial

from msgspec.structs import replace

from headway.bulk.feeder import Feeder
from headway.bulk.folder import BulkFolder
from headway.config import Settings
from headway.core.budget import Budget
from headway.errors import RATE_LIMITED, SERVICE_OVERLOADED, PayloadTooLarge, RequestError, StoreUnavailable
from headway.model.bulk import BulkJob, Stored
from headway.ports import BulkStore
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

SWEEP_EVERY = 60.0
"""Seconds between two looks for what is old."""
STRAYS_EVERY = 3_600.0
"""Seconds between two looks for what is nobody's."""
BITE = 100
"""Most files, and most jobs, that are asked for at once."""
TRANSFERS = 128
"""Files that are on their way in or out at once. A tenant may have at most nine times as many as are free: 115 alone."""
PAGE = 1_000
"""Ids that are asked for at once."""
DAY = 86_400.0


class BulkJobs:
    """Bulk jobs of one process; see `headway.app.lifecycle.Resource`.

    Arguments:
        store: where jobs are.
        folder: where files are.
        feeder: feeder of the jobs.
        settings: quotas of tenants, and the age at which files are removed.
        clock: monotonic seconds.
        wall: Unix time in seconds.

    Attributes:
        store, folder, feeder, settings: see the arguments.
        most: files that a tenant may store.
    """

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
        self._uploading = Counter[str]()
        """Bytes that are on their way in, by tenant."""
        self._transfers = Budget(TRANSFERS)
        self._strays_at = 0.0
        self._sweeper = Periodic("bulk files", self.sweep, clock, "ledger", SWEEP_EVERY)

    async def open(self) -> None:
        """Open folder and store."""
        await self.folder.open()
        await self.store.open()

    def start(self, supervisor: Supervisor) -> None:
        """Start to look for jobs, and for what is old."""
        self.feeder.start(supervisor)
        self._sweeper.start(supervisor)

    async def close(self) -> None:
        """Let go of all jobs; others may hold them at once."""
        await self.feeder.close()
        await self.store.close()

    async def job(self, tenant: str, id: str) -> BulkJob | None:
        """Return the job of an id. Of one that runs here it is told why it pauses even where the store cannot take that.

        Raises:
            StoreUnavailable: the store does not answer, and the job does not run here.
        """
        run = self.feeder.runs.get(id)
        held = run.standing() if run is not None and run.job.tenant == tenant else None
        try:
            found = await self.store.job(tenant, id)
        except StoreUnavailable:
            if held is None:
                raise
            return held
        if held is None or found is None or found.generation != held.generation or found.status.ended:
            return found
        return replace(found, paused=held.paused, waits=held.waits, waits_until=held.waits_until)

    def begin_transfer(self, tenant: str) -> Callable[[], None]:
        """Count a file of a tenant's that is on its way in or out. Returns what is called once at its end.

        Raises:
            RequestError: there are too many at once.
        """
        if self._transfers.take(tenant, 1):
            return partial(self._transfers.give, tenant, 1)
        used = self._transfers.used(tenant)
        if not used:
            message = f"{TRANSFERS} files are on their way, the most at once; ask again when some have ended"
            raise RequestError(message, code=SERVICE_OVERLOADED, retry_after=1.0, reason="files")
        message = f"{used} files of yours are on their way in or out; end some before you begin another"
        raise RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="files")

    @contextlib.asynccontextmanager
    async def upload(self, tenant: str) -> AsyncIterator[Callable[[int], None]]:
        """Count the bytes of an upload while it is on its way: the block calls for each piece's bytes.

        Raises:
            PayloadTooLarge: the tenant would store too much.
        """
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
        """Return the error of a file for which its tenant has no room."""
        return PayloadTooLarge(
            f"you may store {self.most.number} files of {self.most.size} bytes together (bulk_max_bytes), "
            "and this would be more; delete some that you no longer need"
        )

    async def sweep(self) -> None:
        """Remove files and jobs that are old, and what those have left behind who died. Raises StoreUnavailable."""
        await self.folder.sweep()
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
        """Remove files that are nobody's: their process died before it had told the store of them, or after.

        They are listed before the store is asked. So what comes meanwhile is not among them, and the output of a job that is
        finalized is named either by the job, or by its own row.
        """
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
                "most bulk files belong to no known job: is this the wrong database? No file was removed",
                number=len(strays),
            )
            return
        for name in strays:
            log.info("a file of bulk jobs is nobody's, and is removed", file=name)
            await (self.folder.remove_job(name) if name.startswith("batch_") else self.folder.remove_file(name))

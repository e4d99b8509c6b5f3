"""Bulk jobs of one process: quotas for files, and a sweeper that removes old files. `feeder` runs the jobs."""

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
        are listed before the store is read, so newer files are kept. The output files of a job that is being finalized are
        kept, too: the job names them, or they have rows of their own."""
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

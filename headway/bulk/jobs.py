"""Bulk jobs of one process: their store, folder and feeder, and the removal of old files."""

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
"""Seconds between two removals of old files."""
STRAYS_EVERY = 3_600.0
"""Seconds between two searches for files that belong to nobody."""
BITE = 100
"""Files or jobs to ask the store for in one call."""
TRANSFERS = 128
"""Upper bound on concurrent uploads and downloads. A tenant may have nine times as many as are free, so 115 if it is alone."""
PAGE = 1_000
"""Ids to ask for at once."""
DAY = 86_400.0


class BulkJobs:
    """Bulk jobs of one process. `most` has the bytes and files that a tenant may store. `wall` returns Unix time in seconds."""

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
        """Bytes that each tenant is uploading."""
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
        """Release all jobs, so that other processes can claim them at once."""
        await self.feeder.close()
        await self.store.close()

    async def job(self, tenant: str, id: str) -> BulkJob | None:
        """Return a job. If it runs here, include why it pauses even if the store doesn't know that. Raises StoreUnavailable if
        it doesn't run here and the store doesn't answer."""
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
        return replace(stored, paused=current.paused, waits=current.waits, waits_until=current.waits_until)

    def begin_transfer(self, tenant: str) -> Callable[[], None]:
        """Count a file transfer. Return the function to call once at its end. Raises RequestError if too many are under way."""
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
        """Count an upload's bytes, which the block reports by calls. Raises PayloadTooLarge if the tenant would store too
        much."""
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
            f"you may store {self.most.number} files of {self.most.size} bytes together (bulk_max_bytes), "
            "and this would be more; delete some that you no longer need"
        )

    async def sweep(self) -> None:
        """Remove old files and jobs, and what dead processes left behind. Raises StoreUnavailable."""
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
        """Remove files that belong to nobody, because their process died before or after it told the store about them.

        Listing the files before asking the store spares files that come later. The output of a job that is being finalized
        is known from the job or from its own row.
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
            log.info("removing a file that belongs to no bulk job", file=name)
            await (self.folder.remove_job(name) if name.startswith("batch_") else self.folder.remove_file(name))

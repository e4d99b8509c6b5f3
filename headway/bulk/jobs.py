"""Bulk jobs of one process: their store, their folder and the feeder, and what removes files that are old."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from msgspec.structs import replace

from headway.bulk.feeder import Feeder
from headway.bulk.folder import BulkFolder
from headway.config import Settings
from headway.errors import PayloadTooLarge, StoreUnavailable
from headway.model.bulk import BulkJob
from headway.ports import BulkStore
from headway.runtime.periodic import Periodic
from headway.runtime.supervisor import Supervisor

SWEEP_EVERY = 60.0
"""Seconds between two looks for what is old."""
BITE = 100
"""Most files, and most jobs, that are asked for at once."""
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
        jobs: number of jobs by status, as last looked at.
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
        self.wall = wall
        self._uploading = Counter[str]()
        """Bytes that are on their way in, by tenant."""
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
        """Job of an id. Of one that runs here it is told why it pauses even where the store cannot take that.

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
        return replace(found, paused=held.paused)

    @contextlib.asynccontextmanager
    async def upload(self, tenant: str) -> AsyncIterator[Callable[[int], None]]:
        """Count the bytes of an upload while it is on its way: the block calls for each piece's bytes.

        Raises:
            PayloadTooLarge: the tenant would store too much.
        """
        stored, held = await self.store.stored(tenant), 0
        most = self.settings.bulk_max_bytes

        def count(more: int) -> None:
            nonlocal held
            if stored + self._uploading[tenant] + more > most:
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
        """Error of a file for which its tenant has no room."""
        most = self.settings.bulk_max_bytes
        return PayloadTooLarge(
            f"your files would have more than {most} bytes together; delete some that you no longer need (bulk_max_bytes)"
        )

    async def sweep(self) -> None:
        """Remove files and jobs that are old, and what uploads have left behind. Raises StoreUnavailable."""
        await self.folder.sweep()
        if not self.settings.bulk_keep_days:
            return
        before = self.wall() - self.settings.bulk_keep_days * DAY
        while files := await self.store.old_files(before, BITE):
            for file in files:
                await self.store.remove_file(file.tenant, file.id)
                await self.folder.remove_file(file.id)
        while await self.store.remove_jobs(before, BITE):
            pass

"""Folder of bulk jobs: whole files by their ids, what is on its way in, and the logs of jobs.

    files/ID          whole files; one gets there by its last step, under its name at once
    incoming/…        files that are being written
    jobs/ID/…         logs of jobs that have not ended

Disks wait, so they are asked in threads. What they refuse is raised as FolderUnavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from headway.errors import FileLost, FolderUnavailable, SettingError

T = TypeVar("T")

CHUNK = 1 << 16
"""Bytes read at once: what is done with them takes the event loop for about a millisecond."""
BUFFER = 1 << 18
"""Bytes that are gathered before they are written."""
AT_ONCE = 4
"""Threads that ask the disk at once."""
LEFT_AFTER = 86_400.0
"""Seconds after which what nobody touches counts as left behind, if nobody knows it."""

Run = Callable[[Callable[[], object]], Awaitable[object]]
"""Runner of a function that waits for a disk."""


class BulkFolder:
    """Folder of a path.

    Arguments:
        path: the folder; it is made if need be.
        run: runs what waits for a disk; None: threads of its own.
    """

    def __init__(self, path: str, run: Run | None = None) -> None:
        self._path = Path(path)
        self._run: Run = run or self._in_thread
        self._free = asyncio.Semaphore(AT_ONCE)

    async def open(self) -> None:
        """Make the folder. Raises SettingError when it cannot be written to."""

        def make() -> None:
            for name in ("files", "incoming", "jobs"):
                (self._path / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            trial = self._incoming()
            trial.touch()
            trial.unlink()

        try:
            await self.do(make)
        except FolderUnavailable as exc:
            hint = "Name a folder that may be written to, which all gateways of a fleet share."
            raise SettingError("bulk_dir", str(self._path), str(exc.__cause__ or exc), hint) from exc

    async def do(self, work: Callable[[], T]) -> T:
        """Run what waits for the disk.

        Raises:
            FolderUnavailable: the disk did not do it; its cause is what the system said.
        """
        try:
            return await self._run(work)  # type: ignore[return-value]
        except OSError as exc:
            raise FolderUnavailable(f"the folder of bulk jobs does not do: {exc.strerror or exc}") from exc

    def writer(self) -> FileWriter:
        """Writer of a new file."""
        return FileWriter(self, self._incoming())

    def file(self, id: str) -> Path:
        """Path of a whole file."""
        return self._path / "files" / id

    def job(self, id: str) -> Path:
        """Path of the folder of a job's log."""
        return self._path / "jobs" / id

    async def remove_file(self, id: str) -> None:
        """Remove a file, if it is there."""
        await self.do(lambda: self.file(id).unlink(missing_ok=True))

    async def remove_job(self, id: str) -> None:
        """Remove the log of a job, if it is there."""
        await self.do(lambda: shutil.rmtree(self.job(id), ignore_errors=True))

    async def sweep(self) -> None:
        """Remove what was on its way in and left behind."""

        def remove() -> None:
            for one in (self._path / "incoming").iterdir():
                if _left(one):
                    one.unlink(missing_ok=True)

        await self.do(remove)

    async def names(self) -> dict[str, bool]:
        """Ids of files, and of jobs with a log, with whether nobody has touched them for long."""

        def found() -> dict[str, bool]:
            kinds = (("files", "file-*"), ("jobs", "batch_*"))
            return {one.name: _left(one) for folder, kind in kinds for one in (self._path / folder).glob(kind)}

        return await self.do(found)

    async def pieces(self, path: Path, size: int = CHUNK) -> AsyncGenerator[bytes, None]:
        """Read a file piece by piece. Raises FolderUnavailable, and FileLost where only the file is gone."""

        def opened() -> BinaryIO | None:
            try:
                return path.open("rb", buffering=0)
            except FileNotFoundError:
                path.parent.stat()  # Nor is that there when a folder of the network is not mounted.
                return None

        if (file := await self.do(opened)) is None:
            raise FileLost("the file is not there any more")
        try:
            while piece := await self.do(lambda: file.read(size)):
                yield piece
        finally:
            file.close()

    async def _in_thread(self, work: Callable[[], object]) -> object:
        async with self._free:
            return await asyncio.to_thread(work)

    def _incoming(self) -> Path:
        return self._path / "incoming" / secrets.token_hex(12)


class FileWriter:
    """Writer of one new file, which nobody sees before it is whole. Made by `BulkFolder.writer`.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, folder: BulkFolder, path: Path) -> None:
        self._folder, self._path = folder, path
        self._file: BinaryIO | None = None
        self._buffer: list[bytes] = []
        self._buffered = 0
        self.size = 0

    async def write(self, pieces: Sequence[bytes]) -> None:
        """Add pieces. Raises FolderUnavailable."""
        self._buffer += pieces
        more = sum(map(len, pieces))
        self._buffered += more
        self.size += more
        if self._buffered >= BUFFER:
            await self._flush()

    async def commit(self, id: str) -> None:
        """Make it the whole file of an id, in the place of one that is there. Raises FolderUnavailable."""
        await self._flush()
        await self._folder.do(lambda: self._settle(self._folder.file(id)))

    async def discard(self) -> None:
        """Let go of what has not become a file."""

        def remove() -> None:
            if self._file is not None:
                self._file.close()
            self._path.unlink(missing_ok=True)

        with contextlib.suppress(FolderUnavailable):
            await self._folder.do(remove)

    async def _flush(self) -> None:
        content = b"".join(self._buffer)
        self._buffer, self._buffered = [], 0

        def put() -> None:
            if self._file is None:
                self._file = self._path.open("xb", buffering=0)
            write_all(self._file, content)

        await self._folder.do(put)

    def _settle(self, path: Path) -> None:
        if self._file is None:
            raise RuntimeError("nothing was written")
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.rename(path)
        sync_folder(path.parent)


def _left(path: Path) -> bool:
    """Whether nobody has touched what stands at a path for long."""
    try:
        return path.stat().st_mtime < time.time() - LEFT_AFTER
    except FileNotFoundError:
        return False


def write_all(file: BinaryIO, content: bytes) -> None:
    """Write all of `content`; the system may take less at a time."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def sync_folder(path: Path) -> None:
    """Have the names in a folder survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

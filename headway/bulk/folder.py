"""Folder of bulk jobs: files by id, uploads, and the logs of jobs.

    files/ID          complete files, moved here in the last step
    incoming/…        files being written
    jobs/ID/…         logs of unfinished jobs

Disk operations block, so they run in threads. Their errors become FolderUnavailable."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from headway.errors import FileLost, FolderUnavailable, SettingError

T = TypeVar("T")

CHUNK = 1 << 16  # Bytes to read at a time. Processing them blocks the event loop for about a millisecond.
BUFFER = 1 << 18  # Bytes to collect before writing.
AT_ONCE = 4  # Maximum number of threads that use the disk at the same time.
LEFT_AFTER = 86_400.0  # Seconds since its last change after which an unknown file counts as abandoned.

Run = Callable[[Callable[[], object]], Awaitable[object]]  # Runs a blocking function.


class BulkFolder:
    """Folder at a path. `run` runs blocking functions; by default they run in threads."""

    def __init__(self, path: str, run: Run | None = None) -> None:
        self._path, self._shown = Path(path), path
        self._run: Run = run or self._in_thread
        self._free = asyncio.Semaphore(AT_ONCE)

    async def open(self) -> None:
        """Create the folder. Raises SettingError if it isn't writable."""
        try:
            await self.do(self.make)
        except FolderUnavailable as exc:
            hint = "Name a writable folder. All gateways of a fleet must share it."
            raise SettingError("bulk_dir", self._shown, why(exc), hint) from exc

    async def do(self, work: Callable[[], T]) -> T:
        """Run a blocking function. Raises FolderUnavailable from the OSError if the disk fails."""
        try:
            return await self._run(work)  # type: ignore[return-value]
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise FolderUnavailable("the disk of the bulk folder is full") from exc
            raise FolderUnavailable(f"the bulk folder cannot be used: {exc.strerror or exc}") from exc

    def writer(self, id: str) -> FileWriter:
        return FileWriter(self, self.sink(id))

    def file(self, id: str) -> str:
        return f"files/{id}"

    def part(self, job: str, name: str) -> str:
        return f"jobs/{job}/{name}"

    async def size(self, id: str) -> int:
        """Return the size of a complete file in bytes. Raises FolderUnavailable."""
        return await self.do(lambda: self.size_of(self.file(id)))

    async def remove_file(self, id: str) -> None:
        await self.do(lambda: self.remove(self.file(id)))

    async def remove_job(self, id: str) -> None:
        await self.do(lambda: self.remove_log(id))

    async def names(self) -> dict[str, bool]:
        """Return the ids of all files, and of all jobs with a log. Each value says whether the file or job is old."""
        return await self.do(self.list_names)

    async def pieces(self, name: str, size: int = CHUNK) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file in pieces. Raises FileLost if only this file is gone, or FolderUnavailable."""
        file: FileReader | None = None

        def read() -> bytes | None:
            nonlocal file
            try:
                file = file or self.reader(name)
                return file.read(size)
            except FileNotFoundError:
                self.look()
                return None

        try:
            while piece := await self.do(read):
                yield piece
        finally:
            if file is not None:
                file.close()
        if piece is None:
            raise FileLost("the file no longer exists")

    # Blocking functions, run by `do`.

    def make(self) -> None:
        """Create the folder, and check that it is writable."""
        for name in ("files", "incoming", "jobs"):
            (self._path / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        trial = self._incoming()
        trial.touch()
        trial.unlink()

    def look(self) -> None:
        """Raise FileNotFoundError if the folder is gone, for example because a network folder isn't mounted."""
        (self._path / "files").stat()

    def reader(self, name: str) -> FileReader:
        return LocalReader(self._path / name)

    def sink(self, id: str) -> FileSink:
        return LocalSink(self._incoming(), self._path / self.file(id))

    def size_of(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def begin_log(self, job: str) -> None:
        (self._path / "jobs" / job).mkdir(exist_ok=True, mode=0o700)

    def log(self, job: str, stem: str) -> PartLog:
        """Return the log of one holder of a job. The names of its files start with `stem`."""
        return LocalLog(self._path / self.part(job, f"{stem}.part"))

    def parts(self, job: str) -> list[str]:
        """Return the file names of a job's log. If the job has none, raise FileNotFoundError or return []."""
        return [path.name for path in (self._path / "jobs" / job).iterdir()]

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def remove_log(self, job: str) -> None:
        shutil.rmtree(self._path / "jobs" / job, ignore_errors=True)

    def remove_left(self) -> None:
        """Remove abandoned uploads."""
        for path in (self._path / "incoming").iterdir():
            if _left(path):
                path.unlink(missing_ok=True)

    def list_names(self) -> dict[str, bool]:
        kinds = (("files", "file-*"), ("jobs", "batch_*"))
        return {path.name: _left(path) for folder, kind in kinds for path in (self._path / folder).glob(kind)}

    async def _in_thread(self, work: Callable[[], object]) -> object:
        async with self._free:
            return await asyncio.to_thread(work)

    def _incoming(self) -> Path:
        return self._path / "incoming" / secrets.token_hex(12)


class FileReader(Protocol):
    """File that is read from its start. Its methods block."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, at most `size`, or b"" at the end."""

    def close(self) -> None: ...


class FileSink(Protocol):
    """New file, which is invisible to others until it is complete. Its methods block."""

    def write(self, content: bytes) -> None: ...

    def commit(self) -> None:
        """Give the file its final name. It then survives a crash."""

    def discard(self) -> None:
        """Delete the file unless it was committed."""


class PartLog(Protocol):
    """Log of one holder of a job. Its methods block."""

    def append(self, pieces: Iterable[bytes]) -> None:
        """Append records, which then survive a crash. After an error, call this again with the same records; none is added twice."""

    def close(self) -> None:
        """Close its files. `append` reopens them."""


class FileWriter:
    """Writer of one new file, which is invisible to others until it is complete. `size` is the number of bytes so far."""

    def __init__(self, folder: BulkFolder, sink: FileSink) -> None:
        self._folder, self._sink = folder, sink
        self._buffer: list[bytes] = []
        self._buffered = 0
        self.size = 0

    async def write(self, pieces: Sequence[bytes]) -> None:
        self._buffer += pieces
        more = sum(map(len, pieces))
        self._buffered += more
        self.size += more
        if self._buffered >= BUFFER:
            await self._flush()

    async def commit(self) -> None:
        await self._flush()
        await self._folder.do(self._sink.commit)

    async def discard(self) -> None:
        with contextlib.suppress(FolderUnavailable):
            await self._folder.do(self._sink.discard)

    async def _flush(self) -> None:
        content = b"".join(self._buffer)
        self._buffer, self._buffered = [], 0
        await self._folder.do(lambda: self._sink.write(content))


class LocalReader(FileReader):
    """Reads a file on a local disk. The file is only open during a read, so that slow clients don't use up descriptors."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self, size: int, /) -> bytes:
        with self._path.open("rb", buffering=0) as file:
            piece = os.pread(file.fileno(), size, self._at)
        self._at += len(piece)
        return piece

    def close(self) -> None:
        """Do nothing: the file is closed between reads."""


class LocalSink(FileSink):
    """Writes a file on a local disk at `path`, then renames it to `target`. The file is open only during each write."""

    def __init__(self, path: Path, target: Path) -> None:
        self._path, self._target = path, target

    def write(self, content: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            write_all(file, content)

    def commit(self) -> None:
        with self._path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
        self._path.rename(self._target)
        sync_folder(self._target.parent)

    def discard(self) -> None:
        self._path.unlink(missing_ok=True)


class LocalLog(PartLog):
    """Log on a local disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._size = 0  # Bytes of complete records.

    def append(self, pieces: Iterable[bytes]) -> None:
        """Append records after the last complete one, since a full disk may have left part of a record there."""
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
            sync_folder(self._path.parent)
        if self._file.tell() != self._size:
            self._file.truncate(self._size)
            self._file.seek(self._size)
        for piece in pieces:
            write_all(self._file, piece)
        os.fsync(self._file.fileno())
        self._size = self._file.tell()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _left(path: Path) -> bool:
    try:
        return path.stat().st_mtime < time.time() - LEFT_AFTER
    except FileNotFoundError:
        return False


def why(exc: FolderUnavailable) -> str:
    """Return the root cause of an error, for operators."""
    first: BaseException = exc
    while first.__cause__ is not None:
        first = first.__cause__
    return str(first)


def write_all(file: BinaryIO, content: bytes) -> None:
    """Write all of `content`, in several calls if needed."""
    unwritten = memoryview(content)
    while unwritten:
        unwritten = unwritten[file.write(unwritten) :]


def sync_folder(path: Path) -> None:
    """Sync a folder, so that the names of its files survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

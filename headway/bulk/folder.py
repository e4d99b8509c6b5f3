"""Folder of bulk jobs: whole files by id, uploads, and the logs of jobs.

    files/ID          whole files, renamed to here as the last step
    incoming/…        files being written
    jobs/ID/…         logs of jobs that haven't ended

Disk operations block, so they run in threads. Their errors become FolderUnavailable.
"""

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

CHUNK = 1 << 16  # Bytes to read at once: handling them takes the event loop about a millisecond.
BUFFER = 1 << 18  # Bytes to collect before writing.
AT_ONCE = 4  # Upper bound on threads that use the disk at once.
LEFT_AFTER = 86_400.0  # Seconds without a change after which an unknown file counts as abandoned.

Run = Callable[[Callable[[], object]], Awaitable[object]]  # Runs a blocking function.


class BulkFolder:
    """Folder at a path. `run` runs blocking functions, by default in threads."""

    def __init__(self, path: str, run: Run | None = None) -> None:
        self._path, self._shown = Path(path), path
        self._run: Run = run or self._in_thread
        self._free = asyncio.Semaphore(AT_ONCE)

    async def open(self) -> None:
        """Create the folder. Raises SettingError if it isn't writable."""
        try:
            await self.do(self.make)
        except FolderUnavailable as exc:
            hint = "Name a folder that may be written to, which all gateways of a fleet share."
            raise SettingError("bulk_dir", self._shown, why(exc), hint) from exc

    async def do(self, work: Callable[[], T]) -> T:
        """Run a blocking function. Raises FolderUnavailable, caused by the system's error, if the disk failed."""
        try:
            return await self._run(work)  # type: ignore[return-value]
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise FolderUnavailable("the disk of the folder of bulk jobs is full") from exc
            raise FolderUnavailable(f"the folder of bulk jobs cannot be used: {exc.strerror or exc}") from exc

    def writer(self, id: str) -> FileWriter:
        return FileWriter(self, self.sink(id))

    def file(self, id: str) -> str:
        return f"files/{id}"

    def part(self, job: str, name: str) -> str:
        return f"jobs/{job}/{name}"

    async def size(self, id: str) -> int:
        """Return the size of a whole file in bytes. Raises FolderUnavailable."""
        return await self.do(lambda: self.size_of(self.file(id)))

    async def remove_file(self, id: str) -> None:
        await self.do(lambda: self.remove(self.file(id)))

    async def remove_job(self, id: str) -> None:
        await self.do(lambda: self.remove_log(id))

    async def names(self) -> dict[str, bool]:
        """Return the ids of all files, and of jobs with a log, each with True if it is old."""
        return await self.do(self.list_names)

    async def pieces(self, name: str, size: int = CHUNK) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file in pieces. Raises FolderUnavailable, or FileLost if only the file is gone."""
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
            raise FileLost("the file is not there any more")

    # Blocking functions, run by `do`.

    def make(self) -> None:
        """Create the folder, and check that it is writable."""
        for name in ("files", "incoming", "jobs"):
            (self._path / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        trial = self._incoming()
        trial.touch()
        trial.unlink()

    def look(self) -> None:
        """Raise FileNotFoundError if the folder is gone, for example a network folder that isn't mounted."""
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
        """Return the log of one holder of a job. `stem` begins the names of its files."""
        return LocalLog(self._path / self.part(job, f"{stem}.part"))

    def parts(self, job: str) -> list[str]:
        """Return the file names of a job's log. Raises FileNotFoundError if it has none."""
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
    """File read from its beginning. Its calls block."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, at most `size`, or b"" at the end."""

    def close(self) -> None: ...


class FileSink(Protocol):
    """New file that nobody sees before it is whole. Its calls block."""

    def write(self, content: bytes) -> None: ...

    def commit(self) -> None:
        """Give the file its final name, durably."""

    def discard(self) -> None:
        """Drop the file unless it was committed."""


class PartLog(Protocol):
    """Log of one holder of a job. Its calls block."""

    def append(self, pieces: Iterable[bytes]) -> None:
        """Append records durably. After an error, call it again with the same records: none is added twice."""

    def close(self) -> None:
        """Close its files. `append` opens them again."""


class FileWriter:
    """Writer of one new file, which nobody sees before it is whole. `size` counts its bytes so far."""

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
    """Reads a file on a local disk. The file is open only during each read, so a slow client holds no descriptor."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self, size: int, /) -> bytes:
        with self._path.open("rb", buffering=0) as file:
            piece = os.pread(file.fileno(), size, self._at)
        self._at += len(piece)
        return piece

    def close(self) -> None:
        """Do nothing: the file isn't open between reads."""


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
        self._size = 0  # Bytes of whole records.

    def append(self, pieces: Iterable[bytes]) -> None:
        """Append records after the last whole record. A full disk may have left part of a record there."""
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
    """Return the first cause of an error, for operators."""
    first: BaseException = exc
    while first.__cause__ is not None:
        first = first.__cause__
    return str(first)


def write_all(file: BinaryIO, content: bytes) -> None:
    """Write all of `content`, in several calls if the system takes less at a time."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

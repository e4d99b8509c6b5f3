"""Watching and locking files that other processes change too."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic, sleep

from headway.errors import StoreUnavailable

CHECK_FILES_EVERY = 0.5  # Seconds between two checks.
MOST_FILES = 2000  # Maximum number of Python files to watch below a folder.
MOST_FOLDERS = 500  # Maximum number of folders to search for Python files.
LOCK_WITHIN = 5.0  # Seconds to wait for a lock.
_LOCK_EVERY = 0.02
_PASSED_BY = frozenset(["__pycache__", "node_modules", "site-packages", "dist-packages"])
Stamp = tuple[int, int, int]  # Modification time in ns, size and inode of a file, which change with it.


def _pause() -> Awaitable[None]:
    return asyncio.sleep(CHECK_FILES_EVERY)


class FileWatcher:
    """Watches the files that `find` lists. A new file counts as a change; a missing one doesn't, because editors remove a
    file to replace it. `pause` waits between checks."""

    def __init__(self, find: Callable[[], Iterable[Path]], pause: Callable[[], Awaitable[None]] = _pause) -> None:
        self._find, self._pause = find, pause
        self._seen: dict[Path, Stamp] = {}
        self._look()

    async def changes(self) -> AsyncIterator[None]:
        while True:
            await self._pause()
            if await asyncio.to_thread(self._look):
                yield

    def _look(self) -> bool:
        changed = False
        for path in self._find():
            now = stamp(path)
            if now is not None and now != self._seen.get(path):
                self._seen[path] = now
                changed = True
        return changed


def python_files(folder: Path) -> list[Path]:
    """Return the Python files in `folder` and below, nearest first. Skips hidden folders, environments and installed packages."""
    files: list[Path] = []
    folders = deque([folder])
    for _ in range(MOST_FOLDERS):
        if not folders or len(files) >= MOST_FILES:
            break
        try:
            with os.scandir(folders.popleft()) as entries:
                for entry in entries:
                    if entry.name.endswith(".py"):
                        files.append(Path(entry.path))
                    elif entry.is_dir(follow_symlinks=False) and not _is_foreign(entry):
                        folders.append(Path(entry.path))
        except OSError:
            continue
    return files[:MOST_FILES]


def _is_foreign(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(".") or entry.name in _PASSED_BY or Path(entry.path, "pyvenv.cfg").exists()


def stamp(path: Path) -> Stamp | None:
    """Return the stamp of a file; None if the file can't be accessed."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock on a folder. Blocks the thread until the lock is free. Raises StoreUnavailable after LOCK_WITHIN."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = monotonic() + LOCK_WITHIN
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if monotonic() >= until:
                    raise StoreUnavailable(f"another process holds the lock on {folder}") from None
                sleep(_LOCK_EVERY)
        yield
    finally:
        os.close(descriptor)

"""Watcher of files: looks for changes now and then."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

CHECK_FILES_EVERY = 0.5
"""Seconds between two looks."""
MOST_FILES = 2000
"""Python files of a folder that are watched at most, the nearest ones."""
MOST_FOLDERS = 500
"""Most folders that are searched for them."""

_PASSED_BY = frozenset(["__pycache__", "node_modules", "site-packages", "dist-packages"])
Stamp = tuple[int, int, int]
"""Modification time in ns, size and inode of a file: another content has another stamp."""


def _pause() -> Awaitable[None]:
    return asyncio.sleep(CHECK_FILES_EVERY)


class FileWatcher:
    """Watcher of files. It looks at them first when it is made.

    A file that is gone counts as unchanged until it is back: editors replace a file by removing it first. A new file is a
    change. Several changes between two looks are one.

    Arguments:
        find: lists the files.
        pause: waits between two looks.
    """

    def __init__(self, find: Callable[[], Iterable[Path]], pause: Callable[[], Awaitable[None]] = _pause) -> None:
        self._find = find
        self._pause = pause
        self._seen: dict[Path, Stamp] = {}
        self._look()

    async def changes(self) -> AsyncIterator[None]:
        """Yield whenever a file has changed since the last look."""
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
    """Return the Python files in `folder` and below it, nearest first; no hidden folders, environments and installed packages."""
    found: list[Path] = []
    folders = deque([folder])
    for _ in range(MOST_FOLDERS):
        if not folders or len(found) >= MOST_FILES:
            break
        try:
            with os.scandir(folders.popleft()) as entries:
                for entry in entries:
                    if entry.name.endswith(".py"):
                        found.append(Path(entry.path))
                    elif entry.is_dir(follow_symlinks=False) and not _is_foreign(entry):
                        folders.append(Path(entry.path))
        except OSError:
            continue
    return found[:MOST_FILES]


def _is_foreign(entry: os.DirEntry[str]) -> bool:
    """Return True if a folder holds none of the user's own code."""
    return entry.name.startswith(".") or entry.name in _PASSED_BY or Path(entry.path, "pyvenv.cfg").exists()


def stamp(path: Path) -> Stamp | None:
    """Return the stamp of a file; None if it can't be seen."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

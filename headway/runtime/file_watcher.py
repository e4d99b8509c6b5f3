"""Watcher of files, which looks at them now and then for changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

LOOK_EVERY = 0.5
"""Seconds between two looks."""

_Seen = tuple[int, int, int]


def _pause() -> Awaitable[None]:
    return asyncio.sleep(LOOK_EVERY)


async def watch(paths: Iterable[Path], pause: Callable[[], Awaitable[None]] = _pause) -> AsyncIterator[None]:
    """Yield whenever one of `paths` has changed since the last look.

    A file that is gone counts as unchanged until it is back: editors replace a file by removing it first. Several
    changes between two looks are one.

    Arguments:
        paths: the files.
        pause: waits between two looks.
    """
    seen = {path: _look(path) for path in paths}
    while True:
        await pause()
        changed = False
        for path, before in seen.items():
            now = _look(path)
            if now is not None and now != before:
                seen[path] = now
                changed = True
        if changed:
            yield


def _look(path: Path) -> _Seen | None:
    """Stamp that tells one content of a file from the next: modification time in ns, size, inode."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

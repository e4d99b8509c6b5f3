"""Lock on a folder, so processes take turns to change its files."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

from headway.errors import StoreUnavailable

LOCK_WITHIN = 5.0
"""Seconds to wait for another process."""
_LOCK_EVERY = 0.02


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock on a folder in which files are added or replaced. Blocks the thread until the lock is free.

    Raises:
        StoreUnavailable: the lock isn't free within LOCK_WITHIN.
    """
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

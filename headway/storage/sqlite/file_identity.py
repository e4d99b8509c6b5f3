"""Identity of the file at the path of an SQLite database, and the making of a new file.

Closing any descriptor of a file ends all POSIX locks that the process has on it, those of SQLite among them. Another
process then takes itself for the last one, and deletes the log (`-wal`) that this process writes on into: rows are lost
and the file is corrupted. So nothing here, and nothing elsewhere in a process, ever opens the file or its log: only
SQLite does.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

_Inode = tuple[int, int]


class FileIdentity(NamedTuple):
    """The files of one database, by device and inode.

    Attributes:
        file: the database itself.
        log: its write-ahead log; None when there is none.
    """

    file: _Inode
    log: _Inode | None


def look(path: str) -> FileIdentity | None:
    """Files at a path now; None when there is no database."""
    real = os.path.realpath(path)
    file = _inode(real)
    return None if file is None else FileIdentity(file, _inode(f"{real}-wal"))


def make(path: str) -> None:
    """Make an empty file if there is none, readable by its owner only, without ever having it open.

    Raises:
        OSError: the file cannot be made, or may not be used.
        ValueError: the text is no path.
    """
    real = os.path.realpath(path)
    with contextlib.suppress(FileExistsError):
        try:
            os.mknod(real, 0o600 | stat.S_IFREG)
        except PermissionError:  # Some systems let only root do that.
            _link_in(real)
    mode = Path(real).stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(None, "Is a directory")
    if not stat.S_ISREG(mode):  # To open a device or a pipe may do something.
        raise OSError(None, "is no regular file")
    if not os.access(real, os.R_OK | os.W_OK):
        raise PermissionError(None, "Permission denied")


def _link_in(path: str) -> None:
    """Put an empty file at a path that was closed before it got there."""
    descriptor, name = tempfile.mkstemp(dir=Path(path).parent, prefix=f".{Path(path).name}.")
    os.close(descriptor)
    try:
        os.link(name, path)
    finally:
        Path(name).unlink()


def remove_log(path: str) -> None:
    """Remove the log and its index of a database that no longer lies here.

    The present database would take them for its own.
    """
    real = os.path.realpath(path)
    for suffix in ("-wal", "-shm"):
        Path(real + suffix).unlink(missing_ok=True)


def _inode(path: str) -> _Inode | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino

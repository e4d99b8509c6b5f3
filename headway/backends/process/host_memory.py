"""Usage of the memory that this process and its children share.

The usage is a share: how much of the machine's memory is used, or of a control group's limit, whichever is more. All groups
from the process's own to the root are considered. Memory that the kernel can free at once doesn't count: a group's
`inactive_file`, as in Kubernetes, and the machine's `MemAvailable`. A number that the system doesn't report counts as 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

READ_EVERY = 0.9  # For how many seconds all slots of a process share a reading.
MOST_BYTES = 64 << 10
NO_LIMIT = 1 << 60  # A limit of at least this many bytes means no limit in cgroup v1.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""A control group's files with its limit and usage, and the name of the statistic for pages that the kernel can drop."""


class HostMemory:
    """Reads memory usage from the file system at `root`."""

    def __init__(self, clock: Callable[[], float], root: Path = Path("/")) -> None:
        self._clock = clock
        self._meminfo = str(root / "proc/meminfo")
        self._groups = list(_groups(root))
        self._read_at: float | None = None
        self._share = 0.0

    def used(self) -> float:
        now = self._clock()
        if self._read_at is None or now - self._read_at >= READ_EVERY:
            self._read_at = now
            self._share = max([self._of_machine(), *(_of_group(*group) for group in self._groups)])
        return self._share

    def limit(self) -> int:
        """Return how many bytes of memory this process may use, or 0 if unknown."""
        total = _figures(self._meminfo, "MemTotal:").get("MemTotal:", 0) << 10
        return min(filter(None, (total, *(_limit(path) for path, *_ in self._groups))), default=0)

    def _of_machine(self) -> float:
        figures = _figures(self._meminfo, "MemTotal:", "MemAvailable:")
        total, available = figures.get("MemTotal:", 0), figures.get("MemAvailable:")
        return 1.0 - available / total if total and available is not None else 0.0


def _groups(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield the control groups that limit this process's memory, its own group first, as arguments of `_of_group`."""
    for line in _text(str(root / "proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        if not controllers:
            mount, (limit, used, droppable) = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, (limit, used, droppable) = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        place = PurePosixPath(own.lstrip("/"))
        # Inside a container, this may be the host's path, of which only the root is visible.
        for group in (mount / path for path in (place, *place.parents)):
            if (group / limit).exists():
                yield str(group / limit), str(group / used), str(group / "memory.stat"), droppable


def _of_group(limit_path: str, used_path: str, stat_path: str, droppable_name: str) -> float:
    limit = _limit(limit_path)
    if not limit:
        return 0.0
    droppable = _figures(stat_path, droppable_name).get(droppable_name, 0)
    return min(max(_number(used_path) - droppable, 0) / limit, 1.0)


def _limit(path: str) -> int:
    limit = _number(path)
    return limit if 0 < limit < NO_LIMIT else 0


def _number(path: str) -> int:
    """Return the number in a file, or 0 for anything else, such as the word `max`."""
    try:
        return int(_text(path))
    except ValueError:
        return 0


def _figures(path: str, *names: str) -> dict[str, int]:
    """Return the numbers in a file with lines NAME NUMBER, for lines that begin with one of `names`."""
    words = (line.split() for line in _text(path).splitlines() if line.startswith(names))
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


def _text(path: str) -> str:
    """Return the content of a small kernel file, or "" if unreadable. It runs every second, so it calls `read` only once."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(file, MOST_BYTES).decode()
    except OSError:
        return ""
    finally:
        os.close(file)

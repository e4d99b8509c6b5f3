"""What a process and all it has started use: CPU time, memory, file descriptors. From /proc, so Linux only."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it was when looked at.

    Attributes:
        pid, parent: ids; an id is used again some time after its process is gone.
        started: when, in clock ticks since boot; with the pid, it tells two processes apart.
        name: of its program, as the kernel keeps it.
        command: its command line.
        cpu: seconds it has used, user and system together.
        ended_cpu: seconds that its children had used which it has waited for.
        rss: bytes in memory.
    """

    pid: int
    parent: int
    started: int
    name: str
    command: str
    cpu: float
    ended_cpu: float
    rss: int


def look(pid: int) -> Process | None:
    """The process `pid`; None when there is none any more."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        command = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    # The name may hold spaces and brackets; what follows the last bracket does not. Fields: proc(5).
    head, _, tail = stat.rpartition(")")
    field = tail.split()
    return Process(
        pid=pid,
        parent=int(field[1]),
        started=int(field[19]),
        name=head.partition("(")[2],
        command=command.replace(b"\0", b" ").decode(errors="replace").strip(),
        cpu=(int(field[11]) + int(field[12])) * _TICK,
        ended_cpu=(int(field[13]) + int(field[14])) * _TICK,
        rss=int(field[21]) * _PAGE,
    )


def family(root: int) -> list[Process]:
    """Process `root` and all its descendants, itself first."""
    every = {process.pid: process for process in map(look, _pids()) if process is not None}
    found: list[Process] = []
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        if pid in every:
            found.append(every[pid])
        waiting += [process.pid for process in every.values() if process.parent == pid]
    return found


def is_alive(process: Process) -> bool:
    """Whether it is still there, and not another one under its id."""
    now = look(process.pid)
    return now is not None and now.started == process.started


def descriptors(pid: int) -> int:
    """Open file descriptors of a process; 0 when it is gone."""
    try:
        return len(os.listdir(_PROC / str(pid) / "fd"))  # noqa: PTH208 - names are all that is wanted
    except OSError:
        return 0


def threads(pid: int) -> int:
    """Threads of a process; 0 when it is gone."""
    try:
        return len(os.listdir(_PROC / str(pid) / "task"))  # noqa: PTH208
    except OSError:
        return 0


def usage(root: int, role: Callable[[Process], str]) -> dict[str, float]:
    """CPU seconds so far by role; what ended children of `root` had used goes to the role `ended`.

    Arguments:
        root: the first of them.
        role: names the role of a process.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for process in family(root):
        seconds[role(process)] += process.cpu
        if process.pid == root:
            seconds["ended"] += process.ended_cpu
    return dict(seconds)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())

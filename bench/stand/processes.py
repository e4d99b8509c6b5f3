"""CPU time, memory and file descriptors of processes, from /proc, so on Linux only."""

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
    """A process at one point in time.

    Attributes:
        started: clock ticks since boot, which distinguish it from a later process with its pid.
        cpu, ended_cpu: seconds of user and system time, of the process and of the children that it has waited for.
        rss: bytes.
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
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        command = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    # The name may contain spaces and brackets; nothing after the last bracket does. Fields: proc(5).
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
    every = {process.pid: process for process in map(look, _pids()) if process is not None}
    household: list[Process] = []
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        if pid in every:
            household.append(every[pid])
        waiting += [process.pid for process in every.values() if process.parent == pid]
    return household


def is_alive(process: Process) -> bool:
    now = look(process.pid)
    return now is not None and now.started == process.started


def descriptors(pid: int) -> int:
    """Return the number of open file descriptors, or 0 for a process that is gone."""
    try:
        return len(os.listdir(_PROC / str(pid) / "fd"))  # noqa: PTH208 - names are all that is wanted
    except OSError:
        return 0


def threads(pid: int) -> int:
    """Return the number of threads, or 0 for a process that is gone."""
    try:
        return len(os.listdir(_PROC / str(pid) / "task"))  # noqa: PTH208
    except OSError:
        return 0


def usage(root: int, role: Callable[[Process], str]) -> dict[str, float]:
    """Return CPU seconds so far, by role. Those of ended children of `root` are under `ended`."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for process in family(root):
        seconds[role(process)] += process.cpu
        if process.pid == root:
            seconds["ended"] += process.ended_cpu
    return dict(seconds)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())

"""Figures that the operating system keeps of this process, under the names that all of Prometheus' clients give them."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from headway.telemetry.text import COUNTER, GAUGE

_OWN = Path("/proc/self")


def figures() -> Iterator[tuple[str, str, str, float]]:
    """Type, name without `_total`, meaning and value of each figure; none where there is no `/proc`."""
    with contextlib.suppress(OSError):
        fields = (_OWN / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        yield GAUGE, "process_virtual_memory_bytes", "Virtual memory size in bytes.", int(fields[20])
        resident = int(fields[21]) * resource.getpagesize()
        yield GAUGE, "process_resident_memory_bytes", "Resident memory size in bytes.", resident
        begun = _booted() + int(fields[19]) / ticks
        yield GAUGE, "process_start_time_seconds", "Start time of the process since unix epoch in seconds.", begun
        spent = (int(fields[11]) + int(fields[12])) / ticks
        yield COUNTER, "process_cpu_seconds", "Total user and system CPU time spent in seconds.", spent
        files = sum(1 for _ in (_OWN / "fd").iterdir())
        yield GAUGE, "process_open_fds", "Number of open file descriptors.", files
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        yield GAUGE, "process_max_fds", "Maximum number of open file descriptors.", most


def _booted() -> float:
    """Unix time at which the machine started, in seconds."""
    with Path("/proc/stat").open(encoding="ascii") as lines:
        return next(float(one.split()[1]) for one in lines if one.startswith("btime "))

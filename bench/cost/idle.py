"""What a server costs at which nothing is asked, and what an idle fleet asks of Redis.

    python bench/cost/idle.py                 about two minutes
    python bench/cost/idle.py --seconds 10    a look

A server with two GPUs made of sleep, and a fleet of two gateways, two worker hosts with two such GPUs each, and two controllers, are left
alone. A wake-up is one time that a thread of a process slept and went on (voluntary context switches); CPU time is the
scheduler's own, to the nanosecond. Redis's calls are those of its slow log, which holds all for as long as they are counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from bench.stand import fleet, processes, stand
from bench.stand.findings import Findings

SETTLE = 8.0
"""Seconds until all that is done at a start is done."""
WAKE_UPS, CPU_MS, CALLS = 5.0, 1.0, 5.0
"""What is wished for: wake-ups and CPU milliseconds of the server, and calls of Redis's functions by the fleet, each a second."""


def main() -> int:
    parser = argparse.ArgumentParser(description="What is done at rest.")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement (default %(default)g)")
    seconds = parser.parse_args().seconds
    stand.end_in_order()
    findings = Findings("idle", seconds=seconds)
    with stand.emulated(80.0, 16, 2, name="idle") as server:
        time.sleep(SETTLE)
        rows = _rest(server.pid, seconds)
    findings.table("a server with two GPUs, at rest, each second", rows)
    with fleet.emulated(80.0, 16, hosts=2, gpus=2, name="idle", gateways=2, controllers=2) as made:
        time.sleep(SETTLE)
        with made.redis.stepping() as took:
            time.sleep(seconds)
        before = {one.name: _spent(one.pid) for one in made.every()}
        time.sleep(seconds)
        spent = {one.name: _spent(one.pid) for one in made.every()}
    calls = {name: len(durations) / seconds for name, durations in took.items() if name.islower()}
    found = sorted(calls.items(), key=lambda one: -one[1])
    findings.table("what an idle fleet asks of Redis, each second", [{"function": n, "calls": c} for n, c in found])
    findings.table("processes of the idle fleet, each second", [
        {"process": name, **_each_second(spent[name], before[name], seconds)} for name in spent
    ])  # fmt: skip
    findings.at_most("wake-ups of a server at rest, each second", rows[0]["wake-ups"], WAKE_UPS)
    findings.at_most("CPU time of a server at rest, each second", rows[0]["CPU ms"], CPU_MS, "ms")
    findings.at_most("calls of Redis's functions by an idle fleet, each second", sum(calls.values()), CALLS)
    return findings.close()


def _rest(root: int, seconds: float) -> list[dict[str, Any]]:
    """What the processes of a server do meanwhile, the first first."""
    family = processes.family(root)
    before = [_spent(one.pid) for one in family]
    time.sleep(seconds)
    return [
        {"process": one.command[-40:], **_each_second(_spent(one.pid), spent, seconds)}
        for one, spent in zip(family, before, strict=True)
    ]


def _each_second(after: tuple[int, int], before: tuple[int, int], seconds: float) -> dict[str, float]:
    wake_ups, nanoseconds = (late - early for late, early in zip(after, before, strict=True))
    return {"wake-ups": round(wake_ups / seconds, 2), "CPU ms": round(nanoseconds / 1e6 / seconds, 3)}


def _spent(pid: int) -> tuple[int, int]:
    """Wake-ups, and nanoseconds of CPU time, of all threads of a process."""
    wake_ups = nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        status = (thread / "status").read_text().splitlines()
        wake_ups += next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
        nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return wake_ups, nanoseconds


if __name__ == "__main__":
    sys.exit(main())

"""What an idle server costs, what an idle fleet asks of Redis, and what pages that show the dashboard cost.

    python bench/cost/idle.py                                 about seven minutes
    python bench/cost/idle.py --seconds 10 --only rest        a first impression

`rest` leaves a server with two emulated GPUs alone, and a fleet of two gateways, two worker hosts with two such GPUs each, and two controllers.
A wake-up is a voluntary context switch; CPU time comes from the scheduler. Redis's calls come from its slow log.

`viewers` is the CPU time of a server with four such GPUs, at rest and at 100 requests/s, while pages watch it. Rounds without viewers come before
and after the others, because the machine's speed varies. It writes bench/out/viewers.json.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.stand import fleet, parts, processes, stand
from bench.stand.findings import Findings
from bench.stand.generators import open_loop

SETTLE = 8.0
"""Seconds for the start-up to settle."""
WAKE_UPS, CPU_MS, CALLS = 5.0, 1.0, 5.0
"""Bounds per second."""
VIEWERS = (0, 1, 20, 0)
RATES = (0.0, 100.0)
MOST_VIEWED = 2.0
"""Maximum cost of 20 viewers, in percent of a core."""
BEGUN = 3.0
"""Seconds until all viewers have received the beginning of their streams."""


def main() -> int:
    parser = argparse.ArgumentParser(description="What is done at rest, and for those who look.")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement (default %(default)g)")
    return parts.run(parser, PARTS, {"rest": "idle"})


def rest(findings: Findings, options: argparse.Namespace) -> None:
    seconds = options.seconds
    with stand.emulated(80.0, 16, 2, name="idle") as server:
        time.sleep(SETTLE)
        rows = _rest(server.pid, seconds)
    findings.table("a server with two GPUs, at rest, each second", rows)
    with fleet.emulated(80.0, 16, hosts=2, gpus=2, name="idle", gateways=2, controllers=2) as made:
        time.sleep(SETTLE)
        with made.redis.stepping() as took:
            time.sleep(seconds)
        before = {server.name: _spent(server.pid) for server in made.every()}
        time.sleep(seconds)
        spent = {server.name: _spent(server.pid) for server in made.every()}
    calls = {name: len(durations) / seconds for name, durations in took.items() if name.islower()}
    busiest = sorted(calls.items(), key=lambda one: -one[1])
    findings.table("what an idle fleet asks of Redis, each second", [{"function": n, "calls": c} for n, c in busiest])
    findings.table("processes of the idle fleet, each second", [
        {"process": name, **_each_second(spent[name], before[name], seconds)} for name in spent
    ])  # fmt: skip
    findings.at_most("wake-ups of a server at rest, each second", rows[0]["wake-ups"], WAKE_UPS)
    findings.at_most("CPU time of a server at rest, each second", rows[0]["CPU ms"], CPU_MS, "ms")
    findings.at_most("calls of Redis's functions by an idle fleet, each second", sum(calls.values()), CALLS)


def _rest(root: int, seconds: float) -> list[dict[str, Any]]:
    """Return what a server's processes do during the rest, starting with the first."""
    family = processes.family(root)
    before = [_spent(process.pid) for process in family]
    time.sleep(seconds)
    return [
        {"process": process.command[-40:], **_each_second(_spent(process.pid), spent, seconds)}
        for process, spent in zip(family, before, strict=True)
    ]


def _each_second(after: tuple[int, int], before: tuple[int, int], seconds: float) -> dict[str, float]:
    wake_ups, nanoseconds = (late - early for late, early in zip(after, before, strict=True))
    return {"wake-ups": round(wake_ups / seconds, 2), "CPU ms": round(nanoseconds / 1e6 / seconds, 3)}


def _spent(pid: int) -> tuple[int, int]:
    """Return the wake-ups, and nanoseconds of CPU time, of all threads of a process."""
    wake_ups = nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        status = (thread / "status").read_text().splitlines()
        wake_ups += next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
        nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return wake_ups, nanoseconds


def viewers(findings: Findings, options: argparse.Namespace) -> None:
    rows: list[dict[str, float]] = []
    with stand.emulated(80.0, 16, 4, name="viewers") as server:
        for rate in RATES:
            for count in VIEWERS:
                share = asyncio.run(_viewed(server, rate, count, options.seconds))
                rows.append({"requests/s": rate, "viewers": count, "%": round(100 * share, 2)})
    findings.table("CPU time of the process, in percent of a core", rows)
    for rate in RATES:
        shares = {
            count: statistics.fmean(row["%"] for row in rows if row["requests/s"] == rate and row["viewers"] == count)
            for count in VIEWERS
        }
        cost = round(shares[max(VIEWERS)] - shares[0], 2)
        findings.at_most(f"{max(VIEWERS)} viewers at {rate:g} requests/s cost", cost, MOST_VIEWED, "% of a core")


async def _viewed(server: stand.Server, rate: float, count: int, seconds: float) -> float:
    """Return the share of a core that the process takes while `count` viewers read the dashboard's stream."""
    limits = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=limits[0], timeout=limits[1]) as client:
        tasks = [asyncio.create_task(_view(client, server.admin)) for _ in range(count)]
        load = asyncio.to_thread(open_loop, server, rate, BEGUN + seconds) if rate else asyncio.sleep(0)
        loading = asyncio.ensure_future(load)
        await asyncio.sleep(BEGUN)
        before, began = server.usage()["front"], time.monotonic()
        await asyncio.sleep(seconds)
        share = (server.usage()["front"] - before) / (time.monotonic() - began)
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await loading
    return share


async def _view(client: aiohttp.ClientSession, admin: str) -> None:
    async with client.get(f"{admin}/internal/events") as answer:
        answer.raise_for_status()
        async for _ in answer.content.iter_any():
            continue


PARTS: parts.Parts = {"rest": rest, "viewers": viewers}

if __name__ == "__main__":
    sys.exit(main())

"""What pages that show the dashboard cost the process that they look at, at rest and under load, in CPU time.

    python bench/cost/viewers.py                 about three minutes
    python bench/cost/viewers.py --seconds 5     a look

Rounds without a viewer stand before and after those with some, as the machine is not the same all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

import aiohttp

from bench.stand import stand
from bench.stand.findings import Findings

VIEWERS = (0, 1, 20, 0)
RATES = (0, 100)
MOST = 2.0
"""Most that 20 viewers may cost, in percent of a core."""
SETTLE = 3.0
"""Seconds until all viewers have had the beginning of their streams."""


def main() -> int:
    parser = argparse.ArgumentParser(description="What pages that show the dashboard cost.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each round")
    seconds = parser.parse_args().seconds
    findings = Findings("viewers", seconds=seconds, workers=4)
    with stand.emulated(80.0, 16, 4, name="viewers") as server:
        rows = asyncio.run(measured(server, seconds))
    findings.table("CPU time of the process, in percent of a core", rows)
    for rate in RATES:
        of_rate = [row for row in rows if row["requests/s"] == rate]
        without = sum(float(str(row["%"])) for row in of_rate if not row["viewers"]) / VIEWERS.count(0)
        most = max(float(str(row["%"])) for row in of_rate if row["viewers"] == max(VIEWERS))
        findings.at_most(
            f"{max(VIEWERS)} viewers at {rate} requests/s cost", round(most - without, 2), MOST, "% of a core"
        )
    return findings.close()


async def measured(server: stand.Server, seconds: float) -> list[dict[str, object]]:
    """One row for each rate and number of viewers."""
    rows: list[dict[str, object]] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as client:
        for rate in RATES:
            async with running(load(client, server.url, rate) if rate else idle()):
                for count in VIEWERS:
                    async with running(*(view(client, server.admin) for _ in range(count))):
                        await asyncio.sleep(SETTLE)
                        before, began = server.usage()["front"], time.monotonic()
                        await asyncio.sleep(seconds)
                        share = (server.usage()["front"] - before) / (time.monotonic() - began)
                    rows.append({"requests/s": rate, "viewers": count, "%": round(100 * share, 2)})
    return rows


@contextlib.asynccontextmanager
async def running(*acts: object) -> AsyncIterator[None]:
    """Let coroutines run meanwhile."""
    tasks = [asyncio.ensure_future(act) for act in acts]  # type: ignore[call-overload]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def view(client: aiohttp.ClientSession, admin: str) -> None:
    """Read a stream as a page does."""
    async with client.get(f"{admin}/internal/events") as answer:
        answer.raise_for_status()
        async for _ in answer.content.iter_any():
            continue


async def load(client: aiohttp.ClientSession, url: str, rate: int) -> None:
    """Ask at even intervals."""
    loop = asyncio.get_running_loop()
    due, asked = loop.time(), set[asyncio.Task[None]]()

    async def ask() -> None:
        with contextlib.suppress(aiohttp.ClientError):  # The server ends before what was asked last.
            async with client.post(f"{url}/v1/inference", json={"input": "hello"}) as answer:
                await answer.read()

    while True:
        due += 1 / rate
        await asyncio.sleep(max(due - loop.time(), 0.0))
        task = loop.create_task(ask())
        asked.add(task)
        task.add_done_callback(asked.discard)


async def idle() -> None:
    """Do nothing."""


if __name__ == "__main__":
    sys.exit(main())

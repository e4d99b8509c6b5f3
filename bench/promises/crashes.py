"""Workers that crash, one after the other: does a dead one leave anything behind in the process it belonged to?

    python bench/promises/crashes.py                 120 crashes
    python bench/promises/crashes.py --crashes 5000  an hour of them

The garbage collector is set as a service sets it, so that reference cycles would stay for a long time. Counted are the
streams of output of workers that are still in memory: two of each, and only of the one that is up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import sys
from pathlib import Path

import structlog

from bench.stand import stand
from bench.stand.findings import OUT, Findings
from headway.app.runner import COLLECT_AFTER
from headway.backends.process.backend import ProcessBackend
from headway.backends.process.child_process import Output
from headway.config.target import FileTarget
from headway.errors import WorkerCrashed
from headway.model import Entry

TARGET = """
import os


def crash(inputs: list[str]) -> list[str]:
    if "crash" in inputs:
        os._exit(3)
    return inputs
"""
BATCH = 32
MORE_MB = 4.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Crashes: does a dead worker leave anything behind?")
    parser.add_argument("--crashes", type=int, default=120, help="how many (default %(default)d)")
    options = parser.parse_args()
    stand.end_in_order()
    source = OUT / "crashes_target.py"
    source.parent.mkdir(exist_ok=True)
    source.write_text(TARGET)
    findings = Findings("crashes", crashes=options.crashes, batch=BATCH)
    rows = asyncio.run(_crash(source, options.crashes))
    findings.table("What the process holds", rows)
    findings.at_most("growth of memory", rows[-1]["rss_mb"] - rows[0]["rss_mb"], MORE_MB, "MiB")
    findings.at_most("streams of output in memory", max(row["streams"] for row in rows), 2)
    return findings.close()


async def _crash(source: Path, count: int) -> list[dict[str, float]]:
    """What the process holds after a tenth of the crashes, after two tenths, and so on."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    backend = ProcessBackend(
        FileTarget(source, "crash"), worker="gpu-0", device="cpu", start_timeout=60.0, log=structlog.get_logger()
    )
    batch = [Entry(str(place), "m", "x" * 2000, 0, "t", "g", 1.0, 1.0) for place in range(BATCH - 1)]
    batch.append(Entry("culprit", "m", "crash", 0, "t", "g", 1.0, 1.0))
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    rows = []
    for number in range(1, count + 1):
        await backend.start()
        with contextlib.suppress(WorkerCrashed):
            await backend.run(batch, 60.0)
        if number % max(count // 10, 1) == 0:
            streams = sum(type(one) is Output for one in gc.get_objects())
            rows.append({"crashes": number, "rss_mb": _rss_mb(), "streams": streams})
    await backend.stop()
    return rows


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


if __name__ == "__main__":
    sys.exit(main())

"""GPUs that hold several models, with real processes: does a flood of one slow another, and are loads as many as simulated?

    python bench/load/shared_gpus.py                a minute and a half
    python bench/load/shared_gpus.py --seconds 5    a first impression of the flood

Flood: two models on two GPUs made of sleep, 100 ms a batch of at most 8; each GPU holds both. The requests of one are measured
calm, then while the other is asked for twice what both GPUs can do. Then that one alone is asked for more than one GPU can do.

Loads: 6 models by Zipf's law on two GPUs of 2, at one request a second; half-way the popularity turns round. The same arrivals
go through the simulation, with loads as long as the real ones took.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.generators import open_loop
from bench.stand.stand import EMULATED_GPU, Server
from headway import AsyncClient
from tests.simulator.warm_gpus import Arrival, WarmScenario, simulate_warm

BATCH_MS, MAX_BATCH = 100.0, 8
CALM, FLOOD, ALONE = 20.0, 320.0, 120.0
"""Requests per second of the one model, and of the other beside it and alone. A GPU does 80."""
MODELS = tuple("abcdef")
RUN = 60.0
"""Seconds of the arrivals for the loads."""
PATIENT = ("--request-timeout-ms", "60000", "--queue-timeout-ms", "60000")
NEAR = 2
"""Loads by which the real run may differ from the simulated one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each load of the flood")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("shared_gpus", seconds=options.seconds, seed=options.seed, pinning=stand.PINNING)
    flood(findings, options.seconds)
    loads(findings, options.seed)
    return findings.close()


def flood(findings: Findings, seconds: float) -> None:
    """Measure a model calm and beside a flood of another, and that other alone."""
    with _serving("ab", 2, 2) as server:
        calm = open_loop(server, CALM, seconds, "--model", "b")
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(open_loop, server, FLOOD, seconds + 4.0, "--model", "a")
            time.sleep(2.0)
            flooded = open_loop(server, CALM, seconds, "--model", "b")
            other.result()
        alone = open_loop(server, ALONE, seconds, "--model", "a")
    rows = [calm.row("b, calm"), flooded.row("b, a flooded"), alone.row("a alone")]
    findings.table("Two models on two GPUs of 100 ms; latency in ms", rows)
    longer = flooded.report.total.latency_ms.p95 - calm.report.total.latency_ms.p95
    findings.at_most("P95 of the one beside a flood of the other, above calm", longer, BATCH_MS, "ms")
    findings.at_least("answered of one that both GPUs must carry", alone.answered, 0.99)
    findings.at_least("answered of the one beside a flood of the other", flooded.answered, 0.99)


def loads(findings: Findings, seed: int) -> None:
    """Count the loads of a real run, and of the same arrivals simulated."""
    arrivals = list(_arrivals(seed))
    with _serving("".join(MODELS), 2, 2, *PATIENT) as server:
        failed = asyncio.run(_ask(server.url, arrivals))
        real = server.total("headway_model_loads_total")
        each = server.total("headway_model_load_seconds_sum") / real
    scenario = WarmScenario(MODELS, 2, 2, each, BATCH_MS / 1000, 0.0, MAX_BATCH, 60.0)
    simulated = len(simulate_warm(scenario, arrivals).loads)
    row = {
        "requests": len(arrivals),
        "loads": int(real),
        "simulated": simulated,
        "seconds of a load": each,
        "failed": failed,
    }
    findings.table("6 models on two GPUs of 2", [row])
    findings.at_most("loads, real and simulated: difference", abs(real - simulated), NEAR)
    findings.none("requests that failed", failed)


def _serving(models: str, gpus: int, room: int, *flags: str) -> AbstractContextManager[Server]:
    """`headway serve` of models on GPUs made of sleep."""
    first, *more = [f"{name}={EMULATED_GPU}" for name in models]
    shape = ("--workers", str(gpus), "--models-per-gpu", str(room), "--max-batch-size", str(MAX_BATCH))
    environment = {"EMULATED_MS": str(BATCH_MS), "EMULATED_MAX": str(MAX_BATCH)}
    return stand.headway(
        first, *more, *shape, *flags, "--log-level", "warning", name="shared_gpus", environment=environment
    )


def _arrivals(seed: int) -> Iterator[Arrival]:
    rng = random.Random(f"{seed}/shared")
    weights, now = [1.0 / (rank + 1) ** 1.1 for rank in range(len(MODELS))], 0.0
    while (now := now + rng.expovariate(1.0)) < RUN:
        yield now, rng.choices(MODELS if now < RUN / 2 else MODELS[::-1], weights)[0]


async def _ask(url: str, arrivals: list[Arrival]) -> int:
    """Send the requests at their instants; returns how many failed."""
    begun = time.monotonic()
    async with AsyncClient(url, timeout=90.0) as client:

        async def one(at: float, model: str) -> str:
            await asyncio.sleep(max(at - (time.monotonic() - begun), 0.0))
            return str((await client.infer("x", model=model)).output)

        found = await asyncio.gather(*(one(at, model) for at, model in arrivals), return_exceptions=True)
    return sum(isinstance(outcome, BaseException) for outcome in found)


if __name__ == "__main__":
    sys.exit(main())

"""GPUs that hold several models, with real processes: does a flood of one slow another, and are loads as many as simulated?

    python bench/load/shared_gpus.py                           three minutes
    python bench/load/shared_gpus.py --seconds 5 --only one    a first impression

one     Two models on two GPUs of one process, which hold both. The requests of *b* are measured calm, then while *a* is asked for
        twice what both GPUs can do. Then *a* alone is asked for more than one GPU can do.
fleet   The same over Redis with three hosts of one GPU, which holds two models: a and b, b and c, a and c. Last a host with a
        further model joins; its first answer is to come within a second of the host being ready.
loads   6 models by Zipf's law on two GPUs of 2, at one request a second; half-way the popularity turns round. The same arrivals
        go through the simulation, with loads as long as the real ones took.

GPUs are made of sleep, 100 ms a batch of at most 8.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.fleet import Fleet, fleet, wait_until_up
from bench.stand.generators import open_loop
from bench.stand.stand import EMULATED_GPU, Broken, Server
from headway import AsyncClient
from tests.simulator.warm_gpus import Arrival, WarmScenario, simulate_warm

BATCH_MS, MAX_BATCH = 100.0, 8
ENVIRONMENT = {"EMULATED_MS": str(BATCH_MS), "EMULATED_MAX": str(MAX_BATCH)}
CALM, FLOOD, ALONE = 20.0, 320.0, 120.0
"""Requests per second of b, of a beside it, and of a alone. A GPU does 80."""
HOSTS = ("ab", "bc", "ac")
DRAINED = 3.0
"""Seconds after which nothing is left of a flood, as its requests wait for 2 s at most."""
JOIN_WITHIN = 60.0
"""Most seconds until a model is given up that is not answered."""
MODELS = tuple("abcdef")
RUN = 60.0
"""Seconds of the arrivals for the loads."""
PATIENT = ("--request-timeout-ms", "60000", "--queue-timeout-ms", "60000")
NEAR = 2
"""Loads by which the real run may differ from the simulated one."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Several models on the same GPUs.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load of a flood (default %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals for the loads (default %(default)d)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("shared_gpus", seconds=options.seconds, seed=options.seed, pinning=stand.PINNING)
    for name in options.only:
        PARTS[name](findings, options)
    return findings.close()


def one(findings: Findings, options: argparse.Namespace) -> None:
    """Flood one of two models of a process."""
    with _serving("ab", 2, 2) as server:
        flood(findings, "one process", server, options.seconds)


def over_redis(findings: Findings, options: argparse.Namespace) -> None:
    """Flood one of three models of a fleet, and have a fourth join."""
    flags = ("--max-batch-size", str(MAX_BATCH))
    with fleet(EMULATED_GPU, *flags, name="shared_fleet", workers=0, environment=ENVIRONMENT) as hosts:
        for server in [_host(hosts, models) for models in HOSTS]:
            wait_until_up("worker", server)
        for model in "abc":
            _wait_for(hosts.gateways[0], model)
        flood(findings, "three hosts over Redis", hosts.gateways[0], options.seconds)
        joins(findings, hosts)


def flood(findings: Findings, where: str, server: Server, seconds: float) -> None:
    """Measure a model calm and beside a flood of another, and that other alone."""
    calm = open_loop(server, CALM, seconds, "--model", "b")
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(open_loop, server, FLOOD, seconds + 4.0, "--model", "a")
        time.sleep(2.0)
        flooded = open_loop(server, CALM, seconds, "--model", "b")
        other.result()
    time.sleep(DRAINED)
    alone = open_loop(server, ALONE, seconds, "--model", "a")
    rows = [calm.row("b, calm"), flooded.row("b, a flooded"), alone.row("a alone")]
    findings.table(f"{where}: two models on the same GPUs of 100 ms; latency in ms", rows)
    longer = flooded.report.total.latency_ms.p95 - calm.report.total.latency_ms.p95
    findings.at_most(f"{where}: P95 of the one beside a flood of the other, above calm", longer, BATCH_MS, "ms")
    findings.at_least(f"{where}: answered of one that two GPUs must carry", alone.answered, 0.99)
    findings.at_least(f"{where}: answered of the one beside a flood of the other", flooded.answered, 0.99)


def joins(findings: Findings, hosts: Fleet) -> None:
    """Have a host with a new model join, and count the seconds until that is answered."""
    begun = time.monotonic()
    host = _host(hosts, "db")
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(_wait_for, hosts.gateways[0], "d")
        wait_until_up("worker", host)
        ready = time.monotonic()
        answered = first.result()
    load = host.total("headway_model_load_seconds_sum", model="d")
    row = {"load": load, "ready after": ready - begun, "first answer after": answered - begun}
    findings.table("A host with a new model joins; seconds", [row])
    findings.at_most("first answer after the host is ready", answered - ready, 1.0, "s")


def loads(findings: Findings, options: argparse.Namespace) -> None:
    """Count the loads of a real run, and of the same arrivals simulated."""
    arrivals = list(_arrivals(options.seed))
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


PARTS: dict[str, Callable[[Findings, argparse.Namespace], None]] = {"one": one, "fleet": over_redis, "loads": loads}


def _serving(models: str, gpus: int, room: int, *flags: str) -> AbstractContextManager[Server]:
    """`headway serve` of models on GPUs made of sleep."""
    first, *more = [f"{name}={EMULATED_GPU}" for name in models]
    shape = ("--workers", str(gpus), "--models-per-gpu", str(room), "--max-batch-size", str(MAX_BATCH))
    command = (*more, *shape, *flags, "--log-level", "warning")
    return stand.headway(first, *command, name="shared_gpus", environment=ENVIRONMENT)


def _host(hosts: Fleet, models: str) -> Server:
    """Start a worker host with these models on one GPU."""
    first, *more = [f"{name}={EMULATED_GPU}" for name in models]
    hosts.target, hosts.worker_flags = first, (*more, "--models-per-gpu", "2")
    server = hosts.start("worker")
    hosts.workers.append(server)
    return server


def _wait_for(gateway: Server, model: str) -> float:
    """Instant at which a model is answered for the first time."""
    body = f'{{"input": "x", "model": "{model}"}}'.encode()
    until = time.monotonic() + JOIN_WITHIN
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{gateway.url}/v1/inference", body, timeout=10):
                return time.monotonic()
        except urllib.error.HTTPError:
            time.sleep(0.05)
    raise Broken(f"model {model} is not answered within {JOIN_WITHIN:g} s")


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

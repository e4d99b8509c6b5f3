"""GPUs that hold several models, with real processes: does a flood of one model slow another, and how soon is a new one served?

    python bench/load/shared_gpus.py                           two minutes
    python bench/load/shared_gpus.py --seconds 5 --only one    a first impression

one     Two models on two GPUs of one process, which hold both. *b* is measured calm, then while *a* is asked for twice what both GPUs can do. Then
        *a* alone is asked for more than one GPU can do.
fleet   The same over Redis with three hosts of one GPU, each of which holds two models: a and b, b and c, a and c. Last a host with a further
        model joins; its first answer is to come within a second of the host being ready.

GPUs are made of sleep, 100 ms a batch of at most 8. How many loads they need is simulated: bench/simulated/warm_models.py.
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from bench.stand import parts, stand
from bench.stand.findings import Findings
from bench.stand.fleet import Fleet, fleet, wait_until_up
from bench.stand.generators import open_loop
from bench.stand.stand import EMULATED_GPU, Broken, Server

BATCH_MS, MAX_BATCH = 100.0, 8
ENVIRONMENT = {"EMULATED_MS": str(BATCH_MS), "EMULATED_MAX": str(MAX_BATCH)}
CALM, FLOOD, ALONE = 20.0, 320.0, 120.0
"""Requests per second of b, of a beside it, and of a alone. A GPU does 80."""
HOSTS = ("ab", "bc", "ac")
DRAINED = 3.0
"""Seconds after which nothing is left of a flood, because its requests wait for 2 s at most."""
JOIN_WITHIN = 60.0
"""Seconds after which a model without an answer is given up."""
SHARED = ("--models-per-gpu", "2", "--max-batch-size", str(MAX_BATCH))


def main() -> int:
    parser = argparse.ArgumentParser(description="Several models on the same GPUs.")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load of a flood (default %(default)g)")
    return parts.run(parser, {"one": one, "fleet": over_redis}, {"one": "shared_gpus", "fleet": "shared_gpus_fleet"})


def one(findings: Findings, options: argparse.Namespace) -> None:
    """Flood one of two models of a process."""
    flags = (f"b={EMULATED_GPU}", "--workers", "2", *SHARED, "--log-level", "warning")
    with stand.headway(f"a={EMULATED_GPU}", *flags, name="shared_gpus", environment=ENVIRONMENT) as server:
        flood(findings, "one process", server, options.seconds)


def over_redis(findings: Findings, options: argparse.Namespace) -> None:
    """Flood one of three models of a fleet, and have a fourth one join."""
    with fleet(EMULATED_GPU, *SHARED[2:], name="shared_fleet", workers=0, environment=ENVIRONMENT) as hosts:
        for server in [_host(hosts, models) for models in HOSTS]:
            wait_until_up("worker", server)
        for model in "abc":
            _wait_for(hosts.gateways[0], model)
        flood(findings, "three hosts over Redis", hosts.gateways[0], options.seconds)
        joins(findings, hosts)


def flood(findings: Findings, where: str, server: Server, seconds: float) -> None:
    """Measure a model calm, beside a flood of another, and that other one alone."""
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


def _host(hosts: Fleet, models: str) -> Server:
    """Start a worker host with these models on one GPU."""
    first, *more = [f"{name}={EMULATED_GPU}" for name in models]
    hosts.target, hosts.worker_flags = first, (*more, *SHARED[:2])
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


if __name__ == "__main__":
    sys.exit(main())

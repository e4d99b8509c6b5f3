"""Three hosts with different models on shared GPUs, over a real Redis: does a flood of one slow another, who uses what is idle,
and how soon is a new model served?

    python bench/load/shared_fleet.py                two minutes
    python bench/load/shared_fleet.py --seconds 5    a first impression

Each host has one GPU made of sleep, 100 ms a batch of at most 8, which holds two models: a and b, b and c, a and c. The requests
of b are measured calm, then while a is asked for twice what its two GPUs can do. Then a alone is asked for more than one GPU can
do. Last a host with a further model joins; its first answer is to come within a second of the host being ready.
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.fleet import Fleet, fleet, wait_until_up
from bench.stand.generators import open_loop
from bench.stand.stand import EMULATED_GPU, Broken, Server

BATCH_MS, MAX_BATCH = 100.0, 8
CALM, FLOOD, ALONE = 20.0, 320.0, 120.0
"""Requests per second of b, of a beside it, and of a alone. A GPU does 80."""
HOSTS = ("ab", "bc", "ac")
DRAINED = 3.0
"""Seconds after which nothing is left of a flood, as its requests wait for 2 s at most."""
JOIN_WITHIN = 60.0
"""Most seconds until the model that joins is given up."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of each load")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("shared_fleet", seconds=options.seconds, pinning=stand.PINNING)
    environment = {"EMULATED_MS": str(BATCH_MS), "EMULATED_MAX": str(MAX_BATCH)}
    flags = ("--max-batch-size", str(MAX_BATCH))
    with fleet(EMULATED_GPU, *flags, name="shared_fleet", workers=0, environment=environment) as hosts:
        for server in [_host(hosts, models) for models in HOSTS]:
            wait_until_up("worker", server)
        shares(findings, hosts, options.seconds)
        joins(findings, hosts)
    return findings.close()


def shares(findings: Findings, hosts: Fleet, seconds: float) -> None:
    """Measure a model calm and beside a flood of another, and that other alone."""
    gateway = hosts.gateways[0]
    for model in "abc":
        _wait_for(gateway, model)
    calm = open_loop(gateway, CALM, seconds, "--model", "b")
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(open_loop, gateway, FLOOD, seconds + 4.0, "--model", "a")
        time.sleep(2.0)
        flooded = open_loop(gateway, CALM, seconds, "--model", "b")
        other.result()
    time.sleep(DRAINED)
    alone = open_loop(gateway, ALONE, seconds, "--model", "a")
    rows = [calm.row("b, calm"), flooded.row("b, a flooded"), alone.row("a alone")]
    findings.table("Three hosts of one GPU each over Redis; latency in ms", rows)
    longer = flooded.report.total.latency_ms.p95 - calm.report.total.latency_ms.p95
    findings.at_most("P95 of the one beside a flood of the other, above calm", longer, BATCH_MS, "ms")
    findings.at_least("answered of one that two hosts must carry", alone.answered, 0.99)
    findings.at_least("answered of the one beside a flood of the other", flooded.answered, 0.99)


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


if __name__ == "__main__":
    sys.exit(main())

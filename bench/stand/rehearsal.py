"""Rehearsal: a scenario of the simulator, run for real on GPUs made of sleep, and simulated."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.stand import stand
from bench.stand.closed_loop import Outcome
from bench.stand.generators import open_loop
from headway.simulator.engine import simulate
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario
from headway.simulator.traffic import arrivals

POLICIES = {
    "paced": ("--policy", "paced"),
    "window": ("--policy", "window"),
    "eager": ("--policy", "window", "--max-wait-ms", "0"),
}
"""Flags of `headway serve` for the policies of the simulator."""
PATIENT = (
    "--queue-timeout-ms", "30000", "--request-timeout-ms", "30000", "--gpu-timeout-ms", "10000", "--default-tier", "enterprise",
    "--log-level", "warning",
)  # fmt: skip


class Figures(msgspec.Struct, frozen=True):
    """P95 and P99 in ms, and answers per second."""

    p95: float
    p99: float
    answers: float


def simulated(scenario: Scenario, policy: str) -> Figures:
    """Figures of a simulation."""
    record = simulate(replace(scenario, policy=policy))
    return _figures(record.latency, scenario.duration - scenario.warmup)


def real(scenario: Scenario, policy: str) -> Figures:
    """Figures of a run: Poisson arrivals at the very instants that are simulated, or clients that wait.

    Of an open load the whole counts, as if there were no warm-up.

    Raises:
        Broken: the server does not come up, or the load did not report.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "BENCH_ALPHA_MS": str(scenario.alpha * 1000),
            "BENCH_BETA_MS": str(scenario.beta * 1000),
            "BENCH_JITTER": str(scenario.jitter),
            "BENCH_SLOW": str(scenario.slow),
            "BENCH_SLOW_MARK": str(Path(folder) / "slow"),
        }
        flags = (
            "--workers",
            str(scenario.workers),
            "--max-batch-size",
            str(scenario.max_batch),
            *PATIENT,
            *POLICIES[policy],
        )
        with stand.headway(f"{stand.TARGETS}:Emulated", *flags, name="rehearsal", environment=environment) as server:
            if scenario.clients:
                return _closed(server, scenario)
            return _open(server, scenario, Path(folder) / "instants.csv")


def _open(server: stand.Server, scenario: Scenario, path: Path) -> Figures:
    instants = list(arrivals(scenario, random.Random(f"{scenario.seed}/arrivals")))
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["TIMESTAMP"], *([f"{instant:.6f}"] for instant in instants)])
    rate = (len(instants) - 1) / (instants[-1] - instants[0])  # So that nothing is scaled.
    report = open_loop(
        server, rate, scenario.duration, "--arrivals", str(path), "--timeout", "30", "--expect", "upper"
    ).report
    latency = report.total.latency_ms
    return Figures(latency.p95, latency.p99, report.total.answered / scenario.duration)


def _closed(server: stand.Server, scenario: Scenario) -> Figures:
    seconds = scenario.duration - scenario.warmup
    command = [sys.executable, str(stand.HERE / "closed_loop.py"), server.url, "--clients", str(scenario.clients)]
    command += ["--seconds", f"{seconds:g}", "--warm-up", f"{scenario.warmup:g}"]
    done = subprocess.run(stand.on_load_core(command), capture_output=True, timeout=seconds + 60.0, check=True)
    return _figures(msgspec.json.decode(done.stdout, type=Outcome).latencies, seconds)


def _figures(latencies: Sequence[float], seconds: float) -> Figures:
    ascending = sorted(latencies)
    return Figures(percentile(ascending, 0.95) * 1000, percentile(ascending, 0.99) * 1000, len(latencies) / seconds)

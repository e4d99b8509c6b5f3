"""All departure policies on real traffic, through the simulator: the production core under virtual time.

    python bench/simulated/policies.py --traces DIR

DIR holds the Azure traces (see traces.py). Without it, or for lack of one of them, Poisson traffic and the traces that
are there are run.

Time is compressed so that the mean rate is 1,000 requests/s; each trace is played twice, and the first time is the
warm-up. A batch takes 100 ms and holds at most 100; 1.5 ms pass between a GPU's answer and its next batch. Deadlines
are 30 s, so that hardly anything is refused and latencies tell all. Traffic of a high coefficient of variation of its
gaps (CV) comes in bursts, which more GPUs help against, and no policy.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

from bench.simulated.traces import traffic
from bench.stand.findings import Findings
from headway.errors import SettingError
from headway.simulator.engine import simulate
from headway.simulator.record import Record
from headway.simulator.scenario import POLICIES, Scenario

RATE = 1_000.0
GPUS = (2, 3, 4)
ALPHA, MAX_BATCH = 0.1, 100
PATIENCE = 30.0
PROMISE_MS = 200.0
POISSON_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description="All policies on real traffic, through the simulator.")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="where the Azure traces lie")
    options = parser.parse_args()
    findings = Findings("policies", rate=RATE, batch_ms=ALPHA * 1000, max_batch=MAX_BATCH, deadline_s=PATIENCE)
    try:
        found = traffic(options.traces, findings)
    except SettingError as exc:
        print(exc, file=sys.stderr)
        return 2
    begun = time.monotonic()
    rows: list[dict[str, object]] = []
    p95: dict[tuple[str, int, str], float] = {}
    for (name, trace), gpus, policy in itertools.product(found.items(), GPUS, POLICIES):
        figures = _figures(_simulated(trace, gpus, policy))
        p95[name, gpus, policy] = figures["p95"]
        rows.append({"traffic": name, "GPUs": gpus, "policy": policy, **figures})
    findings.table(f"{RATE:,.0f} requests/s, {ALPHA * 1000:g} ms a batch of at most {MAX_BATCH}; latency in ms", rows)
    findings.say(f"{len(rows)} simulations in {time.monotonic() - begun:.0f} s.")
    for name in found.keys() - {"code"}:  # whose bursts set the 95th percentile, whatever the policy
        paced, *others = (p95[name, GPUS[0], policy] for policy in ("paced", *(set(POLICIES) - {"paced"})))
        findings.at_most(f"{name}, {GPUS[0]} GPUs: p95 of paced over the best other's", paced / min(others), 1.05)
    return findings.close()


def _simulated(trace: tuple[float, ...], gpus: int, policy: str) -> Record:
    lap = len(trace) / RATE if trace else POISSON_SECONDS
    return simulate(
        Scenario(
            rate=RATE,
            workers=gpus,
            alpha=ALPHA,
            max_batch=MAX_BATCH,
            policy=policy,
            trace=trace,
            duration=2 * lap,
            warmup=lap,
            queue_timeout=PATIENCE,
            timeout=PATIENCE,
            seed=1,
        )
    )


def _figures(record: Record) -> dict[str, float]:
    latency = sorted(record.latency)
    p50, p95, p99 = (latency[int(len(latency) * share)] * 1000 for share in (0.50, 0.95, 0.99))
    within = sum(1 for seconds in latency if seconds * 1000 <= PROMISE_MS)
    return {
        "CV": record.gap_variation,
        "p50": p50,
        "p95": p95,
        "p99": p99,
        f"% within {PROMISE_MS:g} ms": 100 * within / sum(record.offered),
        "batch": sum(record.size) / max(1, len(record.size)),
        "lost": sum(record.lost.values()),
    }


if __name__ == "__main__":
    sys.exit(main())

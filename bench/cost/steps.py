"""What Redis does for a request, function by function: how often, and how long.

    python bench/cost/steps.py                     half a minute
    python bench/cost/steps.py --rate 5000 --gpus 2

A gateway, a worker host with GPUs made of sleep (20 ms a batch of at most 64) and a controller; load is open-loop,
Poisson. The times are Redis's own, from its slow log, which for once logs everything; that makes each command a little
slower, so the shares count here and not the sums. Commands that run inside a function are in the function's time, too.
"""

from __future__ import annotations

import argparse
import sys

from bench.stand import fleet, generators, stand
from bench.stand.findings import Findings

BATCH_MS, MAX_BATCH = 20.0, 64
WARM_UP = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description="What Redis does for a request, function by function.")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load (default %(default)g)")
    parser.add_argument("--rate", type=float, nargs="+", default=[1000.0, 2500.0], help="requests per second")
    parser.add_argument("--gpus", type=int, default=1, help="of the worker host (default %(default)d)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings(
        "steps", seconds=options.seconds, gpus=options.gpus, batch_ms=BATCH_MS, max_batch=MAX_BATCH,
        warm_up_s=WARM_UP, pinning=stand.PINNING,
    )  # fmt: skip
    for rate in options.rate:
        rows, said = _measure(rate, options.seconds, options.gpus)
        findings.table(f"{rate:,.0f} requests/s; calls for each request, µs of Redis", rows)
        findings.say(said)
    return findings.close()


def _measure(rate: float, seconds: float, gpus: int) -> tuple[list[dict[str, object]], str]:
    with fleet.emulated(BATCH_MS, MAX_BATCH, hosts=1, gpus=gpus, name="steps") as made:
        generators.open_loop(made, rate, WARM_UP)
        with made.redis.stepping() as took:
            measured = generators.open_loop(made, rate, seconds, "--expect", "upper")
    requests = max(1, measured.report.total.answered)
    rows: list[dict[str, object]] = [
        {
            "command": name,
            "calls/request": len(times) / requests,
            "µs/call": sum(times) / len(times),
            "µs/request": sum(times) / requests,
        }
        for name, times in sorted(took.items(), key=lambda one: -sum(one[1]))
    ]
    roles = ", ".join(f"{role} {used:.0f}" for role, used in measured.cpu_us.items())
    return rows, f"CPU in µs for each of {requests:,} requests: {roles}."


if __name__ == "__main__":
    sys.exit(main())

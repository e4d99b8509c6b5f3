"""CPU time for each request at rates that people have, side by side with mosec, on GPUs that take their time.

    python bench/cost/peer_rates.py                            about five minutes
    python bench/cost/peer_rates.py --rounds 1 --seconds 8     a first impression

Open loop, Poisson arrivals: 1,000 requests/s on two GPUs and 3,000 on four. A GPU is a process that sleeps for 100 ms a
batch of at most 100. Headway runs with its defaults, an API key looked up and its rate limit counted for every request;
mosec as it comes, with a wait of 10 ms for a batch. The servers take turns, each round starting fresh ones; all that
belongs to a server is on one core, the load on another. A request that arrives alone costs several times what one does at
the brim (peer.py): what it needs is no longer in the processor's caches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.cost import peer
from bench.stand import generators, stand
from bench.stand.findings import Findings
from bench.stand.generators import Measured
from bench.stand.stand import Broken, Server

BATCH_MS, MAX_BATCH = 100.0, 100
WAIT_MS = 10
WARM_UP = 3.0
MOST = 1.0
"""Bound on the ratio of CPU time to mosec's."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A load, and the GPUs for it."""

    rate: float
    gpus: int

    def __str__(self) -> str:
        return f"{self.rate:,.0f}/s, {self.gpus} GPUs"


RATES = (Rate(1000.0, 2), Rate(3000.0, 4))
OURS, PEER = "headway", "mosec"


def main() -> int:
    options = _options()
    stand.end_in_order()
    findings = Findings(
        "peer_rates", rounds=options.rounds, seconds=options.seconds, batch_ms=BATCH_MS, max_batch=MAX_BATCH,
        wait_ms=WAIT_MS, warm_up_s=WARM_UP, pinning=stand.PINNING,
    )  # fmt: skip
    findings.say(f"{options.rounds} rounds of {options.seconds:g} s for each server and rate; {stand.PINNING}.")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        key = stand.write_key(keys)
        for rate in RATES:
            seen: dict[str, list[Measured]] = {OURS: [], PEER: []}
            for _ in range(options.rounds):
                ours = stand.emulated(BATCH_MS, MAX_BATCH, rate.gpus, "--keys", str(keys), name="rates-headway")
                seen[OURS].append(_measure(ours, rate, options.seconds, "--key", key))
                theirs = peer.mosec(max_batch=MAX_BATCH, wait_ms=WAIT_MS, batch_ms=BATCH_MS, workers=rate.gpus)
                seen[PEER].append(_measure(theirs, rate, options.seconds))
            _report(findings, rate, seen)
    return findings.close()


def _measure(start: AbstractContextManager[Server], rate: Rate, seconds: float, *flags: str) -> Measured:
    with start as server:
        generators.open_loop(server, rate.rate, WARM_UP, "--expect", "upper", *flags)
        measured = generators.open_loop(server, rate.rate, seconds, "--expect", "upper", *flags)
    total = measured.report.total
    if total.answered < total.requests or measured.report.mismatches:
        raise Broken(f"{server.name}: not every request at {rate} was answered: {total.outcomes}")
    return measured


def _report(findings: Findings, rate: Rate, seen: dict[str, list[Measured]]) -> None:
    cost = {name: statistics.median(one.server_us for one in rounds) for name, rounds in seen.items()}
    p95 = {name: statistics.median(one.report.total.latency_ms.p95 for one in rounds) for name, rounds in seen.items()}
    rows = [
        {
            "server": name,
            "µs CPU/request": cost[name],
            "front": statistics.median(one.cpu_us.get("front", 0.0) for one in rounds),
            "worker": statistics.median(one.cpu_us.get("worker", 0.0) for one in rounds),
            "least": min(one.server_us for one in rounds),
            "most": max(one.server_us for one in rounds),
            "P95 ms": p95[name],
            "ratio": cost[name] / cost[PEER],
        }
        for name, rounds in seen.items()
    ]
    findings.table(f"{rate} of {BATCH_MS:g} ms, at most {MAX_BATCH}", rows)
    findings.keep(str(rate), seen)
    findings.at_most(f"{rate}: CPU time against mosec", cost[OURS] / cost[PEER], MOST)
    findings.at_most(f"{rate}: P95 against mosec", p95[OURS] / p95[PEER], 1.0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU time per request beside mosec, at rates that people have.")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server (default %(default)d)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (default %(default)g)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

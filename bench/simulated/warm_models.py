"""Several models on GPUs that can't hold all of them: how many loads, compared with an optimum that knows all arrivals?

    python bench/simulated/warm_models.py                   all cases, about a minute of one core
    python bench/simulated/warm_models.py --seconds 900     a first impression

20 models share the load by Zipf's law with exponent 1.1; half-way, the popularity is reversed. A load takes 30 s, a batch of n requests 100 + 25 n ms
and holds 16 at most. Arrivals are Poisson. The production rules, queues and default policy run in virtual time (`bench/simulated/warm_gpus.py`).

The optimum knows all arrivals in advance, loads in no time, and puts any model anywhere. It is the larger of two load counts:

    MIN     serves requests one by one in order, with one copy of their model in any place; evicts the model whose next request is furthest away
            (Belady, "A study of replacement algorithms", IBM Systems Journal 1966)
    copies  the same for spans of 30 s, each of which needs as many copies of a model as its requests fill, with every batch full and every GPU
            busy all the time

Bounds: at most twice the loads of the optimum; P95 of requests whose model was warm when they came, after the first 300 s, at most one full batch
longer than on GPUs that hold all 20; if each model has a place, no load in the last quarter before the popularity shifts, nor in the last
quarter of all.
"""

import argparse
import bisect
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import msgspec

from bench.simulated.warm_gpus import Arrival, WarmRecord, WarmScenario, simulate_warm
from bench.stand.findings import Findings
from headway.simulator.report import percentile

MODELS = tuple(f"model-{number:02}" for number in range(20))
EXPONENT = 1.1
MOST = 2.0
"""Maximum ratio of our loads to the optimum's."""
SPAN = 30.0
"""Seconds of a span of the optimum by copies."""
SETTLED = 300.0
"""Seconds after which latencies count."""
BASE = WarmScenario(MODELS, 8, 3, 30.0, 0.1, 0.025, 16, 180.0, warmup=SETTLED)
CASES = ((8, 40.0, 1.0), (8, 80.0, 1.0), (4, 1.0, 1.0), (4, 0.3, 2.0), (4, 0.1, 4.0))
"""GPUs, requests per second, and factor for the duration."""


class Row(msgspec.Struct, frozen=True):
    """Result of a case; latencies in seconds."""

    gpus: int
    rate: float
    requests: int
    loads: int
    minimum: int
    copies: int
    settled: int
    warm_p95: float
    whole_p95: float
    cold: int
    cold_p95: float
    lost: int
    busy: float

    @property
    def ratio(self) -> float:
        """Loads relative to the optimum's."""
        return self.loads / max(self.minimum, self.copies)


def traffic(rate: float, seconds: float, seed: int) -> Iterator[Arrival]:
    """Yield arrivals whose popularity is reversed half-way."""
    rng = random.Random(f"{seed}/warm")
    weights = [1.0 / (rank + 1) ** EXPONENT for rank in range(len(MODELS))]
    now = 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        yield now, rng.choices(MODELS if now < seconds / 2 else MODELS[::-1], weights)[0]


def fewest(needs: Sequence[set[Hashable]], places: int) -> int:
    """Return the minimum number of loads that provides everything each step needs, step by step.

    A step that needs more than there are places gets as much as fits.
    """
    uses: defaultdict[Hashable, list[int]] = defaultdict(list)
    for instant, needed in enumerate(needs):
        for need in needed:
            uses[need].append(instant)
    held, loads = set[Hashable](), 0
    for instant, needed in enumerate(needs):
        for need in sorted(needed - held, key=repr):
            if len(held) >= places:
                idle = sorted(held - needed, key=repr)
                if not idle:
                    break
                held.discard(max(idle, key=lambda other: _next_use(uses[other], instant)))
            loads += 1
            held.add(need)
    return loads


def _next_use(uses: Sequence[int], instant: int) -> float:
    at = bisect.bisect_right(uses, instant)
    return uses[at] if at < len(uses) else math.inf


def copies_needed(arrivals: Sequence[Arrival]) -> list[set[Hashable]]:
    """Return the copies that the requests of each span fill."""
    spans: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for at, model in arrivals:
        spans[int(at // SPAN)][model] += 1
    needs: list[set[Hashable]] = []
    for span in range(max(spans) + 1):
        filled = {model: count * BASE.entry_seconds / SPAN for model, count in spans[span].items()}
        needs.append({(model, copy) for model, full in filled.items() for copy in range(max(1, math.ceil(full)))})
    return needs


def measure(gpus: int, rate: float, seconds: float, seed: int) -> Row:
    """Run a case, and the same on GPUs that hold all models."""
    arrivals = list(traffic(rate, seconds, seed))
    scenario = replace(BASE, gpus=gpus)
    ours = simulate_warm(scenario, arrivals)
    whole = simulate_warm(replace(scenario, room=len(MODELS), look_every=10.0), arrivals)
    return Row(
        gpus,
        rate,
        len(arrivals),
        len(ours.loads),
        fewest([{model} for _, model in arrivals], gpus * scenario.room),
        fewest(copies_needed(arrivals), gpus * scenario.room),
        _settled(ours, seconds),
        percentile(sorted(ours.warm), 0.95),
        percentile(sorted(whole.warm), 0.95),
        len(ours.cold),
        percentile(sorted(ours.cold), 0.95) if ours.cold else 0.0,
        sum(ours.lost.values()),
        ours.busy / seconds / gpus,
    )


def _settled(record: WarmRecord, seconds: float) -> int:
    """Return the loads in the last quarter of each half."""
    return sum((loaded.at / seconds) % 0.5 >= 0.375 and loaded.at < seconds for loaded in record.loads)


def judge(row: Row, findings: Findings) -> None:
    name = f"{row.gpus} GPUs, {row.rate:g}/s"
    findings.at_most(f"{name}: loads over those of the optimum", row.ratio, MOST)
    batch = BASE.alpha + BASE.beta * BASE.max_batch
    findings.at_most(f"{name}: P95 of warm requests above that with all warm", row.warm_p95 - row.whole_p95, batch, "s")
    if row.gpus * BASE.room >= len(MODELS):
        findings.none(f"{name}: loads once it has settled", row.settled)


def main() -> int:
    parser = argparse.ArgumentParser(description="Loads of models on GPUs that cannot hold all of them.")
    parser.add_argument("--seconds", type=float, default=1800.0, help="virtual seconds of the first cases")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    findings = Findings("warm_models", seed=args.seed, seconds=args.seconds)
    rows = [measure(gpus, rate, args.seconds * longer, args.seed) for gpus, rate, longer in CASES]
    findings.table(
        "20 models on GPUs of 3",
        [
            {
                "GPUs": row.gpus,
                "requests/s": row.rate,
                "busy": f"{row.busy:.0%}",
                "loads": row.loads,
                "MIN": row.minimum,
                "copies": row.copies,
                "ratio": round(row.ratio, 2),
                "settled": row.settled,
                "warm p95, s": round(row.warm_p95, 3),
                "all warm p95, s": round(row.whole_p95, 3),
                "cold": row.cold,
                "cold p95, s": round(row.cold_p95, 1),
                "lost": row.lost,
            }
            for row in rows
        ],
    )
    for row in rows:
        judge(row, findings)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())

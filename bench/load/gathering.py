"""One queue for all: do batches fill as well through three gateways as through one, and on two hosts as on one?

    python bench/load/gathering.py                about four minutes
    python bench/load/gathering.py --seconds 10   a first impression
    python bench/load/gathering.py --only B2 lone

B2      1,000 requests/s on two GPUs made of sleep (100 ms a batch of at most 100), over Redis: through one gateway, and
        through three at 333 requests/s each. Batches must be as full, and as many.
hosts   the same rate on two worker hosts with one GPU each, beside the single process `serve` with two: the 95th
        percentile of latency may be 10 ms more.
lone    a lone request on an idle system over Redis, beside a bare socket server (see bench/stand/lone.py): what is added at p99.

Load is open-loop, Poisson, counted from the instant each request was due, with the same seed for all of one case. Each
is warmed up for some seconds first. Rounds take turns, and the figures are means over them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.stand import fleet, generators, lone, stand
from bench.stand.findings import Findings
from bench.stand.fleet import Fleet
from bench.stand.generators import Measured
from bench.stand.stand import Server

BATCH_MS, MAX_BATCH, GPUS = 100.0, 100, 2
RATE = 1_000.0
WARM_UP = 5.0
IDEAL_MS = BATCH_MS * (1 + 0.95 / GPUS)
"""The 95th percentile with departures evenly spaced."""
APART = 0.05
"""Largest difference of mean fill, and of the number of batches, between one gateway and three."""
LATER_MS = 10.0
"""Most that the 95th percentile on two hosts may exceed that of the single process."""
ADDED_MS = 5.0
"""Most that a lone request may pay at p99 over Redis."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one load found: mean entries in a batch, batches per second, and the report."""

    fill: float
    batches: float
    measured: Measured

    @property
    def p95(self) -> float:
        """Latency in ms."""
        return self.measured.report.total.latency_ms.p95


def main() -> int:
    options = _options()
    stand.end_in_order()
    findings = Findings(
        "gathering", seconds=options.seconds, rounds=options.rounds, rate=RATE, batch_ms=BATCH_MS, max_batch=MAX_BATCH,
        gpus=GPUS, warm_up_s=WARM_UP, ideal_p95_ms=IDEAL_MS, pinning=stand.PINNING,
    )  # fmt: skip
    findings.say(f"{options.rounds} rounds of {options.seconds:g} s for each; {stand.PINNING}.")
    chosen = set(options.only)
    runs = _turns(chosen, options.rounds, options.seconds)
    if runs:
        rows = [_row(name, turns) for name, turns in runs.items()]
        findings.table(f"{RATE:,.0f} requests/s on two GPUs; ms, CPU in µs per request", rows)
        failed = sum(run.measured.failures for turns in runs.values() for run in turns)
        findings.none("requests without a right answer", failed)
        for name, turns in runs.items():
            findings.keep(name, turns)
    if "B2" in chosen:
        _same(findings, runs[ONE], runs[THREE])
    if "hosts" in chosen:
        later = _mean(runs[TWO_HOSTS], lambda run: run.p95) - _mean(runs[SINGLE], lambda run: run.p95)
        findings.at_most("p95 on two hosts, less that of the single process", later, LATER_MS, "ms")
    if "lone" in chosen:
        _lone(findings, options.seconds)
    return findings.close()


ONE, THREE = "one gateway", "three gateways"
SINGLE, TWO_HOSTS = "single process", "two hosts of one GPU"


def _turns(chosen: set[str], rounds: int, seconds: float) -> dict[str, list[Run]]:
    """The runs of each set-up; each round takes all of them in turn."""
    over_redis = partial(fleet.emulated, BATCH_MS, MAX_BATCH)
    setups: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
    if "B2" in chosen:
        setups[ONE] = partial(over_redis, hosts=1, gpus=GPUS, name="gathering-one")
        setups[THREE] = partial(over_redis, hosts=1, gpus=GPUS, gateways=3, name="gathering-three")
    if "hosts" in chosen:
        setups[SINGLE] = partial(stand.emulated, BATCH_MS, MAX_BATCH, GPUS, name="gathering-single")
        setups[TWO_HOSTS] = partial(over_redis, hosts=GPUS, gpus=1, name="gathering-hosts")
    runs: dict[str, list[Run]] = {name: [] for name in setups}
    for number in range(rounds):
        for name, start in setups.items():
            with start() as service:
                runs[name].append(_run(service, seconds, seed=number))
    return runs


def _run(service: Server | Fleet, seconds: float, seed: int) -> Run:
    urls = service.urls if isinstance(service, Fleet) else [service.url]
    generators.spread(service, urls, RATE, WARM_UP, seed)
    entries, batches = _batches(service)
    measured = generators.spread(service, urls, RATE, seconds, seed)
    more_entries, more_batches = _batches(service)
    count = max(1.0, more_batches - batches)
    return Run((more_entries - entries) / count, count / measured.report.elapsed_s, measured)


def _batches(service: Server | Fleet) -> tuple[float, float]:
    """Entries in all batches so far, and batches."""
    return service.total("headway_batch_size_sum"), service.total("headway_batch_size_count")


def _same(findings: Findings, one: list[Run], three: list[Run]) -> None:
    """B2: as full, and as many."""
    findings.figure("B2: mean batch through one gateway", _mean(one, _fill))
    findings.figure("B2: mean batch through three gateways", _mean(three, _fill))
    for what, value in (("mean fill", _fill), ("batches per second", _count)):
        apart = abs(_mean(three, value) / _mean(one, value) - 1.0)
        findings.at_most(f"B2: {what}, three gateways against one: difference", 100 * apart, 100 * APART, "%")


def _fill(run: Run) -> float:
    return run.fill


def _count(run: Run) -> float:
    return run.batches


def _lone(findings: Findings, seconds: float) -> None:
    """Far enough apart that no two meet; the function takes microseconds."""
    with fleet.fleet(f"{stand.TARGETS}:upper", name="gathering-lone") as made:
        what = "a lone request over Redis: p99 of the round trip, less the bare server's"
        lone.measure(findings, made, seconds, what, ADDED_MS)


def _row(name: str, turns: list[Run]) -> dict[str, object]:
    totals = [run.measured.report.total for run in turns]
    return {
        "": name,
        "requests": sum(total.requests for total in totals),
        "failed": sum(run.measured.failures for run in turns),
        "fill": _mean(turns, _fill),
        "batches/s": _mean(turns, _count),
        "p50": statistics.fmean(total.latency_ms.p50 for total in totals),
        "p95": _mean(turns, lambda run: run.p95),
        "p99": statistics.fmean(total.latency_ms.p99 for total in totals),
        "max": max(total.latency_ms.max for total in totals),
        "ideal p95": round(IDEAL_MS, 1),
        "CPU µs": _mean(turns, lambda run: run.measured.server_us),
        "lag p99": max(run.measured.report.generator.lag_ms.p99 for run in turns),
    }


def _mean(turns: list[Run], value: Callable[[Run], float]) -> float:
    return statistics.fmean(value(run) for run in turns)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One queue for all gateways and hosts.")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each set-up (default %(default)d)")
    names = ["B2", "hosts", "lone"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

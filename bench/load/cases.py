"""The cases that Headway is designed for, with real servers, real clients and emulated GPUs; and one queue for all gateways and hosts.

    python bench/load/cases.py                             about ten minutes
    python bench/load/cases.py --seconds 10 --rounds 1     a first impression
    python bench/load/cases.py --only H1 H7
    python bench/load/cases.py --only B2 hosts remote      over Redis; writes bench/out/gathering.json

H1, H3   1,000 requests/s on two GPUs: P95 against that of perfectly even spacing
H7       a lone request on an idle system: what Headway adds to the function's run
H2       10,000 requests/s on eleven GPUs, in steps: how far this machine gets, and what stops it
B2       1,000 requests/s on two GPUs (100 ms a batch of at most 100), over Redis: through one gateway, and a third each through three. Number and
         size of the batches must be the same.
hosts    the same rate on two worker hosts with one GPU each, compared with `serve` with two: P95 may be 10 ms higher
remote   a lone request on an idle system over Redis: what is added at P99

Load is open-loop, Poisson, timed from the instant each request was due, so every latency includes the generator's own lateness (except for lone
requests: see bench/stand/lone.py). Each server is warmed up first, because it learns batch time and rate in service. B2 and hosts take turns, with
the same seeds in a round; their results are means over the rounds.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from bench.stand import fleet, generators, lone, stand
from bench.stand.findings import Findings
from bench.stand.fleet import Fleet
from bench.stand.generators import Measured
from bench.stand.stand import Server

WARM_UP = 5.0
LATE_MS = 5.0
BUSY = 0.9
ADDED_MS = {"H7": 2.0, "remote": 5.0}
"""Maximum milliseconds added to a lone request at P99."""
APART = 0.05
"""Maximum difference in batch size, and in the number of batches, between one gateway and three."""
LATER_MS = 10.0
"""Maximum milliseconds by which P95 on two hosts may exceed that of one process."""
LOCAL, SHARED = ("H1", "H3", "H7", "H2"), ("B2", "hosts", "remote")
"""Cases of one process, and of a fleet; each group writes its own file."""


@dataclass(frozen=True, slots=True)
class Case:
    """A load, its GPUs, and the bound on P95 in ms."""

    name: str
    batch_ms: float
    max_batch: int
    workers: int
    rate: float
    p95_ms: float

    @property
    def ideal_ms(self) -> float:
        """P95 with departures evenly spaced by s = α/k: about s·(k + 0.95)."""
        return self.batch_ms * (1 + 0.95 / self.workers)


CASES = (Case("H1", 100, 100, 2, 1_000, 155), Case("H3", 50, 32, 2, 1_000, 85))
STEPS = tuple(
    Case(f"H2 at {rate:,}/s", 100, 100, -(-rate * 11 // 10_000), rate, 125) for rate in range(2000, 10_001, 2000)
)


@dataclass(frozen=True, slots=True)
class Run:
    """Mean batch size, batches per second, and a load report for each gateway."""

    fill: float
    batches: float
    cpu_us: float
    core: float
    loads: Sequence[Measured]

    @property
    def failures(self) -> int:
        return sum(load.failures for load in self.loads)

    @property
    def p95(self) -> float:
        return statistics.fmean(load.report.total.latency_ms.p95 for load in self.loads)


Start = Callable[[], AbstractContextManager[Server] | AbstractContextManager[Fleet]]


def main() -> int:
    options = _options()
    stand.end_in_order()
    codes = []
    for name, measure, cases in (("cases", _local, LOCAL), ("gathering", _shared, SHARED)):
        chosen = [case for case in cases if case in options.only]
        if chosen:
            findings = Findings(
                name, seconds=options.seconds, rounds=options.rounds, warm_up_s=WARM_UP, pinning=stand.PINNING
            )
            findings.say(f"{' '.join(chosen)} with load for {options.seconds:g} s each; {stand.PINNING}.")
            measure(findings, chosen, options)
            codes.append(findings.close())
    return max(codes)


# In one process.


def _local(findings: Findings, chosen: Sequence[str], options: argparse.Namespace) -> None:
    rows = []
    for case in CASES:
        if case.name in chosen:
            run = _run(_served(case), case.rate, options.seconds)
            findings.keep(case.name, run.loads)
            findings.at_most(f"{case.name}: p95", run.p95, case.p95_ms, "ms")
            findings.none(f"{case.name}: requests without a right answer", run.failures)
            rows.append(_row(case, case.name, [run]))
    if rows:
        findings.table("1,000 requests/s on two GPUs; ms, CPU in µs per request, cores in shares", rows)
    if "H7" in chosen:
        with stand.headway(f"{stand.TARGETS}:upper", "--log-level", "warning", name="cases-H7") as server:
            what = "H7: p99 of the round trip, less the bare server's"
            lone.measure(findings, server, options.seconds, what, ADDED_MS["H7"])
    if "H2" in chosen:
        _climb(options.seconds, findings)


def _served(case: Case) -> Start:
    name = f"cases-{case.name.replace(' ', '-').replace('/', '-')}"
    return partial(stand.emulated, case.batch_ms, case.max_batch, case.workers, name=name)


def _climb(seconds: float, findings: Findings) -> None:
    """Raise the rate of H2 in steps, until one isn't carried."""
    rows, carried = [], 0.0
    for step in STEPS:
        run = _run(_served(step), step.rate, seconds)
        findings.keep(step.name, run.loads)
        limit = step.ideal_ms * STEPS[-1].p95_ms / STEPS[-1].ideal_ms
        fine = run.p95 <= limit and not run.failures
        verdict = "yes" if fine else _culprit(run)
        rows.append(_row(step, step.name, [run]) | {"p95 ≤": round(limit, 1), "carried": verdict})
        if not fine:
            break
        carried = step.rate
    findings.table("100 ms a batch of at most 100, eleven GPUs for 10,000 requests/s; as above", rows)
    findings.at_least("H2: requests/s carried on this machine", carried, STEPS[-1].rate)
    if carried == STEPS[-1].rate:
        findings.at_most("H2: p95", run.p95, STEPS[-1].p95_ms, "ms")


def _culprit(run: Run) -> str:
    """Return what limited a step."""
    own = run.loads[0].report.generator
    if run.core > BUSY:
        return "no: the server's core is full"
    if own.cpu_share > BUSY or own.lag_ms.p99 > LATE_MS:
        return "no: the load generator is late"
    return "no: see the latencies"


# Over Redis.

ONE, THREE = "one gateway", "three gateways"
SINGLE, TWO_HOSTS = "single process", "two hosts of one GPU"


def _shared(findings: Findings, chosen: Sequence[str], options: argparse.Namespace) -> None:
    """Measure the cases of a fleet. Each round runs all of them."""
    case = CASES[0]
    over_redis = partial(fleet.emulated, case.batch_ms, case.max_batch)
    setups: dict[str, Start] = {}
    if "B2" in chosen:
        setups[ONE] = partial(over_redis, hosts=1, gpus=case.workers, name="gathering-one")
        setups[THREE] = partial(over_redis, hosts=1, gpus=case.workers, gateways=3, name="gathering-three")
    if "hosts" in chosen:
        setups[SINGLE] = _served(case)
        setups[TWO_HOSTS] = partial(over_redis, hosts=case.workers, gpus=1, name="gathering-hosts")
    runs: dict[str, list[Run]] = {name: [] for name in setups}
    for number in range(options.rounds):
        for name, start in setups.items():
            runs[name].append(_run(start, case.rate, options.seconds, seed=number))
    if runs:
        rows = [_row(case, name, turns) for name, turns in runs.items()]
        findings.table(f"{case.rate:,.0f} requests/s on two GPUs; ms, CPU in µs per request", rows)
        failed = sum(run.failures for turns in runs.values() for run in turns)
        findings.none("requests without a right answer", failed)
        for name, turns in runs.items():
            findings.keep(name, turns)
    _compare(findings, chosen, runs)
    if "remote" in chosen:
        with fleet.fleet(f"{stand.TARGETS}:upper", name="gathering-lone") as made:
            what = "a lone request over Redis: p99 of the round trip, less the bare server's"
            lone.measure(findings, made, options.seconds, what, ADDED_MS["remote"])


def _compare(findings: Findings, chosen: Sequence[str], runs: Mapping[str, Sequence[Run]]) -> None:
    if "B2" in chosen:
        findings.figure("B2: mean batch through one gateway", _mean("fill", runs[ONE]))
        findings.figure("B2: mean batch through three gateways", _mean("fill", runs[THREE]))
        for what, figure in (("mean fill", "fill"), ("batches per second", "batches")):
            apart = abs(_mean(figure, runs[THREE]) / _mean(figure, runs[ONE]) - 1.0)
            findings.at_most(f"B2: {what}, three gateways against one: difference", 100 * apart, 100 * APART, "%")
    if "hosts" in chosen:
        later = _mean("p95", runs[TWO_HOSTS]) - _mean("p95", runs[SINGLE])
        findings.at_most("p95 on two hosts, less that of the single process", later, LATER_MS, "ms")


# For both.


def _run(start: Start, rate: float, seconds: float, seed: int | None = None) -> Run:
    """Start a service, warm it up, and load all its gateways, with a seed if there is one."""
    with start() as service, ThreadPoolExecutor() as threads:
        doors = service.gateways if isinstance(service, Fleet) else [service]

        def load(seconds: float) -> list[Measured]:
            loads = []
            for number, door in enumerate(doors):
                flags = ("--expect", "upper", *(() if seed is None else ("--seed", str(10 * seed + number))))
                loads.append(threads.submit(generators.open_loop, door, rate / len(doors), seconds, *flags))
            return [load.result() for load in loads]

        load(WARM_UP)
        before, used = _in_batches(service), service.usage()
        loads = load(seconds)
        spent = sum(generators.spent(used, service.usage()).values())
        entries, batches = (late - early for late, early in zip(_in_batches(service), before, strict=True))
    elapsed = max(load.report.elapsed_s for load in loads)
    answered = max(1, sum(load.report.total.answered for load in loads))
    return Run(entries / max(1.0, batches), batches / elapsed, 1e6 * spent / answered, spent / elapsed, loads)


def _in_batches(service: Server | Fleet) -> tuple[float, float]:
    return service.total("headway_batch_size_sum"), service.total("headway_batch_size_count")


def _mean(figure: str, turns: Sequence[Run]) -> float:
    return statistics.fmean(getattr(run, figure) for run in turns)


def _row(case: Case, name: str, turns: Sequence[Run]) -> dict[str, object]:
    totals = [load.report.total for run in turns for load in run.loads]
    own = [load.report.generator for run in turns for load in run.loads]
    return {
        "": name,
        "GPUs": case.workers,
        "requests": sum(total.requests for total in totals),
        "failed": sum(run.failures for run in turns),
        "fill": _mean("fill", turns),
        "batches/s": _mean("batches", turns),
        "p50": statistics.fmean(total.latency_ms.p50 for total in totals),
        "p95": _mean("p95", turns),
        "p99": statistics.fmean(total.latency_ms.p99 for total in totals),
        "max": max(total.latency_ms.max for total in totals),
        "ideal p95": round(case.ideal_ms, 1),
        "CPU µs": statistics.fmean(run.cpu_us for run in turns),
        "server core": max(run.core for run in turns),
        "load core": max(generator.cpu_share for generator in own),
        "lag p99": max(generator.lag_ms.p99 for generator in own),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cases that Headway is designed for.")
    parser.add_argument("--seconds", type=float, default=60.0, help="load for each case (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of B2 and hosts (default %(default)d)")
    names = [*LOCAL, *SHARED]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

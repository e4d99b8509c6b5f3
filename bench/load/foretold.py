"""What the simulator says beside what really happens: the worst configurations of never_worse.py, with emulated GPUs.

    python bench/simulated/never_worse.py     first: it leaves its outcomes in bench/out
    python bench/load/foretold.py             about a quarter of an hour
    python bench/load/foretold.py --worst 0   only the configurations that never_worse.py names

Each runs under `paced`, `window` and eager (a window of 0 ms), on GPUs made of sleep, from a cold start: Poisson arrivals at the
very instants that are simulated, or clients that wait for their answers. Only configurations that this machine can carry are
taken. Simulated and real figures are of the same seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from bench.simulated import draws
from bench.simulated.draws import Drawn
from bench.simulated.never_worse import Row
from bench.stand import rehearsal, stand
from bench.stand.findings import OUT, Findings
from bench.stand.rehearsal import POLICIES, Figures
from headway.simulator.scenario import Scenario

KINDS = ("poisson", "closed")
OFF = 0.05
"""Most by which a simulated P95 may differ from a real one, as a share of the real one."""
MOST = 1.03
"""Most that the ratio of paced to the better one of window and eager may be."""


def main() -> int:
    options = _options()
    stand.end_in_order()
    findings = Findings(
        "foretold", seconds=options.seconds, warm_up_s=options.warm_up, seed=options.seed, pinning=stand.PINNING
    )
    rows: list[dict[str, object]] = []
    ratios: list[dict[str, object]] = []
    off: list[float] = []
    for drawn in _chosen(options):
        scenario = _shortened(drawn, options)
        real = {name: rehearsal.real(scenario, name) for name in POLICIES}
        foretold = {name: rehearsal.simulated(scenario, name) for name in POLICIES}
        for name in POLICIES:
            rows.append(_row(drawn, name, real[name], foretold[name]))
        off += [abs(foretold[name].p95 / real[name].p95 - 1) for name in POLICIES]
        ratios.append({"configuration": drawn.name, "real": _ratio(drawn, real), "simulated": _ratio(drawn, foretold)})
        findings.say(f"{drawn.name}: {_ratio(drawn, real):.3f} real, {_ratio(drawn, foretold):.3f} simulated")
    findings.table("Real and simulated; ms and answers/s", rows)
    findings.table(
        "Ratio of paced to the better one of window and eager: P95 or, of clients, answers/s turned round", ratios
    )
    if off:
        findings.at_most("median difference of P95", statistics.median(off), OFF)
        findings.at_most("largest difference of P95", max(off), OFF)
        findings.at_most("worst real ratio", max(float(str(row["real"])) for row in ratios), MOST)
    return findings.close()


def _chosen(options: argparse.Namespace) -> Iterator[Drawn]:
    """Configurations by name, then the worst ones of the last run that this machine can carry."""
    if not options.no_named:
        yield from (
            drawn for drawn in draws.named() if drawn.kind in KINDS and drawn.scenario.rate <= options.most_rate
        )
    path = OUT / f"never_worse-{options.seed}.jsonl"
    rows = [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines()] if options.worst else []
    found = 0
    for row in sorted(rows, key=lambda row: -row.ratio):
        drawn = draws.draw(options.seed, int(row.name), {})
        if found < options.worst and drawn.kind in KINDS and drawn.scenario.rate <= options.most_rate:
            found += 1
            yield drawn


def _shortened(drawn: Drawn, options: argparse.Namespace) -> Scenario:
    """Scenario of as many seconds as are run. Of open loads the cold start counts, too."""
    warm_up = options.warm_up if drawn.kind == "closed" else 0.0
    return replace(drawn.scenario, warmup=warm_up, duration=warm_up + options.seconds)


def _row(drawn: Drawn, policy: str, real: Figures, foretold: Figures) -> dict[str, object]:
    fleet = drawn.scenario
    load = f"{fleet.clients} clients" if fleet.clients else f"{fleet.rate:.0f}/s, {drawn.load:.0%}"
    service = f"{fleet.workers} × {fleet.alpha * 1000:g} + {fleet.beta * 1000:.3g}·n ≤ {fleet.max_batch}"
    service += f", ×{fleet.slow:g}" * (fleet.slow != 1.0) + f", ±{fleet.jitter:.0%}" * (fleet.jitter > 0.0)
    return {
        "configuration": drawn.name,
        "GPUs, ms": service,
        "load": load,
        "policy": policy,
        "p95": real.p95,
        "simulated": foretold.p95,
        "off %": 100 * (foretold.p95 / real.p95 - 1),
        "p99": real.p99,
        "simulated p99": foretold.p99,
        "off % p99": 100 * (foretold.p99 / real.p99 - 1),
        "answers/s": real.answers,
        "simulated/s": foretold.answers,
    }


def _ratio(drawn: Drawn, figures: dict[str, Figures]) -> float:
    paced, window, eager = (figures[name] for name in POLICIES)
    if drawn.kind == "closed":
        return max(window.answers, eager.answers) / paced.answers
    return paced.p95 / min(window.p95, eager.p95)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The simulator beside real runs with emulated GPUs.")
    parser.add_argument(
        "--worst", type=int, default=12, metavar="N", help="worst of never_worse.py (default %(default)d)"
    )
    parser.add_argument("--no-named", action="store_true", help="leave out those that never_worse.py names")
    parser.add_argument("--seed", type=int, default=1, help="of never_worse.py's run (default %(default)d)")
    parser.add_argument("--seconds", type=float, default=8.0, help="that count, of each run (default %(default)g)")
    parser.add_argument("--warm-up", type=float, default=2.0, help="of clients that wait (default %(default)g s)")
    parser.add_argument(
        "--most-rate", type=float, default=1000.0, help="highest requests/s taken (default %(default)g)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

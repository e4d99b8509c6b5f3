"""All benchmarks, one after the other.

    python bench/run.py                     short: a first impression, about a quarter of an hour
    python bench/run.py --full              as the documentation quotes them, about an hour and a half
    python bench/run.py --only cases peer   some of them
    python bench/run.py --traces DIR        with the Azure traces (see bench/simulated/traces.py)

Each is a program of its own, with arguments of its own (--help). Their tables appear here, their results as JSON in
bench/out. The exit code is 1 when one of them missed a bound, else 0. Run them on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.stand import stand

_HERE = Path(__file__).parent
_GRACE = 60.0
_VERDICTS = {0: "all bounds met", 1: "a bound missed", 2: "could not run"}


@dataclass(frozen=True, slots=True)
class Program:
    """One benchmark: its folder, what it asks, and its arguments for a short run and a full one."""

    group: str
    what: str
    short: tuple[str, ...]
    full: tuple[str, ...]


PROGRAMS = {
    "policies": Program("simulated", "all policies on real traffic, simulated", (), ()),
    "never_worse": Program("simulated", "the default policy on random services", ("--configurations", "16"), ()),
    "promised": Program("simulated", "the cases it is designed for, simulated", (), ()),
    "formation": Program("simulated", "batches formed at the claim or by gateways, simulated", (), ()),
    "sharding": Program("simulated", "a queue cut into shards, simulated", (), ()),
    "warm_models": Program("simulated", "loads of models on GPUs that cannot hold all", ("--seconds", "900"), ()),
    "cases": Program("load", "the cases it is designed for", ("--seconds", "10"), ("--seconds", "60")),
    "shared_gpus": Program("load", "several models on shared GPUs", ("--seconds", "5"), ("--seconds", "20")),
    "shared_fleet": Program(
        "load", "hosts of different models on shared GPUs, over Redis", ("--seconds", "5"), ("--seconds", "20")
    ),
    "overload": Program("load", "half as much again as there is capacity", ("--seconds", "10"), ("--seconds", "30")),
    "foretold": Program(
        "load", "simulated beside real, where paced does worst", ("--worst", "0", "--seconds", "4"), ()
    ),
    "plans": Program("load", "do plans hold?", ("--plans", "3", "--real", "1"), ()),
    "peer": Program(
        "cost", "CPU time beside mosec", ("--rounds", "2", "--seconds", "4"), ("--rounds", "5", "--seconds", "10")
    ),
    "peer_rates": Program(
        "cost", "CPU time beside mosec at everyday rates", ("--rounds", "1", "--seconds", "6"), ("--seconds", "30")
    ),
    "doors": Program("cost", "CPU time door by door", ("--rounds", "1", "--seconds", "3"), ()),
    "payload": Program("cost", "large payloads", ("--seconds", "3"), ("--seconds", "20")),
    "holds": Program("cost", "what holds the event loops", ("--seconds", "3"), ("--seconds", "10")),
    "growth": Program("cost", "cost by rate, by workers, by waiting client", ("--seconds", "4"), ("--seconds", "30")),
    "hotspots": Program("cost", "where the time goes", ("--seconds", "4"), ("--seconds", "20")),
    "exactness": Program(
        "promises", "every answer to its own request", ("--requests", "100000"), ("--requests", "1000000")
    ),
    "fleet_peer": Program(
        "cost",
        "CPU time over Redis, beside Triton",
        ("--rounds", "1", "--seconds", "4"),
        ("--rounds", "3", "--seconds", "10"),
    ),
    "instructions": Program("cost", "instructions of Redis for each call", ("--times", "50"), ()),
    "gathering": Program(
        "load", "one queue for all gateways and hosts", ("--rounds", "1", "--seconds", "10"), ("--seconds", "60")
    ),
    "many_versions": Program("cost", "versions that come and go", ("--versions", "150"), ()),
    "many_names": Program("cost", "names that nobody serves", ("--names", "10000"), ()),
    "collectors": Program(
        "load",
        "collectors of traces in trouble",
        ("--rounds", "1", "--seconds", "4"),
        ("--rounds", "5", "--seconds", "10"),
    ),
    "idle": Program("cost", "what is done at rest", ("--seconds", "10"), ()),
    "claims": Program("cost", "claims by many hosts", ("--seconds", "4"), ("--seconds", "15")),
    "ledger": Program(
        "cost", "rows per second, and what they cost", ("--seconds", "4"), ("--rounds", "10", "--seconds", "10")
    ),
    "flood": Program("load", "floods, lost workers, exact limits", ("--seconds", "8", "--minutes", "0.2"), ()),
    "proxied": Program(
        "promises",
        "restarts, slow clients and idle connections behind each proxy",
        ("--seconds", "30", "--only", "rolling", "slow"),
        (),
    ),
    "drills": Program(
        "promises",
        "what clients see of failures behind each proxy",
        ("--only", "gateways-rolling", "redis-blip", "sentinel-planned", "--proxy", "haproxy"),
        (),
    ),
    "chaos": Program("promises", "everything is killed, Redis too", ("--seconds", "60"), ("--seconds", "600")),
    "neighbours": Program(
        "load", "one tenant at its worst, another one beside it", ("--seconds", "3"), ("--seconds", "20")
    ),
    "soak": Program("promises", "does anything grow?", ("--minutes", "0.5"), ("--minutes", "20")),
}
REPLAYING = ("policies", "never_worse", "formation")
"""Those that take traces."""


def main() -> int:
    options = _options()
    stand.end_in_order()
    outcomes: dict[str, str] = {}
    worst = 0
    for name in options.only:
        program = PROGRAMS[name]
        arguments = [*(program.full if options.full else program.short)]
        if name in REPLAYING and options.traces:
            arguments += ["--traces", options.traces]
        print(f"\n{name}: {program.what}  (bench/{program.group}/{name}.py {' '.join(arguments)})\n", flush=True)
        begun = time.monotonic()
        code = _run([sys.executable, str(_HERE / program.group / f"{name}.py"), *arguments])
        worst = worst or int(code != 0)
        outcomes[name] = f"{_VERDICTS.get(code, f'exit code {code}')}, {time.monotonic() - begun:.0f} s"
    print()
    for name, outcome in outcomes.items():
        print(f"{name:<10} {outcome}")
    return worst


def _run(command: list[str]) -> int:
    """Run a program to its end; when this one is told to end, that one is told first."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="All benchmarks, one after the other.",
        epilog="; ".join(f"{name}: {program.what}" for name, program in PROGRAMS.items()),
    )
    parser.add_argument("--full", action="store_true", help="as the documentation quotes them")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--traces", metavar="DIR", help="where the Azure traces lie")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

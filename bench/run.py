"""Runs all benchmarks, one after the other.

    python bench/run.py                     short: a first impression, about a quarter of an hour
    python bench/run.py --full              as the documentation quotes them, about an hour and a half
    python bench/run.py --only cases peer   some of them
    python bench/run.py --traces DIR        with the Azure traces (see bench/simulated/traces.py)

Each is a separate program with its own arguments (--help). Their tables appear here, their results as JSON in bench/out. The exit code is 1 if any
of them missed a bound, otherwise 0. Run them on an otherwise idle machine.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from bench.stand import stand

_HERE = Path(__file__).parent
_GRACE = 60.0
_VERDICTS = {0: "all bounds met", 1: "a bound missed", 2: "could not run"}


class Program(NamedTuple):
    """A benchmark: its folder, the question it answers, and its arguments for a short run and a full one."""

    group: str
    what: str
    short: str = ""
    full: str = ""


PROGRAMS = {
    "policies": Program("simulated", "the cases of the default policy"),
    "never_worse": Program("simulated", "the default policy on random services", "--configurations 16"),
    "fit": Program("simulated", "inputs of like length together, on random models that pad", "--configurations 12"),
    "sharding": Program("simulated", "what a rate takes, and what breaks first"),
    "plans": Program("simulated", "plans beside what other seeds give", "--plans 3"),
    "warm_models": Program("simulated", "loads of models on GPUs that cannot hold all", "--seconds 900"),
    "cases": Program("load", "the cases it is designed for", "--rounds 1 --seconds 10", "--seconds 60"),
    "overload": Program("load", "a flood, and does anything grow?", "--seconds 8 --minutes 0.5"),
    "neighbours": Program("load", "one tenant at its worst, another one beside it", "--seconds 3", "--seconds 20"),
    "loadgen": Program("load", "the most valid queries/s by LoadGen", "--seconds 3 --steps 5", "--seconds 20"),
    "bulk": Program("load", "requests beside bulk jobs", "--seconds 8 --rounds 1"),
    "peer": Program("cost", "CPU time beside mosec, and how it grows", "--rounds 1 --seconds 4", "--seconds 15"),
    "fleet_peer": Program("cost", "CPU time over Redis, beside Triton", "--rounds 1 --seconds 4", "--seconds 10"),
    "tensors": Program("cost", "arrays beside Triton", "--rounds 1 --seconds 2"),
    "payload": Program("cost", "large payloads", "--seconds 3", "--seconds 20"),
    "instructions": Program("cost", "instructions of Redis for each call", "--times 50"),
    "records": Program("cost", "what ledgers and traces cost", "--rounds 1 --seconds 4", "--rounds 10 --seconds 10"),
    "idle": Program("cost", "what is done at rest, and for those who look", "--seconds 10"),
    "chaos": Program("promises", "everything is killed, Redis too", "--seconds 60", "--seconds 600"),
    "proxied": Program("promises", "rolling restarts behind each proxy", "--seconds 30 --proxy haproxy"),
}
REPLAYING = ("never_worse", "fit", "loadgen")
"""Programs that take traces."""


def main() -> int:
    options = _options()
    stand.end_in_order()
    outcomes: dict[str, str] = {}
    worst = 0
    for name in options.only:
        program = PROGRAMS[name]
        arguments = (program.full if options.full else program.short).split()
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
    """Run a program to its end. If this one is terminated, the other ends first."""
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

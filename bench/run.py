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


def _program(group: str, what: str, short: str = "", full: str = "") -> Program:
    return Program(group, what, tuple(short.split()), tuple(full.split()))


PROGRAMS = {
    "policies": _program(
        "simulated", "the cases of the default policy, all policies on real traffic, and poison, simulated"
    ),
    "never_worse": _program("simulated", "the default policy on random services", "--configurations 16"),
    "fit": _program("simulated", "inputs of like length together, on random models that pad", "--configurations 12"),
    "sharding": _program("simulated", "a queue cut into shards, simulated"),
    "warm_models": _program("simulated", "loads of models on GPUs that cannot hold all", "--seconds 900"),
    "cases": _program(
        "load",
        "the cases it is designed for, and one queue for all gateways and hosts",
        "--rounds 1 --seconds 10",
        "--seconds 60",
    ),
    "overload": _program("load", "floods, lost workers, exact limits", "--seconds 8 --minutes 0.2"),
    "neighbours": _program("load", "one tenant at its worst, another one beside it", "--seconds 3", "--seconds 20"),
    "loadgen": _program(
        "load",
        "the most queries/s that MLPerf LoadGen finds valid, beside mosec and LitServe",
        "--seconds 3 --steps 5",
        "--seconds 20",
    ),
    "shared_gpus": _program("load", "several models on shared GPUs", "--seconds 5", "--seconds 20"),
    "bulk": _program("load", "requests beside bulk jobs", "--seconds 8 --rounds 1"),
    "foretold": _program(
        "load", "simulations and plans beside what happens", "--worst 0 --seconds 4 --plans 3 --real 1"
    ),
    "collectors": _program(
        "load", "collectors of traces in trouble", "--rounds 1 --seconds 4", "--rounds 5 --seconds 10"
    ),
    "peer": _program("cost", "CPU time beside mosec, and how it grows", "--rounds 1 --seconds 4", "--seconds 15"),
    "fleet_peer": _program("cost", "CPU time over Redis, beside Triton", "--rounds 1 --seconds 4", "--seconds 10"),
    "doors": _program("cost", "CPU time door by door", "--rounds 1 --seconds 3"),
    "tensors": _program("cost", "arrays beside Triton, and door by door", "--rounds 1 --seconds 2"),
    "payload": _program("cost", "large payloads", "--seconds 3", "--seconds 20"),
    "instructions": _program("cost", "instructions of Redis for each call", "--times 50"),
    "claims": _program("cost", "claims by many hosts", "--seconds 4", "--seconds 15"),
    "ledger": _program("cost", "rows per second, and what they cost", "--seconds 4", "--rounds 10 --seconds 10"),
    "many": _program("cost", "many keys, names and versions", "--keys 100000 --names 10000 --versions 150"),
    "idle": _program("cost", "what is done at rest, and for those who look", "--seconds 10"),
    "exactness": _program(
        "promises",
        "every answer to its own request, and does anything grow?",
        "--requests 100000 --minutes 0.5",
        "--requests 1000000 --minutes 20",
    ),
    "chaos": _program("promises", "everything is killed, Redis too", "--seconds 60", "--seconds 600"),
    "proxied": _program(
        "promises",
        "restarts, slow clients, idle connections and troubles behind each proxy",
        "--seconds 30 --only rolling slow troubles --troubles redis-blip sentinel-planned --proxy haproxy",
    ),
}
REPLAYING = ("policies", "never_worse", "fit", "loadgen")
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

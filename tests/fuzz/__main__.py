"""Feeds many damaged inputs to every parser of input from outside.

    python -m tests.fuzz --cases 1000000 --seed 7 [--only TEXT]

Exits with 1 if a promise is broken, and shows the input. The same seed makes the same inputs. An input that takes more
processor time than its parser may take, or more than a gibibyte of memory, breaks a promise, too.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import random
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path

import structlog

from tests.fuzz.parsers import Parser, parsers

MEMORY = 1 << 30
"""Bytes beyond those in use at the start."""
SHOWN = 5
"""Broken promises after which a parser gets no more inputs."""


def fuzz(parser: Parser, cases: int, seed: int) -> int:
    """Feed one parser, and return the number of broken promises."""
    broken, slowest, begun = 0, 0.0, time.thread_time()
    done = 0
    for done, data in enumerate(itertools.islice(parser.inputs(seed), cases), start=1):
        before = time.thread_time()
        try:
            parser.check(data)
            took = time.thread_time() - before
            assert took < parser.slow, f"it took {took:.1f} s"
        except Exception:
            broken += 1
            say(f"\n{parser.name}, seed {seed}, case {done}: {len(data)} bytes\n{data[:2000]!r}\n")
            say(traceback.format_exc())
            if broken == SHOWN:
                break
            continue
        slowest = max(slowest, took)
    spent = time.thread_time() - begun
    say(f"{parser.name:20} {done:>9,} cases {broken:>3} broken {spent:7.1f} s, slowest {slowest * 1e3:6.1f} ms")
    return broken


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--cases", type=int, default=100_000, help="inputs in all (default %(default)s)")
    options.add_argument("--seed", type=int, help="of the randomness; chosen anew when left out")
    options.add_argument("--only", default="", help="only parsers whose name contains one of these, between commas")
    given = options.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    with tempfile.TemporaryDirectory() as folder:
        chosen = [
            parser for parser in parsers(Path(folder)) if any(one in parser.name for one in given.only.split(","))
        ]
        if not chosen:
            options.error(f"no parser's name contains {given.only!r}")
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, resource.RLIM_INFINITY))
        shares = sum(parser.weight for parser in chosen)
        each = math.ceil(given.cases / shares)
        say(f"seed {seed}, {each:,} cases for each of {len(chosen)} parsers, more for those of more weight")
        broken = sum(fuzz(parser, math.ceil(each * parser.weight), seed) for parser in chosen)
    say(f"{round(each * shares):,} cases, {broken} broken")
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())

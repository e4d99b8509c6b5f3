"""What holds the event loops while large values travel: the longest callbacks of each process, in CPU time.

    python bench/cost/holds.py                        a minute
    python bench/cost/holds.py --ways redis           over Redis alone
    python bench/cost/holds.py --in-hand 8            more of them at a time

The load is that of payload.py: some large requests in hand, and small ones beside. A small request waits for the loop as long
as one callback takes, so no more than MOST_MS of CPU time may go to one. That holds on a busy machine, too, where latencies
say little. The beginning of a process does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from bench.cost import payload
from bench.stand import stand
from bench.stand.findings import Findings

MOST_MS = 15.0
"""Most milliseconds of CPU time of one callback: a value of 5 MB is copied in pages that were never touched."""
STARTING = ("run", "Service.start", "Batcher.start", "None")
"""Callbacks of the beginning, and of processes that begin."""
SHOWN = 3


def main() -> int:
    ways: dict[str, payload.Start] = {"arena": partial(payload._serve, ()), "redis": payload._redis}
    parser = argparse.ArgumentParser(description="What holds the event loops while large values travel.")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load (default %(default)g)")
    parser.add_argument("--in-hand", type=int, default=payload.IN_HAND, help="large requests (default %(default)g)")
    parser.add_argument("--ways", nargs="+", choices=ways, default=list(ways), metavar="WAY", help=", ".join(ways))
    options = parser.parse_args()
    stand.end_in_order()
    stand.module, payload.IN_HAND = "bench.stand.holding", options.in_hand
    findings = Findings("holds", seconds=options.seconds, size=payload.SIZE, in_hand=options.in_hand)
    rows: list[dict[str, object]] = []
    for name in options.ways:
        for direction in ("in", "out"):
            with tempfile.TemporaryDirectory(prefix="headway-bench-holds-") as folder:
                os.environ["HOLDS"] = folder
                with ways[name](direction, 2) as way:
                    done, roles = [0], dict(way.pids)
                    load = partial(payload._load_beside, way.url, way.large, done)
                    payload._small_beside(way, options.seconds, load)
                for role, held in _held(Path(folder), roles):
                    longest = sorted(held.items(), key=lambda one: -max(one[1]))[:SHOWN]
                    shown = ", ".join(f"{what} {max(took):.1f} ({len(took)})" for what, took in longest)
                    most = max((max(took) for took in held.values()), default=0.0)
                    findings.at_most(f"{name}, {direction}, {role}: longest callback", most, MOST_MS, "ms")
                    rows.append(
                        {"way": name, "5 MB": direction, "large": done[0], "role": role, "longest ms (times)": shown}
                    )
    findings.table(f"{payload.SIZE / 1e6:g} MB, {options.in_hand} in hand", rows)
    return findings.close()


def _held(folder: Path, roles: dict[int, str]) -> list[tuple[str, dict[str, list[float]]]]:
    """Callbacks of each process that has a part in it, by role."""
    found = []
    for path in sorted(folder.glob("*.json")):
        role = roles.get(int(path.stem), "")
        if role and role != "controller":
            held = {what: took for what, took in json.loads(path.read_text()).items() if what not in STARTING}
            found.append((role, held))
    return found


if __name__ == "__main__":
    sys.exit(main())

"""Services share an SQLite file with commands that open and close it, and are killed: is every row and every key there?

    python bench/promises/sqlite_drill.py                   about three minutes
    python bench/promises/sqlite_drill.py --seconds 30      a first impression

Each round `headway keys` makes and revokes keys in processes of its own, both services are asked, and one is killed with
SIGKILL and started anew. In the end every row that was written is there, SQLite finds no fault with the file, every live key
is known, and no revoked one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from bench.stand import stand
from bench.stand.findings import Findings
from tests.cli.command import run
from tests.e2e.sqlite_drill import Drill

KNOWN_WITHIN = 5.0
"""Seconds after which every service must refuse a revoked key."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Two services and many commands on one SQLite file, under kill -9.")
    parser.add_argument("--seconds", type=float, default=180.0, help="for which rounds are begun (default %(default)g)")
    parser.add_argument("--requests", type=int, default=50, help="to each service in a round (default %(default)s)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("sqlite_drill", seconds=options.seconds, requests=options.requests)
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        folder = Path(name)

        def command(*arguments: str) -> str:
            done = run(["keys", *arguments], folder)
            if done.returncode:
                raise stand.Broken(f"headway keys {arguments[0]} ended with {done.returncode}: {done.stderr}")
            return done.stdout.strip()

        with Drill(folder, command) as drill:
            while time.monotonic() < until:
                drill.round(options.requests)
    seen = drill.seen
    findings.table("Two services and commands on one SQLite file", [{
        "kills": seen.kills, "requests": seen.requests, "opened and closed by others": seen.commands,
        "keys": len(seen.live) + len(seen.revoked), "revoked": len(seen.revoked), "slowest revocation s": seen.slowest,
    }])  # fmt: skip
    findings.none("rows lost", seen.lost)
    findings.none("faults of the file", seen.damaged)
    findings.none("services without SQLite's locks", seen.unlocked)
    findings.none("live keys refused", seen.unknown)
    findings.at_most("a revoked key is refused everywhere", seen.slowest, KNOWN_WITHIN, "s")
    return findings.close()


if __name__ == "__main__":
    raise SystemExit(main())

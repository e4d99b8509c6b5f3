"""Many worker hosts on one Redis: does a claim cost the same, and do batches leave as evenly, with 64 as with 4?

    python bench/cost/claims.py                about three minutes
    python bench/cost/claims.py --seconds 4    a first impression
    python bench/cost/claims.py --hosts 64 --shards 16

Worker hosts are tasks in one process here, each with connections of its own to a real Redis and one slot that sleeps
for its batch time; so what is measured is the claims and not the functions. The load grows with the hosts (80
requests/s for each, in batches of at most 10 that take 100 ms), so that batches are equally full and a request costs
the same if nothing grows. The gateway is a task in another process that enqueues what has come in the last two
milliseconds, and reads the answers. What waiting costs is measured before there is any load.

Redis is on the core of servers, the rest on the other. Spacing is the coefficient of variation of the intervals between
departures: 0 is even, 1 is random. With shards each of them spaces the departures of the slots that are at home in it.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from bench.cost.claimants import BATCH_SECONDS, MAX_BATCH, READY, Done, slot_of
from bench.stand import processes, stand
from bench.stand.findings import Findings
from bench.stand.fleet import Operations, Redis
from bench.stand.stand import Broken, on_load_core
from headway.core import shards

HOSTS, SHARDS = (4, 16, 64), (1, 16)
EACH = 80.0
"""Requests per second for each host."""
WARM_UP = 5.0
IDLE_SECONDS = 2.0
END_SECONDS = 30.0
STEP_SECONDS = 2.0
GROWTH = 1.1
"""Most that a cost may grow from the fewest hosts to the most."""
UNEVEN = 0.5
"""Largest coefficient of variation of the intervals that still counts as even."""

TABLES = {
    "what is carried, and how evenly (intervals between departures in ms)": (
        "hosts", "offered/s", "answered/s", "claims/s", "batch", "interval", "CV", "CV at home", "unavailable", "amiss",
    ),
    "what it costs (CPU in µs; calls by Redis's own clock)": (
        "hosts", "redis µs/claim", "redis µs/request", "host µs/claim", "gateway µs/request", "tries/claim",
        "scripts/request", "µs a claim call", "µs a completion call",
    ),
    "what waiting costs, without load (shares of a core)": ("hosts", "idle calls/s", "idle redis %", "idle hosts %"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """One set-up: how many hosts and shards."""

    hosts: int
    shards: int

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.hosts * EACH


def main() -> int:
    options = _options()
    stand.end_in_order()
    findings = Findings(
        "claims", seconds=options.seconds, each=EACH, batch_ms=BATCH_SECONDS * 1000, max_batch=MAX_BATCH,
        warm_up_s=WARM_UP, pinning=stand.PINNING,
    )  # fmt: skip
    findings.say(f"Load for {options.seconds:g} s each; {stand.PINNING}.")
    for number in options.shards:
        rows = [_measure(findings, Load(hosts, number), options.seconds) for hosts in options.hosts]
        title = f"{number} shard{'s' if number > 1 else ''}"
        for heading, columns in TABLES.items():
            findings.table(f"{title}; {heading}", [{name: row[name] for name in columns} for row in rows])
        for what in ("redis µs/claim", "redis µs/request", "µs a claim call"):
            bound = f"{title}: {what}, with the most hosts against the fewest"
            findings.at_most(bound, rows[-1][what] / rows[0][what], GROWTH)
        worst = max(row["CV at home"] for row in rows)
        findings.at_most(f"{title}: unevenness of departures (0 even, 1 random)", worst, UNEVEN)
        findings.none(f"{title}: entries refused, lost or answered wrongly", sum(row["amiss"] for row in rows))
    return findings.close()


def _measure(findings: Findings, load: Load, seconds: float) -> dict[str, float]:
    with Redis("claims-redis") as redis:
        hosts = _Part("hosts", redis, load)
        try:
            hosts.wait_until_ready()
            idle = _idle(redis, hosts)
            gateway = _Part("gateway", redis, load)
            try:
                gateway.wait_until_ready()
                time.sleep(WARM_UP)
                begun, used, asked = time.time(), _usage(redis, hosts, gateway), redis.operations()
                time.sleep(seconds)
                ended, spent, asked = time.time(), _usage(redis, hosts, gateway), redis.operations() - asked
                with redis.stepping() as took:
                    time.sleep(STEP_SECONDS)
            finally:
                ours = gateway.end()
        finally:
            theirs = hosts.end()
    findings.keep(f"{load.hosts} hosts, {load.shards} shards", asked)
    cpu = {name: spent[name] - used[name] for name in spent}
    calls = {
        "µs a claim call": statistics.fmean(took["claim"]),
        "µs a completion call": statistics.fmean(took["complete"]),
    }
    return _row(load, theirs, ours, begun, ended, cpu, asked) | idle | calls


def _idle(redis: Redis, hosts: _Part) -> dict[str, float]:
    """What waiting costs, with no load at all."""
    time.sleep(IDLE_SECONDS)
    used, asked = _usage(redis, hosts), redis.operations()
    time.sleep(IDLE_SECONDS)
    spent, asked = _usage(redis, hosts), redis.operations() - asked
    shares = {name: 100 * (spent[name] - used[name]) / IDLE_SECONDS for name in spent}
    return {
        "idle calls/s": asked.scripts / IDLE_SECONDS,
        "idle redis %": shares["redis"],
        "idle hosts %": shares["hosts"],
    }


def _row(
    load: Load, theirs: Done, ours: Done, begun: float, ended: float, cpu: dict[str, float], asked: Operations
) -> dict[str, float]:
    grants = sorted(grant for grant in theirs.grants if begun <= grant[0] < ended)
    tries = sum(begun <= instant < ended for instant in theirs.asked)
    answers = sum(begun <= instant < ended for instant in ours.answered)
    if not grants or not answers:
        raise Broken(f"{load.hosts} hosts with {load.shards} shards did nothing")
    claims = len(grants)
    return {
        "hosts": load.hosts,
        "offered/s": load.rate,
        "answered/s": answers / (ended - begun),
        "claims/s": claims / (ended - begun),
        "batch": statistics.fmean(size for _, size, _ in grants),
        "tries/claim": tries / claims,
        "redis µs/claim": cpu["redis"] / claims * 1e6,
        "redis µs/request": cpu["redis"] / answers * 1e6,
        "host µs/claim": cpu["hosts"] / claims * 1e6,
        "gateway µs/request": cpu["gateway"] / answers * 1e6,
        "scripts/request": asked.scripts / answers,
        "interval": 1000 * (ended - begun) / claims,
        "CV": variation([instant for instant, _, _ in grants]),
        "CV at home": _at_home(load, grants),
        "unavailable": theirs.unavailable + ours.unavailable,
        "amiss": ours.wrong + ours.refused + ours.sent - len(ours.answered),
    }


def _at_home(load: Load, grants: Sequence[tuple[float, int, str]]) -> float:
    """Mean unevenness within the shards."""
    slots = [slot_of(number) for number in range(load.hosts)]
    active = shards.active(load.shards, load.hosts)
    by_shard: defaultdict[int, list[float]] = defaultdict(list)
    for instant, _, slot in grants:
        by_shard[shards.home(slot, slots, active)].append(instant)
    return statistics.fmean(variation(instants) for instants in by_shard.values())


def variation(instants: Sequence[float]) -> float:
    """Coefficient of variation of the intervals between instants in order; 0 when there are too few."""
    gaps = [later - earlier for earlier, later in pairwise(instants)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps) if len(gaps) > 1 else 0.0


def _usage(redis: Redis, *parts: _Part) -> dict[str, float]:
    return {"redis": redis.server.usage()["redis"]} | {part.name: part.cpu() for part in parts}


class _Part:
    """A process of `claimants.py`, on the core of load generators."""

    def __init__(self, name: str, redis: Redis, load: Load) -> None:
        self.name = name
        command = [sys.executable, str(Path(__file__).with_name("claimants.py")), name, "--url", redis.url]
        command += ["--hosts", str(load.hosts), "--shards", str(load.shards), "--rate", str(load.rate)]
        self._process = subprocess.Popen(on_load_core(command), stdout=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        """Return when it is at work."""
        if self._process.stdout is None or self._process.stdout.readline() != READY:
            raise Broken(f"the {self.name} of this benchmark do not come up")

    def cpu(self) -> float:
        """CPU seconds so far."""
        found = processes.look(self._process.pid)
        return found.cpu if found is not None else 0.0

    def end(self) -> Done:
        """End it; returns what it did."""
        self._process.send_signal(signal.SIGTERM)
        try:
            said, _ = self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            said, _ = self._process.communicate()
        if self._process.returncode:
            raise Broken(f"the {self.name} of this benchmark ended with {self._process.returncode}")
        return msgspec.json.decode(said, type=Done)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Claims by many worker hosts on one Redis.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (default %(default)g)")
    parser.add_argument("--hosts", type=int, nargs="+", default=list(HOSTS), help="how many worker hosts, fewest first")
    parser.add_argument("--shards", type=int, nargs="+", default=list(SHARDS), help="how many shards")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

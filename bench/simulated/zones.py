"""A fleet in zones: what it costs beside one queue for all, how much crosses between zones, and a zone that is lost. Simulated.

    python bench/simulated/zones.py
    python bench/simulated/zones.py --only calm lost

calm   24 GPUs as one queue, in three zones, and in three zones with two shards each; at 60, 80, 90 and 95 % load. With m slots
       in a zone, latency ought to be even between α and α(1 + 1/m): `ideal p95`. Batches ought to stay in their zones.
help   three zones at 80 % load by the share of a full batch's time that something must have waited for before another zone helps; in the calm,
       and with one GPU three times as slow. 1 is the production threshold; 0 is to take whatever may leave.
uneven half of the load in one zone of three, with two gateways of four, by load of the whole fleet.
lost   all hosts of one zone of three die at 8 s under 40, 50 and 60 % load, while gateways go on sending there until they have noticed,
       after 2.5 s. What those hosts ran is given to others when its leases end, after 3 s. `caught up`: until the hosts that are left can
       have run all that again besides what comes, a GPU for a whole batch each; `back`: until P95 is what it is in the end, by seed.

100 ms a batch of at most 100; 1.5 ms between a GPU's answer and its next batch; six gateways, each of which makes a call
at most every 2 ms. Requests wait in the queue for 10 s at most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.simulated.hosts import ALPHA, MAX_BATCH, OVERHEAD, PER_GPU, latency_and_fill, latency_between, scenario_of
from bench.stand.findings import Findings
from headway.core import zones
from headway.simulator.engine import LEASE_SECONDS, simulate
from headway.simulator.record import Record
from headway.simulator.report import make_report
from headway.simulator.scenario import Kill, Scenario

HOSTS, ZONES = 24, 3
LOST_AT, WINDOW, SEEDS = 8.0, 0.25, 3
"""Instant of the loss, seconds of requests that P95 is taken of, and runs."""
LOADS = (0.6, 0.8, 0.9, 0.95)


def main() -> int:
    parser = argparse.ArgumentParser(description="What zones cost, and what the loss of one does.")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some of the parts")
    options = parser.parse_args()
    findings = Findings("zones", batch_ms=ALPHA * 1000, max_batch=MAX_BATCH, hosts=HOSTS, zones=ZONES)
    begun = time.monotonic()
    for name in options.only:
        PARTS[name](findings)
    findings.say(f"{time.monotonic() - begun:.0f} s.")
    return findings.close()


def calm(findings: Findings) -> None:
    rows = []
    for load in LOADS:
        for name, count, cut in (("one queue", 1, 1), ("3 zones", 3, 1), ("3 zones of 2 shards", 3, 2)):
            record = simulate(_scenario(load, zones=count, shards=cut))
            ideal = 1000 * (ALPHA * (1 + 0.95 * count * cut / HOSTS) + OVERHEAD)
            figures = _figures(record)
            rows.append({"load": load, "queues": name, "ideal p95": ideal, **figures})
            if name == "3 zones":
                findings.at_most(
                    f"batches that cross between zones at {load:.0%} load", figures["crossed %"] / 100, 0.02
                )
    findings.table("24 hosts, in one queue and in zones; latency in ms", rows)


def help_(findings: Findings) -> None:
    rows = []
    for share in (0.0, 0.5, 1.0, 2.0, float("inf")):
        row: dict[str, object] = {"helped after, batches": share}
        for case, changes in (("calm", {}), ("slow", {"slow": 3.0})):
            with _threshold(share):
                figures = _figures(simulate(_scenario(0.8, zones=3, **changes)))
            row |= {f"{case} {name}": figures[name] for name in ("p95", "p99", "fill %", "crossed %")}
        with _threshold(share):
            figures = _figures(simulate(_scenario(0.7, zones=3, gateways=4)))
        row |= {f"uneven {name}": figures[name] for name in ("p95", "p99", "crossed %")}
        rows.append(row)
    findings.table("24 hosts in 3 zones by the threshold of help; latency in ms", rows)


def uneven(findings: Findings) -> None:
    rows = []
    for load in (0.4, 0.6, 0.8):
        for name, changes in (("one queue", {"zones": 1}), ("3 zones", {"zones": 3})):
            record = simulate(_scenario(load, gateways=4, **changes))
            rows.append({"load": load, "queues": name, **_figures(record), "lost": sum(record.lost.values())})
            findings.none(f"requests lost, {name} at {load:.0%}", sum(record.lost.values()))
    findings.table("Half of the load in one zone of three; latency in ms", rows)


def lost(findings: Findings) -> None:
    rows = []
    spans = ((6.0, 8.0), (8.0, 8.5), (8.5, 9.5), (9.5, 10.5), (10.5, 11.0), (11.0, 14.0))
    for load in (0.4, 0.5, 0.6):
        for name, count in (("one queue", 1), ("3 zones", 3)):
            records = [_loss(load, count, seed) for seed in range(SEEDS)]
            first, backs = records[0], [_back(record) for record in records]
            row: dict[str, object] = {"load": load, "queues": name}
            for since, until in spans:
                row[f"p95, {since:g} to {until:g} s"] = latency_between(first, since, until)
            crossed = sum(at < LOST_AT for at in first.crossed), sum(at >= LOST_AT for at in first.crossed)
            lost = sum(sum(record.lost.values()) for record in records)
            row |= {"caught up after s": _caught_up(load), "back after s": ", ".join(map(str, backs))}
            rows.append({**row, "crossed before / after": f"{crossed[0]} / {crossed[1]}", "lost": lost})
            findings.none(f"requests lost, {name} at {load:.0%} load", lost)
            if count > 1:
                most = _caught_up(load) + WINDOW
                findings.at_most(f"seconds until P95 is back at {load:.0%} load", max(backs), most, "s")
    findings.table("8 of 24 hosts, a zone, die at 8 s; latency in ms", rows)


PARTS: dict[str, Callable[[Findings], None]] = {"calm": calm, "help": help_, "uneven": uneven, "lost": lost}


def _scenario(load: float, **changes: object) -> Scenario:
    known: dict[str, object] = {"queue_timeout": 10.0, "timeout": 20.0, "gateways": 6}
    return scenario_of(HOSTS, load * HOSTS * PER_GPU, **{**known, **changes})


def _figures(record: Record) -> dict[str, float]:
    report = make_report(record)
    crossed = 100 * len(record.crossed) / max(report.batches.count, 1)
    return {**latency_and_fill(report), "crossed %": crossed}


def _loss(load: float, count: int, seed: int) -> Record:
    """Run of the fleet in so many zones that loses a third of its hosts."""
    kill = Kill(LOST_AT, HOSTS // ZONES, silent=True)
    changes = {"kills": (kill,), "restart": 3600.0, "duration": 16.0, "warmup": 6.0}
    return simulate(_scenario(load, zones=count, seed=seed, **changes))


def _caught_up(load: float) -> float:
    """Seconds after the loss in which the hosts that are left can have run again what the others ran: a batch each, once its lease ends."""
    gone = HOSTS // ZONES
    spare = HOSTS - gone - load * HOSTS
    return LEASE_SECONDS + gone * (ALPHA + OVERHEAD) / spare


def _back(record: Record) -> float:
    """Seconds after the loss from which on P95 of the requests of each window is what it is in the end, within a tenth."""
    settled = latency_between(record, 13.0, 16.0)
    steps = [LOST_AT + WINDOW * step for step in range(20)]
    return max(
        (at + WINDOW - LOST_AT for at in steps if latency_between(record, at, at + WINDOW) > 1.1 * settled), default=0.0
    )


@contextmanager
def _threshold(share: float) -> Iterator[None]:
    """The threshold of help, changed for a while."""
    kept = zones.behind

    def behind(depth: int, slots: int, waited: float, batch_seconds: float) -> bool:
        return depth > 0 and (not slots or waited > share * batch_seconds)

    zones.behind = behind
    try:
        yield
    finally:
        zones.behind = kept


if __name__ == "__main__":
    sys.exit(main())

"""A queue cut into shards, and a fleet of any size: what it costs, and whether that stays as the fleet grows. Simulated.

    python bench/simulated/sharding.py                          some minutes
    python bench/simulated/sharding.py --only fleet sizes

fleet    1 to 64 worker hosts of one GPU each at 90 % load, and 11 at 10,000 requests/s, whole or cut. With m slots at home in a shard, latency ought to
         be even between α and α(1 + 1/m): `ideal p95` is α(1 + 0.95/m), and the overhead. It must stay flat from 4 hosts to 64.
slow     64 hosts with one GPU three times as slow, with and without help from idle slots of other shards.
deaths   8 of 64 workers die at once and are back after 3 s: the shards change with them. 70 % load.
sizes    what 10,000 to 1,000,000 requests/s take: gateways, Redis nodes and GPUs, how busy what all processes ask in common keeps one Redis node,
         and what breaks first. One fleet goes as far as that node carries it; beyond, models are cut over fleets (docs/fleet.md). Costs are CPU
         time per request, measured over Redis at 2,000 requests/s on two cores; at higher rates each costs less. So this is enough, not the least.
thousand 1,000 GPUs at 100,000 requests/s beside 10 at 1,000. Latency must lie between a batch's time and a gap more, so the larger fleet has the
         shorter tail.

100 ms a batch of at most 100; 1.5 ms between a GPU's answer and its next batch; four gateways, each of which makes a call at most every 2 ms.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from unittest import mock

from bench.stand import parts
from bench.stand.findings import Findings
from headway.core import shards
from headway.simulator.engine import simulate
from headway.simulator.record import Record
from headway.simulator.report import Report, make_report, percentile
from headway.simulator.scenario import Kill, Scenario

ALPHA, MAX_BATCH, OVERHEAD = 0.1, 100, 0.0015
PER_GPU = MAX_BATCH / (ALPHA + OVERHEAD)
"""Requests per second of a host."""
SETTLED, REQUESTS = 6.0, 120_000
"""Seconds of warm-up, and requests measured, for MEASURED seconds at least."""
MEASURED = 2.0
LOAD = 0.9
HOSTS = (1, 4, 16, 64)
SHARDS = (1, 4, 16)


def main() -> int:
    parser = argparse.ArgumentParser(description="What shards and the size of a fleet cost.")
    return parts.run(parser, PARTS, {name: f"sharding_{name}" for name in PARTS})


def latency_and_fill(report: Report) -> dict[str, float]:
    """Percentiles of latency in ms, and the fill of batches in percent."""
    latency = report.total.latency_ms
    return {"p50": latency.p50, "p95": latency.p95, "p99": latency.p99, "fill %": 100 * report.batches.fill}


def latency_between(record: Record, since: float, until: float, share: float = 0.95) -> float:
    """Percentile in ms of the latency of requests that came within a span."""
    then = sorted(took for at, took in zip(record.arrived, record.latency, strict=True) if since <= at < until)
    return 1000 * percentile(then, share)


def fleet(findings: Findings, _: argparse.Namespace) -> None:
    p95: dict[tuple[int, int], float] = {}
    spacing: dict[tuple[int, int], float] = {}
    rows = []
    for hosts, rate in (*((hosts, LOAD * hosts * PER_GPU) for hosts in HOSTS), (11, 10_000.0)):
        for count in SHARDS:
            figures = _figures(simulate(_scenario(hosts, rate, shards=count)))
            used = shards.active(count, hosts)
            least = min(shards.slots_at(shard, hosts, used) for shard in range(used))
            ideal = 1000 * (ALPHA * (1 + 0.95 / least) + OVERHEAD)
            rows.append(
                {"hosts": hosts, "requests/s": rate, "shards": count, "used": used, "ideal p95": ideal, **figures}
            )
            p95[hosts, count], spacing[hosts, count] = figures["p95"], figures["CV in a shard"]
    findings.table("Hosts and shards; latency in ms", rows)
    grown = [p95[hosts, SHARDS[-1]] for hosts in HOSTS[1:]]
    findings.at_most("p95 of 64 hosts in 16 shards over that of 4 in one", grown[-1] / grown[0], 1.05)
    findings.at_most("variation of gaps in a shard, any fleet", max(spacing.values()), 0.1)
    findings.at_most("p95 of 11 hosts at 10,000 requests/s, 16 shards", p95[11, 16], 125.0, "ms")


def slow(findings: Findings, _: argparse.Namespace) -> None:
    rows = []
    for behind in (shards.BEHIND, math.inf):
        with mock.patch.object(shards, "BEHIND", behind):
            rows.append({"helped from, batches": behind, **_figures(simulate(_scenario(64, shards=16, slow=3.0)))})
    findings.table("64 hosts, 16 shards, one GPU three times as slow; latency in ms", rows)
    findings.at_most("p95 with help over that without, with a slow GPU", rows[0]["p95"] / rows[1]["p95"], 0.5)


def deaths(findings: Findings, _: argparse.Namespace) -> None:
    rows = []
    spans = ((6.0, 8.0), (8.0, 8.5), (8.5, 11.0), (11.0, 11.5), (11.5, 13.0))
    for count in (1, 16):
        rate = 0.7 * 64 * PER_GPU
        record = simulate(
            _scenario(64, rate, shards=count, kills=(Kill(8.0, 8),), restart=3.0, duration=13.0, warmup=6.0)
        )
        row: dict[str, object] = {"shards": count}
        for since, until in spans:
            row[f"p95 / p99, {since:g} to {until:g} s"] = " / ".join(
                f"{latency_between(record, since, until, share):.1f}" for share in (0.95, 0.99)
            )
        lost = sum(record.lost.values())
        rows.append({**row, "lost": lost})
        findings.none(f"requests lost, {count} shards", lost)
    findings.table("8 of 64 workers die at 8 s and are back at 11 s; latency in ms", rows)


def _scenario(hosts: int, rate: float = 0.0, **changes: object) -> Scenario:
    rate = rate or LOAD * hosts * PER_GPU
    times = {
        "warmup": SETTLED,
        "duration": SETTLED + max(MEASURED, REQUESTS / rate),
        "queue_timeout": 30.0,
        "timeout": 30.0,
    }
    known = {"rate": rate, "workers": hosts, "alpha": ALPHA, "max_batch": MAX_BATCH, "overhead": OVERHEAD, **times}
    return Scenario(**{**known, "gather": 0.002, "gateways": 4, **changes})  # type: ignore[arg-type]


def _figures(record: Record) -> dict[str, float]:
    report = make_report(record)
    batches = report.batches
    inside = batches.gap_cv if batches.shard_gap_cv is None else batches.shard_gap_cv
    return {
        **latency_and_fill(report),
        "CV in a shard": inside,
        "CV over all": batches.gap_cv,
        "stolen %": 100 * batches.stolen,
    }


# The size of a fleet.

RATES = (10_000, 100_000, 1_000_000)
GATEWAY, HOST, REDIS = 103e-6, 58e-6, 70e-6
"""Seconds of CPU for each request: in a gateway, in the hosts of the workers, and in Redis."""
ROW_READ, ROW_DECODED = 1.5e-6, 3.2e-6
"""Seconds of CPU for each worker that a process asks for: in Redis, and in the process."""
BEAT = 89e-6
"""Seconds of CPU in Redis for each heartbeat of a worker."""
LOOKS, BEATS = 2.0, 2.0
"""Looks at all workers that each gateway takes in a second, and heartbeats of each worker."""
BUSY = 0.6
"""Share of a core that a process is planned to be busy."""
FILL = 0.7


@dataclass(frozen=True, slots=True)
class Size:
    rate: float

    @property
    def gpus(self) -> int:
        return math.ceil(self.rate * ALPHA / (MAX_BATCH * FILL))

    @property
    def nodes(self) -> int:
        """Redis nodes for what requests cost, a core each."""
        return math.ceil(self.rate * REDIS / BUSY)

    @property
    def gateways(self) -> int:
        """Gateways, a core each, which also read what all workers tell."""
        left = BUSY - LOOKS * self.gpus * ROW_DECODED
        return math.ceil(self.rate * GATEWAY / left) if left > 0.0 else 0

    @property
    def in_common(self) -> float:
        """Share of a Redis node's core for what all processes ask of one place: who is there."""
        return self.gpus * (BEATS * BEAT + LOOKS * self.gateways * ROW_READ)

    @property
    def breaks(self) -> str:
        """What breaks first if nothing is done about it."""
        if self.nodes == 1:
            return "nothing"
        return "one Redis node's core" if self.in_common <= BUSY else "the node that knows who is there"


def sizes(findings: Findings, _: argparse.Namespace) -> None:
    rows: list[dict[str, object]] = []
    for rate in RATES:
        whole = Size(rate)
        fleets = next(count for count in range(1, 10_000) if Size(rate / count).in_common <= BUSY)
        part = Size(rate / fleets)
        rows.append(
            {
                "requests/s": rate, "GPUs": whole.gpus, "gateways": fleets * part.gateways, "Redis nodes": fleets * part.nodes,
                "cores of hosts": math.ceil(rate * HOST / BUSY), "who is there, % of a node": 100 * whole.in_common,
                "breaks first": whole.breaks, "fleets": fleets,
            }
        )  # fmt: skip
    findings.table("What a rate takes, with batches of 100 ms and of at most 100, 70 % full", rows)


def thousand(findings: Findings, _: argparse.Namespace) -> None:
    rows: list[dict[str, object]] = []
    p95: dict[int, float] = {}
    for gpus, rate, seconds in ((10, 1_000.0, 60.0), (1_000, 100_000.0, 14.0)):
        scenario = Scenario(
            workers=gpus, alpha=0.64, max_batch=100, rate=rate, duration=seconds, warmup=8.0, queue_timeout=30.0, timeout=30.0
        )  # fmt: skip
        report = make_report(simulate(scenario))
        figures = latency_and_fill(report)
        rows.append({"GPUs": gpus, "requests/s": rate, **figures, "variation of gaps": report.batches.gap_cv})
        p95[gpus] = figures["p95"]
    findings.table("The default policy, batches of 640 ms and of at most 100", rows)
    findings.at_most("P95 of 1,000 GPUs over that of 10", p95[1_000] / p95[10], 1.0)


PARTS: parts.Parts = {"fleet": fleet, "slow": slow, "deaths": deaths, "sizes": sizes, "thousand": thousand}

if __name__ == "__main__":
    sys.exit(main())

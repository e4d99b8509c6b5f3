"""Hours of trouble, or minutes of it: does anything grow?

    python bench/promises/soak.py                  two minutes
    python bench/promises/soak.py --minutes 20     long enough to tell
    python bench/promises/soak.py --kill-every 0.4 crashes above all: does a dead worker leave anything behind?

By `--ways native` they come by the native route alone, and with `--broker redis` the broker is in Redis.

A crowd of clients asks by all ways into the service, leaves, tears requests apart and sends inputs that fail, and workers are killed, all at a
moderate rate. The memory of the front process, the memory of its workers, open descriptors, threads and processes are
sampled; the medians of the second fifth and of the last fifth of the time must be alike. When the clients are gone,
descriptors must be back to where they were before them. The books are audited as in exactness.py.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import statistics
import sys
import time
from dataclasses import asdict, dataclass

from bench.promises.crowd import WAYS, Crowd, Manners, Tallied, loop_factory
from bench.promises.exactness import add_ways, audit, flaky, kill_workers, settled
from bench.stand import processes, stand
from bench.stand.findings import Findings
from bench.stand.stand import Server

CLIENTS = 256
RATE = 800.0
GPUS = 2
MANNERS = Manners(leave=0.1, tear=0.01, reject=0.0005, poison=0.0001, pause=CLIENTS / RATE)
KILL_EVERY = 10.0
SAMPLES = 100
MORE_MB, MORE_DESCRIPTORS = 8.0, 32


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server held at an instant: memory in MiB, counts of the rest."""

    at: float
    front_mb: float
    workers_mb: float
    descriptors: int
    threads: int
    processes: int


def main() -> int:
    parser = argparse.ArgumentParser(description="A soak: does anything grow?")
    parser.add_argument("--minutes", type=float, default=2.0, help="of load (default %(default)g)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="of all dice (default: a new one)")
    parser.add_argument(
        "--kill-every", type=float, default=KILL_EVERY, help="seconds between kills of a worker (default %(default)g)"
    )
    add_ways(parser)
    options = parser.parse_args()
    stand.end_in_order()
    stand.pin_to_load_core()
    seconds = options.minutes * 60
    findings = Findings(
        "soak", minutes=options.minutes, seed=options.seed, clients=CLIENTS, rate=RATE, workers=GPUS,
        kill_every_s=options.kill_every, manners=asdict(MANNERS), ways=options.ways, broker=options.broker, pinning=stand.PINNING,
    )  # fmt: skip
    findings.say(f"{options.minutes:g} minutes at about {RATE:,.0f}/s, seed {options.seed}; {stand.PINNING}.")
    environment = {"BENCH_MS": "10", "BENCH_RAISE": "0.002", "BENCH_SEED": str(options.seed)}
    with flaky("soak", options.broker, GPUS, environment) as server:
        before = sample(server, 0.0)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            counters, kills, samples = runner.run(_drive(server, seconds, options))
        counted = settled(server)
        time.sleep(1.0)  # the server looks for connections that have gone twice a second
        after = sample(server, seconds)
    audit(findings, counters, counted, kills)
    _judge(findings, samples, before, after)
    findings.none("exit code of the server", server.exit_code or 0)
    findings.say(
        f"{counters.sent:,} requests, {counters.outcomes['left']:,} left, {counters.torn:,} torn, {kills} kills."
    )
    return findings.close()


def sample(server: Server, at: float) -> Sample:
    """Look at the server now; `at` is the instant to note."""
    rss = server.rss()
    return Sample(
        at=round(at, 1),
        front_mb=rss.get("front", 0) / 2**20,
        workers_mb=rss.get("worker", 0) / 2**20,
        descriptors=server.descriptors(),
        threads=processes.threads(server.pid),
        processes=len(processes.family(server.pid)),
    )


async def _drive(server: Server, seconds: float, options: argparse.Namespace) -> tuple[Tallied, int, list[Sample]]:
    """The load, the kills and the samples."""
    rng = random.Random(f"kills {options.seed}")
    kills: list[int] = []
    samples: list[Sample] = []
    crowd = Crowd(server.url, CLIENTS, MANNERS, options.seed, WAYS[options.ways], server.grpc_port)
    chores = {
        asyncio.create_task(kill_workers(server, options.kill_every, rng, kills)),
        asyncio.create_task(_watch(server, seconds / SAMPLES, samples)),
    }
    try:
        return await crowd.run(sys.maxsize, seconds), len(kills), samples
    finally:
        for chore in chores:
            chore.cancel()
        await asyncio.wait(chores)


async def _watch(server: Server, every: float, samples: list[Sample]) -> None:
    begun = time.monotonic()
    while True:
        await asyncio.sleep(every)
        samples.append(sample(server, time.monotonic() - begun))


def _judge(findings: Findings, samples: list[Sample], before: Sample, after: Sample) -> None:
    fifth = len(samples) // 5
    early, late = _median(samples[fifth : 2 * fifth]), _median(samples[-fifth:])
    rows = [
        {"when": when, **asdict(one)}
        for when, one in (("before", before), ("second fifth", early), ("last fifth", late), ("after", after))
    ]
    findings.table("What the server holds (medians)", rows)
    findings.keep("samples", [asdict(one) for one in samples])
    findings.at_most("front: growth of memory", late.front_mb - early.front_mb, MORE_MB, "MiB")
    findings.at_most("workers: growth of memory", late.workers_mb - early.workers_mb, MORE_MB, "MiB")
    findings.at_most("growth of descriptors under load", late.descriptors - early.descriptors, MORE_DESCRIPTORS)
    findings.at_most("descriptors left behind by clients", after.descriptors - before.descriptors, 2)
    findings.at_most("growth of threads", late.threads - early.threads, 0)
    findings.at_most("processes left behind", after.processes - before.processes, 0)


def _median(samples: list[Sample]) -> Sample:
    """The median of each figure."""
    return Sample(
        at=statistics.median(one.at for one in samples),
        front_mb=statistics.median(one.front_mb for one in samples),
        workers_mb=statistics.median(one.workers_mb for one in samples),
        descriptors=round(statistics.median(one.descriptors for one in samples)),
        threads=round(statistics.median(one.threads for one in samples)),
        processes=round(statistics.median(one.processes for one in samples)),
    )


if __name__ == "__main__":
    sys.exit(main())

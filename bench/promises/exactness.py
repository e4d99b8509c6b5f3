"""Every answer is the answer to its own request, and every request ends exactly once, whatever goes wrong. And does anything grow?

    python bench/promises/exactness.py                            a million requests, some minutes; then a soak of two
    python bench/promises/exactness.py --only exactness --requests 100000    a first impression
    python bench/promises/exactness.py --ways native              by the native route alone
    python bench/promises/exactness.py --broker redis             with the broker in Redis
    python bench/promises/exactness.py --only soak --minutes 20   long enough to tell
    python bench/promises/exactness.py --only soak --kill-every 0.4   crashes above all: does a dead worker leave anything behind?

A crowd of clients sends unique texts by all ways into the service, some of them several in a request, and checks each answer. One in ten leaves
while it waits; some tear a request apart, some send an input that the model refuses, or one that makes its whole batch fail. One batch in two
hundred fails for no reason, and a worker is killed every two seconds, so batches run again whole, in halves, and alone. In the end the clients'
books are compared with the server's: it counted what they saw, outcome by outcome, and the difference is those who left.

`soak` has the same at a moderate rate. Memory of the front process and of its workers, open descriptors, threads and processes are sampled; the
medians of the second and of the last fifth of the time must be alike, and descriptors must be back to where they were when the clients are gone.
It leaves bench/out/soak.json.
"""

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any

from bench.promises.crowd import WAYS, Crowd, Manners, Tallied, loop_factory
from bench.stand import parts, processes, stand
from bench.stand.findings import Findings
from bench.stand.fleet import Redis
from bench.stand.stand import Server

CLIENTS = 256
GPUS = 2
KILL_EVERY = 2.0
RAISES = 0.005
BATCH_MS = 2.0
SETTLE_SECONDS = 10.0
UNTOLD = ("left", "let go")
"""Outcomes of texts of which clients were told nothing; the server may have counted any."""
SLOWEST = 2_000.0
"""Requests per second at which the run would take as long as it may."""
SOAK_RATE = 800.0
SOAK = Manners(leave=0.1, tear=0.01, reject=0.0005, poison=0.0001, pause=CLIENTS / SOAK_RATE)
SAMPLES = 100
MORE_MB, MORE_DESCRIPTORS = 8.0, 32

Chore = Callable[[], Coroutine[Any, Any, None]]


def main() -> int:
    parser = argparse.ArgumentParser(description="The request-to-answer mapping under cancellation, retries and kills.")
    add = parser.add_argument
    add("--requests", type=int, default=1_000_000, help="how many (default %(default)d)")
    add("--seconds", type=float, default=0.0, help="most of the load (default: 60, and one for each 2,000 requests)")
    add("--minutes", type=float, default=2.0, help="of the soak (default %(default)g)")
    add("--kill-every", type=float, default=10.0, help="seconds between kills in the soak (default %(default)g)")
    add("--seed", type=int, default=secrets.randbelow(1 << 31), help="of all dice (default: a new one)")
    add("--ways", choices=WAYS, default="all", help="ways into the service (default %(default)s)")
    add("--broker", choices=("memory", "redis"), default="memory", help="default %(default)s")
    return parts.run(parser, PARTS)


def exactness(findings: Findings, options: argparse.Namespace) -> None:
    """Send so many requests, as fast as they are answered."""
    stand.pin_to_load_core()
    findings.say(f"{options.requests:,} requests, seed {options.seed}.")
    environment = {"BENCH_MS": f"{BATCH_MS}", "BENCH_RAISE": f"{RAISES}", "BENCH_SEED": str(options.seed)}
    with flaky("exactness", options.broker, environment) as server:
        begun = time.monotonic()
        longest = options.seconds or 60 + options.requests / SLOWEST
        crowd = partial(Crowd, server.url, CLIENTS, Manners(), options.seed, WAYS[options.ways], server.grpc_port)
        counters, kills = run(server, crowd, options.requests, longest, KILL_EVERY, options.seed)
        seconds = time.monotonic() - begun
        counted = settled(server)
        health = server.ask("/internal/health")
        retries = server.total("headway_retries_total")
    _report(findings, counters, counted, kills, seconds)
    findings.none("requests the server still holds afterwards", health["pending"] + health["queue_depth"])
    findings.none("exit code of the server", server.exit_code or 0)
    findings.say(f"{retries:,.0f} entries were queued again; {health['dead_letters']:,} dead letters are kept.")


@contextlib.contextmanager
def flaky(name: str, broker: str, environment: dict[str, str]) -> Iterator[Server]:
    """Service of a function that fails now and then, with a port for gRPC."""
    port = stand.free_port()
    flags = ["--workers", str(GPUS), "--max-batch-size", "64", "--log-level", "error", "--grpc-port", str(port)]
    with contextlib.ExitStack() as stack:
        if broker == "redis":
            flags += ["--broker", stack.enter_context(Redis(f"{name}-redis")).url]
        target = f"{stand.TARGETS}:Flaky"
        server = stack.enter_context(stand.headway(target, *flags, name=name, environment=environment))
        server.grpc_port = port
        yield server


def run(
    server: Server,
    crowd: Callable[[], Crowd],
    requests: int,
    seconds: float,
    kill_every: float,
    seed: int,
    *watch: Chore,
) -> tuple[Tallied, int]:
    """Have a crowd send until `requests` were sent or `seconds` are over, while workers are killed. Returns what became of the requests, and how many
    workers were killed.
    """
    kills: list[int] = []
    killing = partial(kill_workers, server, kill_every, random.Random(f"kills {seed}"), kills)

    async def drive() -> Tallied:
        all_chores: list[Chore] = [killing, *watch]
        chores = [asyncio.create_task(chore()) for chore in all_chores]
        try:
            return await crowd().run(requests, seconds)
        finally:
            for chore in chores:
                chore.cancel()
            await asyncio.wait(chores)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(drive()), len(kills)


async def kill_workers(server: Server, every: float, rng: random.Random, kills: list[int]) -> None:
    """Kill a worker every so many seconds, until cancelled; `kills` gets their pids."""
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * every)
        with contextlib.suppress(OSError):
            pids = await asyncio.to_thread(server.worker_pids)
            if pids:
                victim = rng.choice(pids)
                os.kill(victim, signal.SIGKILL)
                kills.append(victim)


def settled(server: Server) -> Counter[str]:
    """Return the server's count of outcomes, as soon as it holds no request."""
    patience = time.monotonic() + SETTLE_SECONDS
    while server.ask("/internal/health")["pending"] and time.monotonic() < patience:
        time.sleep(0.05)
    return Counter(server.outcomes())


def audit(findings: Findings, counters: Tallied, counted: Counter[str], kills: int) -> None:
    """Compare the books of clients and server, and check that nothing is amiss."""
    seen = Counter(
        {outcome: count for outcome, count in counters.outcomes.items() if outcome not in (*UNTOLD, "silent")}
    )
    left = sum(counters.outcomes[outcome] for outcome in UNTOLD)
    rows: list[dict[str, object]] = [
        {"outcome": outcome, "clients": seen[outcome], "server": counted[outcome]} for outcome in sorted(seen | counted)
    ]
    rows.append({"outcome": "left, or let go", "clients": left})
    rows.append({"outcome": "all", "clients": counters.outcomes.total(), "server": counted.total()})
    findings.table("Outcomes", rows)
    ways = [{"way": way, "answered": times} for way, times in sorted(counters.by_way.items())]
    findings.table("Requests answered, by their way", ways)
    for example in counters.examples:
        findings.say(f"  {example}")
    findings.none("answers that belong to another request", counters.wrong)
    findings.none("answers nobody asked for", counters.unasked)
    findings.none("requests never answered", counters.outcomes["silent"])
    findings.none("connections closed instead of an answer", counters.outcomes["cut"])
    findings.none("failing inputs answered as if they were fine", counters.spared)
    findings.at_most("fine inputs answered as failing (each takes a kill while it runs alone)", counters.blamed, kills)
    findings.none("sent requests without an outcome", counters.sent - counters.outcomes.total())
    uncounted = counters.sent - counted.total()
    findings.none("requests the server counted and nobody sent", max(0, -uncounted))
    findings.at_most(
        "sent requests less the server's count (of calls that were cancelled at once)", uncounted, counters.unsure
    )
    findings.none("outcomes seen that the server did not count", (seen - counted).total())
    findings.none(
        "outcomes the server counted too often, those who left aside", (counted - seen).total() - left + uncounted
    )


def _report(findings: Findings, counters: Tallied, counted: Counter[str], kills: int, seconds: float) -> None:
    audit(findings, counters, counted, kills)
    stayed = counters.sent - sum(counters.outcomes[outcome] for outcome in UNTOLD)
    failing = counters.outcomes["rejected_by_model"]
    findings.at_least(
        "fine inputs answered, % of those who stayed", 100 * counters.outcomes["ok"] / (stayed - failing), 99.9
    )
    findings.figure("requests sent", counters.sent)
    findings.figure("workers killed", kills)
    findings.figure("requests whose clients left", sum(counters.outcomes[outcome] for outcome in UNTOLD))
    findings.keep("counters", {"sent": counters.sent, "torn": counters.torn, "kills": kills, "seconds": seconds})
    findings.say(
        f"{counters.sent:,} requests in {seconds:.0f} s ({counters.sent / seconds:,.0f}/s), {counters.torn:,} torn, "
        f"{counters.outcomes['left']:,} left, {kills} workers killed."
    )


# Does anything grow?


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server held at an instant."""

    at: float
    front_mb: float
    workers_mb: float
    descriptors: float
    threads: float
    processes: float


def soak(findings: Findings, options: argparse.Namespace) -> None:
    """Send at a moderate rate for so many minutes, and look at the server meanwhile."""
    stand.pin_to_load_core()
    seconds = options.minutes * 60
    findings.say(f"{options.minutes:g} minutes at about {SOAK_RATE:,.0f}/s, seed {options.seed}.")
    environment = {"BENCH_MS": "10", "BENCH_RAISE": "0.002", "BENCH_SEED": str(options.seed)}
    samples: list[Sample] = []
    with flaky("soak", options.broker, environment) as server:

        async def watch() -> None:
            begun = time.monotonic()
            while True:
                await asyncio.sleep(seconds / SAMPLES)
                samples.append(sample(server, time.monotonic() - begun))

        before = sample(server, 0.0)
        crowd = partial(Crowd, server.url, CLIENTS, SOAK, options.seed, WAYS[options.ways], server.grpc_port)
        counters, kills = run(server, crowd, sys.maxsize, seconds, options.kill_every, options.seed, watch)
        counted = settled(server)
        time.sleep(1.0)  # the server looks for connections that have gone twice a second
        after = sample(server, seconds)
    audit(findings, counters, counted, kills)
    _judge(findings, samples, before, after)
    findings.none("exit code of the server", server.exit_code or 0)
    findings.say(
        f"{counters.sent:,} requests, {counters.outcomes['left']:,} left, {counters.torn:,} torn, {kills} kills."
    )


def sample(server: Server, at: float) -> Sample:
    rss = server.rss()
    return Sample(
        at=round(at, 1),
        front_mb=rss.get("front", 0) / 2**20,
        workers_mb=rss.get("worker", 0) / 2**20,
        descriptors=server.descriptors(),
        threads=processes.threads(server.pid),
        processes=len(processes.family(server.pid)),
    )


def _judge(findings: Findings, samples: list[Sample], before: Sample, after: Sample) -> None:
    fifth = len(samples) // 5
    early, late = _median(samples[fifth : 2 * fifth]), _median(samples[-fifth:])
    rows = [
        {"when": when, **asdict(one)}
        for when, one in (("before", before), ("second fifth", early), ("last fifth", late), ("after", after))
    ]
    findings.table("What the server holds (medians)", rows)
    findings.keep("samples", [asdict(sample) for sample in samples])
    findings.at_most("front: growth of memory", late.front_mb - early.front_mb, MORE_MB, "MiB")
    findings.at_most("workers: growth of memory", late.workers_mb - early.workers_mb, MORE_MB, "MiB")
    findings.at_most("growth of descriptors under load", late.descriptors - early.descriptors, MORE_DESCRIPTORS)
    findings.at_most("descriptors left behind by clients", after.descriptors - before.descriptors, 2)
    findings.at_most("growth of threads", late.threads - early.threads, 0)
    findings.at_most("processes left behind", after.processes - before.processes, 0)


def _median(samples: list[Sample]) -> Sample:
    return Sample(*(statistics.median(figures) for figures in zip(*map(astuple, samples), strict=True)))


PARTS: parts.Parts = {"exactness": exactness, "soak": soak}

if __name__ == "__main__":
    sys.exit(main())

"""Every answer is the answer to its own request, and every request ends exactly once, whatever goes wrong.

    python bench/promises/exactness.py                      a million requests, some minutes
    python bench/promises/exactness.py --requests 100000    a first impression
    python bench/promises/exactness.py --ways native        by the native route alone
    python bench/promises/exactness.py --broker redis       with the broker in Redis
    python bench/promises/exactness.py --models 5           five models, each of which knows its own texts

A crowd of clients sends unique texts by all ways into the service, some of them several in a request, and checks each answer. One in ten leaves while it waits; some tear a request
apart, some send an input that the model refuses, or one that makes its whole batch fail. One batch in two hundred
fails for no reason, and every two seconds a worker is killed with SIGKILL, so batches are run again whole, in halves,
and alone. In the end the clients' books are compared with the server's: outcome by outcome, the server counted what
the clients saw, and the difference is those who left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from bench.promises.crowd import WAYS, Crowd, Manners, Tallied, loop_factory
from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.fleet import Redis
from bench.stand.stand import Server
from tests.promises.ways_in import native_of

CLIENTS = 256
GPUS = 2
KILL_EVERY = 2.0
RAISES = 0.005
BATCH_MS = 2.0
SETTLE_SECONDS = 10.0
UNTOLD = ("left", "let go")
"""Outcomes of texts of which their clients were told nothing, so that the server may have counted any."""
SLOWEST = 2_000.0
"""Requests per second at which the run would take as long as it may."""


def main() -> int:
    options = _options()
    stand.end_in_order()
    stand.pin_to_load_core()
    findings = Findings(
        "exactness", seed=options.seed, clients=CLIENTS, workers=GPUS, kill_every_s=KILL_EVERY, failing_batches=RAISES,
        ways=options.ways, broker=options.broker, models=options.models, pinning=stand.PINNING,
    )  # fmt: skip
    findings.say(f"{options.requests:,} requests, seed {options.seed}; {stand.PINNING}.")
    environment = {"BENCH_MS": f"{BATCH_MS}", "BENCH_RAISE": f"{RAISES}"}
    environment["BENCH_SEED"] = str(options.seed)
    models = [f"m{number}" for number in range(options.models)] if options.models > 1 else []
    with flaky("exactness", options.broker, 1 if models else GPUS, environment, models) as server:
        begun = time.monotonic()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            counters, kills = runner.run(_drive(server, options))
        seconds = time.monotonic() - begun
        counted = settled(server)
        health = server.ask("/internal/health")
        retries = server.total("headway_retries_total")
    _report(findings, counters, counted, kills, seconds)
    findings.none("requests the server still holds afterwards", health["pending"] + health["queue_depth"])
    findings.none("exit code of the server", server.exit_code or 0)
    findings.say(f"{retries:,.0f} entries were queued again; {health['dead_letters']:,} dead letters are kept.")
    return findings.close()


@contextlib.contextmanager
def flaky(
    name: str, broker: str, workers: int, environment: dict[str, str], models: Sequence[str] = ()
) -> Iterator[Server]:
    """Service of a function that fails now and then, with a port for gRPC and its broker in memory or Redis.

    `models` are the names of several such functions, of which each knows its own texts.
    """
    port = stand.free_port()
    flags = ["--workers", str(workers), "--max-batch-size", "64", "--log-level", "error", "--grpc-port", str(port)]
    with contextlib.ExitStack() as stack:
        if broker == "redis":
            flags += ["--broker", stack.enter_context(Redis(f"{name}-redis")).url]
        targets = [f"{model}={stand.TARGETS}:FlakyOf('{model}')" for model in models] or [f"{stand.TARGETS}:Flaky"]
        server = stack.enter_context(stand.headway(*targets, *flags, name=name, environment=environment))
        server.grpc_port = port
        yield server


async def _drive(server: Server, options: argparse.Namespace) -> tuple[Tallied, int]:
    """The load and the kills; returns what became of the requests, and how many workers were killed."""
    kills: list[int] = []
    ways = WAYS[options.ways]
    if options.models > 1:
        ways = tuple(native_of(f"m{number}") for number in range(options.models))
    crowd = Crowd(server.url, CLIENTS, Manners(), options.seed, ways, server.grpc_port)
    killing = asyncio.create_task(kill_workers(server, KILL_EVERY, random.Random(f"kills {options.seed}"), kills))
    try:
        seconds = options.seconds or 60 + options.requests / SLOWEST
        return await crowd.run(options.requests, seconds=seconds), len(kills)
    finally:
        killing.cancel()
        await asyncio.wait({killing})


async def kill_workers(server: Server, every: float, rng: random.Random, kills: list[int]) -> None:
    """Kill a worker of `server` with SIGKILL every so many seconds, until cancelled; `kills` gets their pids."""
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * every)
        with contextlib.suppress(OSError):
            pids = await asyncio.to_thread(server.worker_pids)
            if pids:
                victim = rng.choice(pids)
                os.kill(victim, signal.SIGKILL)
                kills.append(victim)


def settled(server: Server) -> Counter[str]:
    """The server's count of outcomes, as soon as it holds no request."""
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
    rows = [
        {
            "outcome": outcome,
            "clients": seen[outcome],
            "server": counted[outcome],
            "more": counted[outcome] - seen[outcome],
        }
        for outcome in sorted(seen | counted)
    ]
    rows.append({"outcome": "left, or let go", "clients": left, "server": None, "more": None})
    rows.append({"outcome": "all", "clients": counters.outcomes.total(), "server": counted.total(), "more": None})
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


def add_ways(parser: argparse.ArgumentParser) -> None:
    """Add the options on how requests come and where they wait."""
    parser.add_argument("--ways", choices=WAYS, default="all", help="ways into the service (default %(default)s)")
    parser.add_argument("--broker", choices=("memory", "redis"), default="memory", help="default %(default)s")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The request-to-answer mapping under cancellation, retries and kills.")
    parser.add_argument("--requests", type=int, default=1_000_000, help="how many (default %(default)d)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="of all dice (default: a new one)")
    parser.add_argument(
        "--models",
        type=int,
        default=1,
        help="models, asked by the native route alone where there are several (default 1)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="most seconds of the load (default: a minute, and one for each 2,000 requests)",
    )
    add_ways(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

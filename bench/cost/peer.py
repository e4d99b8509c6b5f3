"""CPU time of a request compared with mosec, the fastest batching server for Python that we know of, and how it grows.

    python bench/cost/peer.py                                          about ten minutes
    python bench/cost/peer.py --only brim --rounds 1 --seconds 5       a first impression

brim     Both upper-case a string in no time, in one worker process, at most 64 in a batch, and get the same JSON POST of 115 bytes, with wrk
         saturating one core. Headway runs with everything enabled: an API key and its rate limit, metrics, the admin port. It is measured
         with the window policy at mosec's 2 ms and with its default policy; mosec with its defaults, and with msgspec for its JSON.
rates    Open loop, Poisson: 1,000 requests/s on two GPUs and 3,000 on four, which sleep for 100 ms a batch of at most 100. Headway has its
         defaults, a key and a limit; mosec waits 10 ms for a batch. A request that comes alone costs several times as much as on a
         saturated core, because its data has left the processor's caches.
growth   Headway alone on such GPUs, eleven for each 10,000 requests/s, at 100 to 10,000 requests/s; then 1 to 64 workers at 900.
waiting  Memory of each additional client that waits for its answer.

The servers take turns, and each round starts fresh ones. CPU time covers all processes of a server; only ratios are comparable between machines.
Each part writes its own file: peer, peer_rates, growth, waiting.
"""

import argparse
import contextlib
import math
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from bench.cost.contenders import MAX_BATCH, MOSEC_BATCHES, WAIT_MS, Contender, mosec
from bench.stand import parts, stand
from bench.stand.findings import OUT, Findings
from bench.stand.stand import Server

OURS, MOSEC, MOSEC_FAST = "headway", "mosec", "mosec, msgspec"
WINDOW, PACED = "headway, window 2 ms", "headway, paced"
BRIM = "brim"
KEYS = OUT / "peer-keys.toml"
MOST, GOAL = 0.7, 0.6
GPU_MS, GPU_BATCH, GPU_WAIT_MS = 100.0, 100, 10
RATES = {"1,000/s, 2 GPUs": (1_000.0, 2), "3,000/s, 4 GPUs": (3_000.0, 4)}
"""Requests per second, and the number of GPUs."""
MOST_AT_RATES = 1.0
"""Maximum CPU time relative to mosec's."""
GROWTH = {
    "rates": [(rate, max(1, math.ceil(rate * 1.1 / 1000))) for rate in (100.0, 300.0, 1_000.0, 3_000.0, 10_000.0)],
    "numbers of workers": [(900.0, workers) for workers in (1, 4, 16, 64)],
}
SPREAD = 1.1 / 0.9
"""Maximum ratio of the largest cost to the smallest."""
FEW, CLIENTS = 500, 4_000
"""Numbers of waiting clients."""
MOST_KB = 20.0
_ASK = "POST /v1/inference HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n{body}"


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU time per request beside mosec, and how it grows.")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server (default %(default)d)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load (default %(default)g)")
    return parts.run(parser, PARTS, {"brim": "peer", "rates": "peer_rates"})


def brim(findings: Findings, options: argparse.Namespace) -> None:
    key = stand.write_key(KEYS)
    common = ("--keys", str(KEYS), "--max-batch-size", str(MAX_BATCH), "--log-level", "warning")
    ours = partial(stand.headway, f"{stand.TARGETS}:upper", *common)
    window = partial(ours, "--policy", "window", "--max-wait-ms", str(WAIT_MS), name="peer-window")
    headers = (f"Authorization: Bearer {key}",)
    contenders = {
        WINDOW: Contender(window, headers=headers),
        MOSEC: Contender(partial(mosec, False), batches=MOSEC_BATCHES),
        MOSEC_FAST: Contender(partial(mosec, True), batches=MOSEC_BATCHES),
        PACED: Contender(partial(ours, name="peer-paced"), headers=headers),
    }
    for _ in range(options.rounds):
        for contender in contenders.values():
            with contender.start() as server:
                contender.fill(BRIM, server, options.seconds)
    _show(findings, "wrk, 1 thread, 128 connections, one core for each server", BRIM, contenders)
    for name in (WINDOW, PACED):
        ratio = contenders[name].cost(BRIM) / contenders[MOSEC].cost(BRIM)
        findings.at_most(f"{name}: CPU time against mosec (goal {GOAL:g})", ratio, MOST)
        fast = contenders[name].cost(BRIM) / contenders[MOSEC_FAST].cost(BRIM)
        findings.figure(f"{name}: CPU time against mosec with msgspec", fast)


def rates(findings: Findings, options: argparse.Namespace) -> None:
    flags = ("--expect", "upper", "--key", stand.write_key(KEYS))
    for name, (rate, gpus) in RATES.items():
        ours = partial(stand.emulated, GPU_MS, GPU_BATCH, gpus, "--keys", str(KEYS), name="rates-headway")
        theirs = partial(mosec, max_batch=GPU_BATCH, wait_ms=GPU_WAIT_MS, batch_ms=GPU_MS, workers=gpus)
        contenders = {OURS: Contender(ours, flags), MOSEC: Contender(theirs, batches=MOSEC_BATCHES)}
        for _ in range(options.rounds):
            for contender in contenders.values():
                with contender.start() as server:
                    contender.ask(name, server, rate, options.seconds)
        _show(findings, f"{name} of {GPU_MS:g} ms, at most {GPU_BATCH}", name, contenders)
        ours_us, theirs_us = (_median(contender, name, lambda turn: turn.cost) for contender in contenders.values())
        ours_ms, theirs_ms = (_median(contender, name, lambda turn: turn.p95_ms) for contender in contenders.values())
        findings.at_most(f"{name}: CPU time against mosec", ours_us / theirs_us, MOST_AT_RATES)
        findings.at_most(f"{name}: P95 against mosec", ours_ms / theirs_ms, 1.0)


def _median(contender: Contender, load: str, value: Callable[..., float]) -> float:
    return statistics.median(value(turn) for turn in contender.turns[load])


def _show(findings: Findings, title: str, load: str, contenders: dict[str, Contender]) -> None:
    peer = contenders[MOSEC].cost(load)
    findings.table(title, [one.row(name, load, ("front", "worker"), peer) for name, one in contenders.items()])
    for name, contender in contenders.items():
        findings.keep(f"{load}: {name}", contender.turns[load])


def growth(findings: Findings, options: argparse.Namespace) -> None:
    for over, loads in GROWTH.items():
        rows, turns = [], []
        for rate, workers in loads:
            contender = Contender(partial(stand.emulated, GPU_MS, GPU_BATCH, workers, name="growth"))
            with contender.start() as server:
                contender.ask(over, server, rate, options.seconds, all_answered=False)
            turns += contender.turns[over]
            rows.append({"GPUs": workers, **contender.row(f"{rate:,.0f}/s", over, ("front", "worker"), turns[0].cost)})
        findings.table(f"By {over}; CPU in µs per request", rows)
        findings.keep(over, turns)
        costs = [turn.cost for turn in turns]
        ratio = max(costs) / min(costs)
        findings.at_most(f"CPU per request over all {over}: largest to smallest", ratio, round(SPREAD, 2))
        findings.none(f"over all {over}: requests not answered", sum(turn.unanswered for turn in turns))


def waiting(findings: Findings, options: argparse.Namespace) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW + CLIENTS + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    patience = ("--request-timeout-ms", "60000", "--queue-timeout-ms", "60000", "--gpu-timeout-ms", "30000")
    flags = (*patience, "--max-batch-size", "4096", "--log-level", "warning")
    slow = stand.headway(f"{stand.TARGETS}:Slow", *flags, name="growth-memory")
    with slow as server, contextlib.ExitStack() as held:
        place = urlsplit(server.url)
        sizes = []
        for number in range(FEW + CLIENTS):
            client = held.enter_context(socket.create_connection((place.hostname, place.port), timeout=10))
            body = f'{{"input": "client number {number}"}}'
            client.sendall(_ASK.format(host=place.netloc, length=len(body), body=body).encode())
            if number + 1 in (FEW, FEW + CLIENTS):
                _until_held(server, number + 1)
                sizes.append(server.rss()["front"])
    each = (sizes[1] - sizes[0]) / CLIENTS / 1024
    findings.say(
        f"{CLIENTS:,} more waiting clients: {(sizes[1] - sizes[0]) / 2**20:.1f} MiB more, {each:.1f} KiB each."
    )
    findings.at_most("memory for each waiting client", each, MOST_KB, "KiB")


def _until_held(server: Server, clients: int) -> None:
    patience = time.monotonic() + 8
    while (held := server.ask("/internal/health")["pending"]) < clients:
        if time.monotonic() > patience:
            raise stand.Broken(f"only {held} of {clients} requests are held:\n{server.output[-1000:]}")
        time.sleep(0.05)


PARTS: parts.Parts = {"brim": brim, "rates": rates, "growth": growth, "waiting": waiting}

if __name__ == "__main__":
    sys.exit(main())

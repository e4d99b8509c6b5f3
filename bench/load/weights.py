"""Batches by weight beside batches by number: sentence embeddings of texts of 5 to 250 words, on a CPU.

    python bench/load/weights.py                  about ten minutes; needs what `make example-embeddings` installs
    python bench/load/weights.py --seconds 15     a first impression

Three servers of examples/embeddings.py stand side by side and are asked in turns, so that what else the machine does hits
all alike: one bounds batches by weight; one by that number of texts whose mean weight is the same; and one by as many
of the longest texts as have that weight, which is what a bound on memory allows who counts.

Saturated: so many clients that a full batch always waits; texts a second, the batch times that the server measured, and the CPU
time of a text, which other work on the machine sways least. Open loop: Poisson arrivals at a share of the throughput of the first; latency from the instant a text was due.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import msgspec

from bench.stand import stand
from bench.stand.findings import Findings

WORDS = [
    "time",
    "people",
    "water",
    "house",
    "number",
    "because",
    "different",
    "example",
    "sentence",
    "between",
    "country",
    "problem",
    "around",
    "through",
    "small",
    "letter",
    "answer",
    "study",
    "learn",
    "world",
    "table",
    "morning",
    "against",
    "pattern",
    "center",
    "person",
    "money",
    "serve",
    "appear",
    "road",
    "map",
]
FEWEST, MOST = 5, 250
CLIENTS = 32
SHARE = 0.8
TARGET = f"{stand.ROOT / 'examples' / 'embeddings.py'}:Embedder"
PATIENT = ("--request-timeout-ms", "120000", "--queue-timeout-ms", "120000", "--gpu-timeout-ms", "60000")


class Asked:
    """Outcomes of the requests of one server."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.texts = 0
        self.seconds = 0.0
        self.failed = 0


def main() -> int:
    options = _options()
    stand.end_in_order()
    rng = random.Random(options.seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(FEWEST, MOST))) for _ in range(2000)]
    mean, longest = statistics.fmean(map(len, texts)), max(map(len, texts))
    weight = round(options.batch * mean)
    variants = {
        f"{weight:,} characters": ("--max-batch-weight", str(weight), "--max-batch-size", "256"),
        f"{options.batch} texts, as many on average": ("--max-batch-size", str(options.batch)),
        f"{max(weight // longest, 1)} texts, no heavier ever": ("--max-batch-size", str(max(weight // longest, 1))),
    }
    findings = Findings("weights", seconds=options.seconds, rounds=options.rounds, mean_chars=mean, longest=longest)
    findings.say(f"Texts of {FEWEST} to {MOST} words, {mean:.0f} characters on average; {options.rounds} rounds.")
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                stand.headway(TARGET, *flags, *PATIENT, "--log-level", "warning", name=f"weights-{number}")
            )
            for number, (name, flags) in enumerate(variants.items())
        }
        saturated, rows = _turns(servers, options, lambda url: _closed(url, texts, options.seconds))
        findings.table(f"Saturated by {CLIENTS} clients", rows)
        first = next(iter(saturated.values()))
        rate = SHARE * first.texts / first.seconds
        seeds = iter(range(1000))
        _, rows = _turns(
            servers, options, lambda url: _open(url, texts, rate, options.seconds, random.Random(next(seeds) // 3))
        )
        findings.table(f"Open loop, {rate:.1f} texts/s; ms", rows)
    return findings.close()


def _turns(
    servers: dict[str, Any], options: argparse.Namespace, ask: Callable[[str], Coroutine[Any, Any, Asked]]
) -> tuple[dict[str, Asked], list[dict[str, object]]]:
    """Ask the servers in turns, and sum up what each has done."""
    found = {name: Asked() for name in servers}
    before = {name: _batches(server) for name, server in servers.items()}
    cpu = {name: sum(server.usage().values()) for name, server in servers.items()}
    for _ in range(options.rounds):
        for name, server in servers.items():
            asked, own = asyncio.run(ask(server.url)), found[name]
            own.latencies += asked.latencies
            own.texts += asked.texts
            own.seconds += asked.seconds
            own.failed += asked.failed
    rows = []
    for name, own in found.items():
        count, entries, seconds = (
            after - then for after, then in zip(_batches(servers[name]), before[name], strict=True)
        )
        ascending = sorted(own.latencies)
        rows.append(
            {
                "batches by": name,
                "texts/s": own.texts / own.seconds,
                "p50": ascending[len(ascending) // 2] * 1000,
                "p95": ascending[int(len(ascending) * 0.95)] * 1000,
                "max": ascending[-1] * 1000,
                "texts a batch": entries / count,
                "ms a batch": seconds / count * 1000,
                "CPU ms a text": (sum(servers[name].usage().values()) - cpu[name]) / entries * 1000,
                "failed": own.failed,
            }
        )
    return found, rows


def _batches(server: Any) -> tuple[float, float, float]:
    """Batches so far, their texts, and their run times together in seconds."""
    count, entries, seconds = (
        server.total(f"headway_{name}") for name in ("batch_size_count", "batch_size_sum", "gpu_batch_seconds_sum")
    )
    return count, entries, seconds


async def _closed(url: str, texts: list[str], seconds: float) -> Asked:
    """Have clients ask one text after the other for a while; only what is answered within it counts."""
    asked, begun = Asked(), time.monotonic()

    async def client(rng: random.Random) -> None:
        while (sent := time.monotonic()) < begun + seconds:
            right = await _request(url, rng.choice(texts))
            asked.failed += not right
            if right and (now := time.monotonic()) < begun + seconds:
                asked.texts += 1
                asked.latencies.append(now - sent)

    await asyncio.gather(*(client(random.Random(number)) for number in range(CLIENTS)))
    asked.seconds = seconds
    return asked


async def _open(url: str, texts: list[str], rate: float, seconds: float, rng: random.Random) -> Asked:
    """Send texts when they are due, whether or not earlier ones were answered."""
    asked, begun, due = Asked(), time.monotonic(), 0.0

    async def one(text: str, instant: float) -> None:
        right = await _request(url, text)
        asked.failed += not right
        asked.texts += right
        asked.latencies.append(time.monotonic() - instant)

    async with asyncio.TaskGroup() as sent:
        while (due := due + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(begun + due - time.monotonic(), 0.0))
            sent.create_task(one(rng.choice(texts), begun + due))
    asked.seconds = time.monotonic() - begun
    return asked


async def _request(url: str, text: str) -> bool:
    """Ask for one embedding; whether it came."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = msgspec.json.encode({"input": text})
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/inference HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45.0, help="length of each turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each server")
    parser.add_argument("--batch", type=int, default=8, help="texts in a batch, on average")
    parser.add_argument("--seed", type=int, default=1, help="seed of the texts")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

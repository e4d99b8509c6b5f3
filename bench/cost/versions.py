"""What 300 versions and models that come and go leave behind, in a gateway and its Valkey.

    python bench/cost/versions.py                     about six minutes
    python bench/cost/versions.py --versions 150      a first impression

Each version has a worker for as long as it answers two requests, one of them a task. Every tenth is of a model that the gateway hasn't heard
of. Lives are short (see bench/stand/hurried.py). After each wave of versions, when they are forgotten, the gateway's memory, the keys
in Valkey, blocking reads and commands a second must be what they were after the first.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from bench.stand import hurried as hurried  # First, because what follows takes the lives from it.
from bench.stand import stand
from bench.stand.findings import Findings
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.queue_table import FORGET_AFTER
from headway.core.departure import Load, Rule
from headway.core.queue_limits import QueueLimits
from headway.model import ItemResult, Lease, ModelReport, Slot, WorkerInfo, WorkerStatus
from headway.runtime.counters import BrokerCounts
from tests.servers.redis import RedisServer

SERVED_AT_ONCE = 10
"""Versions that have a worker at a time."""
WAVE = 75
"""Versions before each rest, in which they are forgotten."""
PATIENCE = 30.0
WINDOW = 8.0
"""Seconds for which commands are counted."""
MOST_QUIET = 150
LIMITS = QueueLimits(tiers=3, max_batch=8)
MOST_GATEWAY_MIB = 6.0
"""Growth of the gateway, which remembers its last 10,000 requests."""
MOST_COMMANDS = 1.15
FEW_KEYS = 5
"""Keys of the dashboard's history, which come and go each second, and of figures for the whole service."""
_FLAGS = (
    *("--port", "0", "--admin-port", "0", "--log-level", "warning", "--result-ttl-s", "5"),
    *("--queue-timeout-ms", "25000", "--request-timeout-ms", "25000"),
)


class _Everything:
    """Policy by which whatever waits leaves at once."""

    def rule(self, load: Load) -> Rule:
        return Rule(size=1)


def main() -> int:
    parser = argparse.ArgumentParser(description="What versions and models that come and go leave behind.")
    parser.add_argument("--versions", type=int, default=300, help="that come and go (default %(default)s)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("versions", versions=options.versions, pinning=stand.PINNING)
    with (
        tempfile.TemporaryDirectory(prefix="headway-bench-valkey-") as folder,
        RedisServer("valkey", Path(folder)) as server,
    ):
        command = [sys.executable, "-m", "bench.stand.hurried", "gateway", "--broker", server.url, "--model", "m"]
        with stand.Server("versions", [*command, *_FLAGS], lambda _: "gateway") as gateway:
            gateway.wait_for_banner("Try it:")
            asyncio.run(_come_in_waves(findings, server, gateway, options.versions))
    return findings.close()


async def _come_in_waves(findings: Findings, server: RedisServer, gateway: stand.Server, versions: int) -> None:
    answers: Counter[str] = Counter()
    rows = []
    for first in range(0, versions, WAVE):
        last = min(first + WAVE, versions)
        answers += await _come_and_go(server.url, gateway.url, range(first, last))
        if not first:
            rows.append({"when": f"{last} have come"} | await _state(server, gateway))
        await _forgotten(server)
        rows.append({"when": f"{last} have come and gone"} | await _state(server, gateway))
    findings.table("What is there", rows)
    findings.keep("keys at the end", sorted(key.decode() for key in server.command("KEYS", "*")))
    findings.table("Answers", [{"answer": answer, "times": count} for answer, count in answers.items()])
    before, after = rows[1], rows[-1]
    findings.none("requests without an answer", 2 * versions - answers["200"] - answers["202"])
    findings.at_most("growth of the gateway", after["MiB"] - before["MiB"], MOST_GATEWAY_MIB, "MiB")
    findings.none("keys left", after["of them left"])
    findings.at_most("keys more", after["keys"] - before["keys"], FEW_KEYS)
    findings.none("blocking reads more", after["blocking reads"] - before["blocking reads"])
    findings.at_most("commands, to those at first", after["commands/s"] / before["commands/s"], MOST_COMMANDS)


async def _forgotten(server: RedisServer) -> None:
    """Wait until nothing in Valkey names what has come and gone, and the gateway has had time to forget it."""
    for _ in range(MOST_QUIET):
        if not _left(server):
            break
        await asyncio.sleep(1.0)
    await asyncio.sleep(FORGET_AFTER + 3.0)


def _left(server: RedisServer) -> list[bytes]:
    """Keys of versions and models that have come."""
    return [key for key in server.command("KEYS", "*") if any(mark in key for mark in (b"}@", b"}+", b"{model-"))]


async def _state(server: RedisServer, gateway: stand.Server) -> dict[str, Any]:
    def info(section: str, name: str) -> int:
        return int(server.command("INFO", section)[name])

    begun, at = info("stats", "total_commands_processed"), time.monotonic()
    await asyncio.sleep(WINDOW)
    commands = info("stats", "total_commands_processed") - begun
    return {
        "MiB": sum(gateway.rss().values()) / 2**20,
        "keys": int(server.command("DBSIZE")),
        "of them left": len(_left(server)),
        "blocking reads": info("clients", "blocked_clients"),
        "commands/s": commands / (time.monotonic() - at),
        "Valkey MiB": info("memory", "used_memory") / 2**20,
        "series": len(gateway.metrics()),
    }


async def _come_and_go(url: str, door: str, versions: range) -> Counter[str]:
    answers: Counter[str] = Counter()
    numbers = iter(versions)
    async with aiohttp.ClientSession(door) as session:

        async def go_on() -> None:
            for number in numbers:
                version = f"v{number}"
                model = f"model-{number}" if number % 10 == 0 else "m"
                async with _worker(url, model, version):
                    answers[await _asked(session, model, version, {})] += 1
                    answers[await _asked(session, model, version, {"Prefer": "respond-async"})] += 1

        await asyncio.gather(*(go_on() for _ in range(SERVED_AT_ONCE)))
    return answers


async def _asked(session: aiohttp.ClientSession, model: str, version: str, headers: dict[str, str]) -> str:
    """Status of the first answer other than that the version is unknown yet."""
    until = time.monotonic() + PATIENCE
    body = {"input": "a", "model": model, "version": version}
    while True:
        async with session.post("/v1/inference", json=body, headers=headers) as answer:
            text = await answer.text()
            if answer.status in (200, 202):
                return str(answer.status)
            if answer.status != 404 or time.monotonic() > until:
                return text
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _worker(url: str, model: str, version: str) -> AsyncIterator[None]:
    """A worker of a version."""
    connection = RedisConnection(url, timeout=PATIENCE)
    await connection.open()
    broker = RedisBroker(connection, {model: LIMITS}, BrokerCounts(), random.random)
    info = WorkerInfo(
        worker_id=f"gpu-{version}", model=model, status=WorkerStatus.HEALTHY, runs=ModelReport(version), version=version
    )
    tasks = [asyncio.ensure_future(act) for act in (_beat(broker, info), _work(broker, info))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await broker.heartbeat(replace(info, status=WorkerStatus.OFFLINE))
        await broker.close()
        await connection.close()


async def _beat(broker: RedisBroker, info: WorkerInfo) -> None:
    while True:
        await broker.heartbeat(info)
        await asyncio.sleep(0.5)


async def _work(broker: RedisBroker, info: WorkerInfo) -> None:
    slot = Slot(info.worker_id, info.model, LIMITS.max_batch, 0, info.runs, info.version)
    while True:
        claimed = await broker.claim(slot, _Everything())
        if isinstance(claimed, Lease):
            await broker.complete(claimed, [ItemResult(str(entry.input).upper()) for entry in claimed.entries])
        else:
            await broker.wait_for_work(slot, claimed.until)


if __name__ == "__main__":
    sys.exit(main())

"""What a great many keys, names and versions leave in a process: time of its event loop, memory, metrics, keys in Redis.

    python bench/cost/many.py                                                    all of it, about ten minutes
    python bench/cost/many.py --keys 100000 --names 10000 --versions 150         a first impression
    python bench/cost/many.py --only keys

keys      A million API keys in SQLite, and half as many ended ones, are read by the ring of keys: at the start, at leisure, as 20,000 new
          ones come at once, and in a hurry after the store's history has changed, with a revocation in the middle. A task that asks for its
          turn every millisecond measures how late it gets it, on the wall and in CPU time of the loop's thread: the former tells
          of other programs on the machine too, as does the same task while nothing goes on.
names     A hundred thousand models and versions that a client made up, each once, in the ways in which a request names one, over HTTP and gRPC,
          at `serve` and at a fleet; each must be refused. Memory of the process that answers, its metrics, its list of models and the
          keys of such names in Redis are looked at after a tenth of the names and at the end.
versions  300 versions of which each has a worker for as long as it answers two requests, one of which is a task; every tenth is of a
          model that the gateway has not heard of. Lives are short (see bench/stand/hurried.py).
          Memory of the gateway, keys in Valkey, blocking reads and commands a second are taken after each wave of versions, when
          those are forgotten; the first and the last must be alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sqlite3
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
import uvloop
from msgspec.structs import replace

from bench.stand import fleet, parts, processes, stand
from bench.stand import hurried as hurried  # Before all that takes the lives from it.
from bench.stand.findings import Findings
from headway.app.stores import make_key_store
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.queue_table import FORGET_AFTER
from headway.config import Settings
from headway.core.departure import Load, Rule
from headway.core.queue_limits import QueueLimits
from headway.grpc import messages
from headway.identity.api_keys.cache import ApiKeyCache
from headway.identity.api_keys.credential import digest, parse
from headway.model import ApiKey, ItemResult, Lease, ModelReport, Slot, WorkerInfo, WorkerStatus
from headway.runtime.counters import BrokerCounts, StoreCounts
from headway.runtime.supervisor import Supervisor
from headway.storage.key_rows import COLUMNS, row_of
from tests.identity.writing import key_of
from tests.servers.redis import RedisServer


def main() -> int:
    parser = argparse.ArgumentParser(description="What many keys, names and versions leave behind.")
    parser.add_argument("--keys", type=int, default=1_000_000, help="live ones (default %(default)s)")
    parser.add_argument("--names", type=int, default=100_000, help="for each service (default %(default)s)")
    parser.add_argument("--versions", type=int, default=300, help="that come and go (default %(default)s)")
    return parts.run(parser, PARTS, {name: f"many_{name}" for name in PARTS})


# Keys.

MOST_STALL_MS = 20.0
KNOWN_WITHIN = 5.0
QUIET, ROUTINE = 3.0, 10.0
"""Seconds for which nothing, and the routine reading, is measured."""
NEW = 20_000
TICK = 0.001
_ADD = f"INSERT INTO headway_keys ({COLUMNS}, revision) VALUES ({', '.join('?' * (COLUMNS.count(',') + 2))})"
_FORGET = "UPDATE headway_key_changes SET mark = 'another'"


async def late_turns(work: Awaitable[None]) -> dict[str, float]:
    """Longest wait of a task for its turn while `work` goes on, on the wall and in CPU time, and the seconds of all."""
    stall = step = 0.0

    async def tick_on() -> None:
        nonlocal stall, step
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(TICK)
            stall = max(stall, time.monotonic() - wall - TICK)
            step = max(step, time.thread_time() - cpu)

    began, ticking = time.monotonic(), asyncio.create_task(tick_on())
    await work
    ticking.cancel()
    return {"s": time.monotonic() - began, "longest stall ms": stall * 1e3, "longest step ms CPU": step * 1e3}


def many_keys(findings: Findings, options: argparse.Namespace) -> None:
    """Read so many keys while the event loop has other work."""
    with (
        tempfile.TemporaryDirectory(prefix="headway-bench-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_read_keys(findings, Path(folder) / "keys.db", options.keys))


async def _read_keys(findings: Findings, path: Path, count: int) -> None:
    settings = Settings(keys="ledger", ledger=f"sqlite:///{path}")
    store = make_key_store(settings, create=True)
    await store.open()
    await _in_sqlite(path, lambda connection: _fill(connection, _drawn_keys(count, None), 0))
    await _in_sqlite(path, lambda connection: _fill(connection, _drawn_keys(count // 2, 1.0), count))
    supervisor = Supervisor()
    ring = ApiKeyCache(store, settings, StoreCounts(), time.monotonic, time.time)
    before = _memory()
    rows: list[dict[str, Any]] = [{"while": "all keys are read at the start", **await late_turns(ring.open())}]
    held = _memory() - before
    ring.start(supervisor)
    rows.append({"while": "nothing goes on", **await late_turns(asyncio.sleep(QUIET))})
    ring._begin(hurry=False)
    ring._hurry.set()
    rows.append({"while": "all keys are read at leisure", **await late_turns(asyncio.sleep(ROUTINE))})

    async def add() -> None:
        await _in_sqlite(path, lambda connection: _fill(connection, _drawn_keys(NEW, None), 2 * count))
        await _until(lambda: len(ring) >= count + NEW)

    rows.append({"while": f"{NEW:,} new keys come", **await late_turns(add())})
    id, secret = parse(key_of("revoked").encode()) or ("", b"")
    await store.add(ApiKey(id=id, digest=digest(secret), user="u", tenant="t", tier="paid", created_at=time.time()))
    credential, seen = f"Bearer {key_of('revoked')}".encode(), 0.0
    await _until(lambda: ring.identify(credential) is not None)

    async def lose_history() -> None:
        nonlocal seen
        await _in_sqlite(path, lambda connection: connection.execute(_FORGET))
        await _until(lambda: not ring._whole)
        began = time.monotonic()
        await store.expire(id, 0.0)
        await _until(lambda: ring.identify(credential) is None)
        seen = time.monotonic() - began
        await _until(lambda: ring._whole)

    rows.append({"while": "all keys are read in a hurry", **await late_turns(lose_history())})
    await supervisor.stop()
    await ring.close()
    findings.table(f"{count:,} live keys and {count // 2:,} ended ones", rows)
    findings.say(f"memory: {held / 2**20:,.0f} MiB for {len(ring):,} keys")
    findings.none("keys held that are not live, or live ones that are not", len(ring) - count - NEW)
    worst = max(row["longest step ms CPU"] for row in rows[1:])
    findings.at_most("longest step of the loop while it serves, CPU", worst, MOST_STALL_MS, "ms")
    findings.at_most("a revocation in the middle is known", seen, KNOWN_WITHIN, "s")


async def _until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)


def _drawn_keys(count: int, ends: float | None) -> Iterator[ApiKey]:
    for _ in range(count):
        noise = os.urandom(24).hex()
        yield ApiKey(
            id=noise[8:20], digest=os.urandom(32), user=f"user-{noise[:8]}", tenant=f"tenant-{noise[:2]}", tier="paid",
            created_at=1e9, expires_at=ends,
        )  # fmt: skip


def _fill(connection: sqlite3.Connection, keys: Iterator[ApiKey], revision: int) -> None:
    connection.executemany(_ADD, ((*row_of(key), number) for number, key in enumerate(keys, start=revision + 1)))


async def _in_sqlite(path: Path, work: Callable[[sqlite3.Connection], object]) -> None:
    """Do `work` in a thread, so that the event loop that is measured has nothing of it."""

    def whole() -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            work(connection)

    await asyncio.to_thread(whole)


def _memory() -> int:
    found = processes.look(os.getpid())
    return found.rss if found is not None else 0


# Names.

NAMED_AT_ONCE = 32
MOST_GROWTH_MIB = 8.0
FEW_SERIES = 8
"""Series that a service begins with its first events, whoever causes them."""
_TENSORS = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
_PREDICT = "/headway.v1.Inference/Predict"


def many_names(findings: Findings, options: argparse.Namespace) -> None:
    """Ask for so many names that nobody serves."""
    with fleet.lone_service(stand.EMULATED_GPU, name="names", grpc=True) as made:
        _ask_names(findings, "serve", made, options.names)
    with fleet.emulated(20, 8, hosts=1, gpus=1, name="names", grpc=True) as made:
        _ask_names(findings, "fleet", made, options.names)


def _ask_names(findings: Findings, what: str, made: fleet.Fleet, names: int) -> None:
    door = made.doors[0]
    rows: list[dict[str, Any]] = []
    first = max(NAMED_AT_ONCE, names // 10)
    answers: Counter[str] = Counter()
    for begin, end in ((0, first), (first, names)):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            answers += runner.run(_name_them(door, begin, end))
        rows.append({"service": what, "names": end} | _state_of(made, door))
    findings.table(f"{what}: after so many names", rows)
    findings.table(f"{what}: answers", [{"answer": answer, "times": count} for answer, count in answers.items()])
    before, after = rows
    findings.none(f"{what}: names that were not refused", names - sum(answers[one] for one in ("404", "NOT_FOUND")))
    findings.at_most(f"{what}: growth", after["MiB"] - before["MiB"], MOST_GROWTH_MIB, "MiB")
    findings.at_most(f"{what}: series more", after["series"] - before["series"], FEW_SERIES)
    findings.none(f"{what}: models more", after["models"] - before["models"])
    findings.none(f"{what}: keys in Redis of such names", after["keys"])


def _state_of(made: fleet.Fleet, door: stand.Server) -> dict[str, Any]:
    keys = 0
    if door in made.gateways:
        with made.redis.client() as client:
            keys = sum(1 for _ in client.scan_iter("*made-up*", count=1000))
    with urllib.request.urlopen(f"{door.url}/v1/models", timeout=10) as answer:
        models = msgspec.json.decode(answer.read())["data"]
    return {
        "MiB": sum(door.rss().values()) / 2**20,
        "series": len({name for name in door.metrics() if not name[0].endswith(("_created", "_bucket"))}),
        "models": len(models),
        "keys": keys,
    }


async def _name_them(door: stand.Server, begin: int, end: int) -> Counter[str]:
    answers: Counter[str] = Counter()
    numbers = iter(range(begin, end))
    address = f"127.0.0.1:{door.grpc_port}"
    async with aiohttp.ClientSession() as session, grpc.aio.insecure_channel(address) as channel:

        async def go_on() -> None:
            for number in numbers:
                answers[await _ask_for(session, channel, door.url, number)] += 1

        await asyncio.gather(*(go_on() for _ in range(NAMED_AT_ONCE)))
    return answers


async def _ask_for(session: aiohttp.ClientSession, channel: grpc.aio.Channel, url: str, number: int) -> str:
    """Answer to a request that names what nobody serves."""
    name = f"made-up-{number}"
    ways: list[tuple[str, dict[str, Any]]] = [
        ("/v1/inference", {"input": "a", "model": name}),
        ("/v1/inference", {"input": "a", "version": name}),
        (f"/v2/models/default/versions/{name}/infer", _TENSORS),
        ("/v1/completions", {"prompt": "a", "model": name}),
        (f"/v2/models/{name}/infer", _TENSORS),
    ]
    way = number % (len(ways) + 1)
    if way < len(ways):
        path, body = ways[way]
        async with session.post(url + path, json=body) as answer:
            await answer.read()
            return str(answer.status)
    request = messages.message("headway.v1.PredictRequest")(input_data=b"a", model_id=name)
    try:
        await channel.unary_unary(_PREDICT)(request.SerializeToString())
    except grpc.aio.AioRpcError as refused:
        return str(refused.code().name)
    return "OK"


# Versions.

SERVED_AT_ONCE = 10
"""Versions that are there at a time."""
WAVE = 75
"""Versions after which there is a rest, in which those before are forgotten: memory is as large as the largest wave had it."""
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
_SHORT = ("--port", "0", "--admin-port", "0", "--log-level", "warning", "--result-ttl-s", "5")
_PATIENT = ("--queue-timeout-ms", "25000", "--request-timeout-ms", "25000")


class _Everything:
    """Policy by which whatever waits leaves at once."""

    def rule(self, load: Load) -> Rule:
        """See Policy."""
        return Rule(size=1)


def many_versions(findings: Findings, options: argparse.Namespace) -> None:
    """Have so many versions come and go."""
    with (
        tempfile.TemporaryDirectory(prefix="headway-bench-valkey-") as folder,
        RedisServer("valkey", Path(folder)) as server,
    ):
        command = [sys.executable, "-m", "bench.stand.hurried", "gateway", "--broker", server.url, "--model", "m"]
        with stand.Server("versions", [*command, *_SHORT, *_PATIENT], lambda _: "gateway") as gateway:
            gateway.wait_for_banner("Try it:")
            asyncio.run(_come_in_waves(findings, server, gateway, options.versions))


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
    """Wait until nothing in Valkey names what has come and gone, and the gateway has had time to forget it; for so long at most."""
    for _ in range(MOST_QUIET):
        if not _left(server):
            break
        await asyncio.sleep(1.0)
    await asyncio.sleep(FORGET_AFTER + 3.0)


def _left(server: RedisServer) -> list[bytes]:
    """Keys of versions and models that have come."""
    return [key for key in server.command("KEYS", "*") if any(mark in key for mark in (b"}@", b"}+", b"{model-"))]


async def _state(server: RedisServer, gateway: stand.Server) -> dict[str, Any]:
    """What there is of the gateway and in the server."""

    def told(section: str, name: str) -> int:
        return int(server.command("INFO", section)[name])

    begun, at = told("stats", "total_commands_processed"), time.monotonic()
    await asyncio.sleep(WINDOW)
    commands = told("stats", "total_commands_processed") - begun
    return {
        "MiB": sum(gateway.rss().values()) / 2**20,
        "keys": int(server.command("DBSIZE")),
        "of them left": len(_left(server)),
        "blocking reads": told("clients", "blocked_clients"),
        "commands/s": commands / (time.monotonic() - at),
        "Valkey MiB": told("memory", "used_memory") / 2**20,
        "functions MiB": told("memory", "used_memory_vm_functions") / 2**20,
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
    """Status of the first answer that is not that the version is unknown yet."""
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
async def _worker(url: str, model: str, version: str) -> Any:
    """A process with a worker of a version."""
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


PARTS: parts.Parts = {"keys": many_keys, "names": many_names, "versions": many_versions}

if __name__ == "__main__":
    sys.exit(main())

"""Watches a fleet in trouble: requests that wait too long, Redis, and the registry.

A request that ends with 504 leaves no reason behind. So requests are watched while they run. If one waits too long, this is written down
immediately: the operation, the troubles so far, what each process reports about it, and the contents of each queue in Redis.

Unplanned stalls of Redis are recorded, because a busy machine's disk may block it for seconds. So are the slots that the registry has as healthy.
"""

import asyncio
import contextlib
import json
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import redis

from bench.stand.fleet import MODEL, PREFIX, Fleet, Redis
from bench.stand.stand import Server
from tests.promises.evidence import Sighting, Slot
from tests.promises.faults import Fault
from tests.promises.operation import ASKS, History, Operation

LATE_SECONDS = 14.0
"""Age at which a waiting request is suspicious: pauses last 6 s, leases 3 s, and a host is replaced within some seconds."""
LATE_LOOKED_FOR_EVERY = 0.5
MOST = 12
"""Maximum number of requests whose evidence is written."""
LEFT_OUT = ("k:", "kc:", "P:", "R:", "z", "o", "u", "w")
"""Prefixes of keys that don't show what is waiting: kept outcomes, large values, dead letters, limits."""


class Witness:
    """Watches the requests of a history, and writes `files` into a folder."""

    def __init__(self, made: Fleet, history: History, folder: Path) -> None:
        self.files: list[Path] = []
        self._made, self._history, self._folder = made, history, folder
        self._seen = 0
        self._open: list[Operation] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LATE_LOOKED_FOR_EVERY)
            for operation in self._late(time.monotonic()):
                if len(self.files) < MOST:
                    path = self._folder / f"chaos-late-{operation.number}.json"
                    self.files.append(path)
                    await asyncio.to_thread(self._write, operation, path)

    def _late(self, now: float) -> list[Operation]:
        """Return the requests that have become late since the last look."""
        operations = self._history.operations
        self._open += [operation for operation in operations[self._seen :] if operation.kind in ASKS]
        self._seen = len(operations)
        unanswered = [operation for operation in self._open if operation.returned is None]
        under_way = [operation for operation in unanswered if operation.lost in ("", "never sent")]
        late = [operation for operation in under_way if not operation.lost and now - operation.called > LATE_SECONDS]
        self._open = [operation for operation in under_way if operation not in late]
        return late

    def _write(self, operation: Operation, path: Path) -> None:
        evidence: dict[str, Any] = {"at": time.monotonic(), "operation": str(operation), "texts": operation.texts}
        if self._made.store is not None:
            try:
                with self._made.redis.client() as client:
                    evidence["redis"] = _told_by_redis(client, [text.encode() for text in operation.texts])
            except redis.RedisError as exc:
                evidence["redis"] = repr(exc)
        evidence["processes"] = [_told_by(server, operation) for server in self._made.every()]
        evidence["faults"] = [(fault.what, fault.whom, fault.began, fault.ended) for fault in self._history.faults]
        path.write_text(json.dumps(evidence, indent=1, default=_shown))


def _told_by(server: Server, operation: Operation) -> dict[str, Any]:
    """Return what a process reports about itself and a request."""
    facts: dict[str, Any] = {"name": server.name, "pid": server.pid, "version": server.version}
    paths = ["/internal/health", "/internal/workers"]
    if operation.id:
        paths.append(f"/internal/requests/req_{operation.id}?tenant={operation.tenant}")
    for path in paths:
        try:
            facts[path] = server.ask(path)
        except urllib.error.HTTPError as exc:
            facts[path] = exc.code
        except (OSError, msgspec.DecodeError) as exc:
            facts[path] = repr(exc)
    return facts


TOLD = 2_000
"""Maximum characters of a key's content to write."""
READ: Mapping[bytes, Callable[[Any, bytes], object]] = {
    b"string": lambda client, key: client.get(key),
    b"hash": lambda client, key: client.hgetall(key),
    b"zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
    b"list": lambda client, key: client.lrange(key, 0, -1),
    b"set": lambda client, key: client.smembers(key),
    b"stream": lambda client, key: client.xrevrange(key, count=5),
    b"none": lambda client, key: None,
}


def _told_by_redis(client: Any, texts: list[bytes]) -> dict[str, Any]:
    """Return the contents of the queues, and the entries of these inputs."""
    facts: dict[str, Any] = {"time": client.time(), "clients": client.client_list(), "queues": {}, "entries": []}
    for key in sorted(client.scan_iter(match=f"{PREFIX}:*", count=1000)):
        tag, _, rest = key.partition(b"}")
        queue, _, name = rest.partition(b":")
        if not name.decode(errors="replace").startswith(LEFT_OUT):
            about = facts["queues"].setdefault(_shown(tag + b"}" + queue), {})
            with contextlib.suppress(redis.ResponseError):
                about[_shown(name)] = repr(READ[client.type(key)](client, key))[:TOLD]
        if name == b"p":
            for entry, payload in client.hgetall(key).items():
                if any(text in payload for text in texts):
                    header = client.hget(key[:-1] + b"e", entry)
                    facts["entries"].append({"queue": key, "entry": entry, "header": header, "payload": payload[:200]})
    return facts


def _shown(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else repr(value)


# Stalls.

STALLS_LOOKED_FOR_EVERY = 0.2
STALLED = 1.0
"""Seconds without an answer that count as a stall."""


@contextlib.contextmanager
def stalls_noted(store: Redis | None, faults: list[Fault]) -> Iterator[None]:
    """While the context lasts, record a pause whenever Redis doesn't answer a write from another connection."""
    over = threading.Event()
    thread = threading.Thread(target=_watch_stalls, args=(store, faults, over))
    if store is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if store is not None:
            thread.join()


def _watch_stalls(store: Redis, faults: list[Fault], over: threading.Event) -> None:
    began = time.monotonic()
    while not over.wait(STALLS_LOOKED_FOR_EVERY):
        answered = _answers_writes(store)
        now = time.monotonic()
        if answered:
            staged = any(fault.what.startswith("redis") and (fault.ended or now) >= began for fault in faults)
            if now - began > STALLED and not staged:
                faults.append(Fault("redis paused", began, now, "redis"))
            began = now


def _answers_writes(store: Redis) -> bool:
    try:
        with store.client() as client:
            return bool(client.set("stalls", "", px=1000))
    except redis.RedisError:
        return False


# The registry.

REGISTRY_LOOKED_AT_EVERY = 0.5


class RegistryWatch:
    """Watches the registry of a fleet or a service, and records `sightings`."""

    def __init__(self, made: Fleet, sightings: list[Sighting]) -> None:
        self._made, self._sightings = made, sightings

    async def run(self) -> None:
        while True:
            await asyncio.sleep(REGISTRY_LOOKED_AT_EVERY)
            for door in self._made.doors:
                at = time.monotonic()
                workers = await asyncio.to_thread(listed, door)
                if workers:
                    self._sightings.append(Sighting(at, [slot for worker in workers if (slot := self._slot(worker))]))
                    break

    def _slot(self, line: dict[str, Any]) -> Slot | None:
        """Return the slot of a registry line, or None if it isn't healthy, or its host is gone."""
        name, host = line["worker_id"], host_of(self._made, line)
        if line["status"] != "healthy" or host is None:
            return None
        place = f"{host.name}/{line['gpu']}" if line.get("gpu") else name
        model = "" if line["model"] == MODEL else line["model"]
        return Slot(place, host.name, line["pid"], model, host.version)


def host_of(made: Fleet, line: dict[str, Any]) -> Server | None:
    """Return the process that runs the worker of a registry line, or None if it is gone."""
    pid = line["worker_id"].partition("/")[0].rpartition("-")[2]  # A fleet's workers have such names, not a service's.
    return next((host for host in made.hosts if str(host.pid) == pid or made.services), None)


def listed(door: Server) -> list[dict[str, Any]]:
    """Return the workers that a gateway lists, or none if it doesn't answer."""
    try:
        workers: list[dict[str, Any]] = door.ask("/internal/workers", REGISTRY_LOOKED_AT_EVERY)["workers"]
    except (OSError, urllib.error.HTTPError, msgspec.DecodeError):
        return []
    return workers

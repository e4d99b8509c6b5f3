"""A fleet under test: its own Redis, gateways, worker hosts and controllers, each a replaceable process.

Or one service with its broker in memory, with the same interface. All share the servers' core. Redis is the distribution's, because a build with
another malloc gives other results.
"""

import contextlib
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import redis

from bench.stand import processes, stand
from bench.stand.processes import Process
from bench.stand.stand import Broken, Server

SCRIPTS = frozenset({"fcall", "fcall_ro", "eval", "evalsha"})
READS = frozenset({"xread", "blpop", "brpop", "blmpop", "bzpopmin", "bzmpop", "blmove"})
"""Blocking reads."""
MOST_LOGGED = 1_000_000
"""Length of the slow log while commands are timed."""
PREFIX = "headway"
MODEL = "default"
"""The model of requests that don't name one."""
KINDS = {
    b"l": "waiting",
    b"a": "waiting",
    b"d": "waiting",
    b"x": "leased",
    b"y": "leased",
    b"s": "suspect",
    b"p": "payloads",
    b"u": "bulk",
    b"ua": "bulk",
    b"ut": "bulk",
}
"""Keys of a queue that are empty when it is idle."""


class Redis:
    """A redis-server, used as a context manager. `keep` is `no`, or how often the append-only file is synced: `everysec` or `always`."""

    def __init__(self, name: str, keep: str = "no") -> None:
        self._name = name
        self.keep = keep
        self._port = stand.free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="headway-bench-redis-")
        self._settings = {
            "bind": "127.0.0.1", "port": self._port, "dir": self._folder.name, "save": "", "loglevel": "warning",
            "maxmemory-policy": "noeviction", "appendonly": "no" if keep == "no" else "yes",
            "appendfsync": "no" if keep == "no" else keep,
        }  # fmt: skip
        self._server: Server | None = None
        self.url = f"redis://127.0.0.1:{self._port}/0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.stop()
        self._folder.cleanup()

    @property
    def server(self) -> Server:
        """Its process, the last one if it was killed."""
        if self._server is None:
            raise Broken(f"{self._name} was never started")
        return self._server

    def start(self) -> None:
        """Start it with its saved data, and wait until it answers."""
        if shutil.which("redis-server") is None:
            raise Broken("redis-server is not installed. On Debian and Ubuntu: apt-get install redis-server")
        command = ["redis-server"]
        for key, value in self._settings.items():
            command += [f"--{key}", str(value)]
        self._server = Server(self._name, command, lambda _: "redis")
        self._server.wait_for(self.answers)

    def answers(self) -> bool:
        with self.client() as client, contextlib.suppress(redis.RedisError):
            return bool(client.ping())
        return False

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5.0, socket_connect_timeout=5.0, decode_responses=False)

    def operations(self) -> dict[str, float]:
        """Return its operation counts since it started.

        `scripts` are calls of scripts and functions, `reads` blocking reads that returned, `inside` other commands, nearly all of which run inside
        scripts, `arrivals` reads from sockets, each of which may bring several commands, and `script_us` microseconds inside scripts by its clock.
        """
        with self.client() as client:
            stats: dict[str, Any] = client.info("commandstats")
            arrivals = int(client.info("stats")["total_reads_processed"])
        calls = Counter[str]()
        for name, stat in stats.items():
            calls[name.removeprefix("cmdstat_").partition("|")[0]] += int(stat["calls"])
        scripts, reads = (sum(calls[name] for name in names) for names in (SCRIPTS, READS))
        script_us = sum(float(stats[f"cmdstat_{name}"]["usec"]) for name in SCRIPTS if f"cmdstat_{name}" in stats)
        inside = calls.total() - scripts - reads
        return {"scripts": scripts, "reads": reads, "inside": inside, "arrivals": arrivals, "script_us": script_us}

    @contextlib.contextmanager
    def stepping(self) -> Iterator[dict[str, list[int]]]:
        """Log every command while the context lasts. Then the dict has the microseconds of each call, by command or function."""
        took: dict[str, list[int]] = {}
        with self.client() as client:
            client.config_set("slowlog-max-len", MOST_LOGGED)
            client.config_set("slowlog-log-slower-than", 0)
            client.slowlog_reset()
            yield took
            client.config_set("slowlog-log-slower-than", -1)
            for entry in client.slowlog_get(MOST_LOGGED):
                words = entry["command"].split(b" ")
                name = (words[1].rpartition(b"_")[2] if words[0] == b"FCALL" else words[0]).decode()
                took.setdefault(name, []).append(entry["duration"])
            client.slowlog_reset()

    def remains(self) -> dict[str, int]:
        """Return how many entries it holds, by kind. Answers that no gateway fetched don't count: they expire."""
        counts: dict[str, int] = {}
        with self.client() as client:
            for key in client.scan_iter(match=f"{PREFIX}:*"):
                kind = KINDS.get(key.partition(b"}")[2].partition(b":")[2].rstrip(b"0123456789"))
                if kind is not None:
                    count = client.zcard(key) if client.type(key) == b"zset" else client.hlen(key)
                    counts[kind] = counts.get(kind, 0) + int(count)
        return counts

    def endless_values(self) -> int:
        with self.client() as client:
            keys = [key for kind in ("P", "R", "zp") for key in client.scan_iter(match=f"{PREFIX}:*}}:{kind}:*")]
            return sum(client.ttl(key) == -1 for key in keys)


@dataclass(slots=True)
class Fleet:
    """The processes of a fleet, which `fleet` and `lone_service` start.

    Attributes:
        store: Redis, or None for one service with its broker in memory.
        environment: variables of its workers.
        others: targets by name of additional models, which some worker hosts run on the same GPUs.
        gateways, workers, controllers, services: processes that run, or ran until they were ended.
        ever: all processes that were started.
    """

    store: Redis | None
    target: str
    name: str
    flags: Sequence[str] = ()
    gateway_flags: Sequence[str] = ()
    worker_flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    grpc: bool = False
    controller_flags: Sequence[str] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    gateways: list[Server] = field(default_factory=list)
    workers: list[Server] = field(default_factory=list)
    controllers: list[Server] = field(default_factory=list)
    services: list[Server] = field(default_factory=list)
    ever: list[Server] = field(default_factory=list)

    @property
    def redis(self) -> Redis:
        if self.store is None:
            raise Broken(f"{self.name} has no Redis")
        return self.store

    @property
    def rosters(self) -> dict[str, list[Server]]:
        return {
            "gateway": self.gateways, "worker": self.workers, "controller": self.controllers, "service": self.services
        }  # fmt: skip

    @property
    def doors(self) -> list[Server]:
        """Processes that take requests."""
        return [*self.gateways, *self.services]

    @property
    def hosts(self) -> list[Server]:
        """Processes that have GPU processes."""
        return [*self.workers, *self.services]

    @property
    def url(self) -> str:
        return self.gateways[0].url

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    def every(self) -> list[Server]:
        """Return all Headway processes."""
        return [*self.gateways, *self.services, *self.workers, *self.controllers]

    def start(self, role: str, version: str = "", models: Sequence[str] = (), flags: Sequence[str] = ()) -> Server:
        """Start one more process of a role. The caller adds it to the list of its role, and waits until it is up."""
        name = f"{self.name}-{role}-{len(self.ever) + 1}"
        takes, runs = role in ("gateway", "service"), role in ("worker", "service")
        command = [sys.executable, "-m", "headway", "serve" if role == "service" else role]
        if models:
            held = {MODEL: self.target, **{model: self.others[model] for model in models}}
            command += [f"{name}={target}" for name, target in held.items()]
            command += ["--models-per-gpu", str(len(models)), "--default-model", MODEL]
        elif runs:
            command.append(self.target)
        command += ["--broker", self.store.url] if self.store is not None else []
        command += ["--admin-port", "0", "--log-level", "warning", *self.flags]
        command += ["--port", "0", *self.gateway_flags] if takes else []
        command += self.worker_flags if runs else []
        command += self.controller_flags if role == "controller" else []
        environment = {**self.environment, "PROMISES_HOST": name} if runs else {}
        if version:
            command += ["--model-version", version]
            environment["MODEL_VERSION"] = version
        port = stand.free_port() if self.grpc and takes else 0
        command += ["--grpc-port", str(port)] if port else []
        command += flags
        server = Server(name, command, _role_of(role), environment)
        server.grpc_port, server.version, server.models = port, version, tuple(models)
        self.ever.append(server)
        return server

    def usage(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for server in (*self.every(), *([self.store.server] if self.store is not None else [])):
            for role, used in server.usage().items():
                seconds[role] = seconds.get(role, 0.0) + used
        return seconds

    def total(self, name: str, **labels: str) -> float:
        return sum(worker.total(name, **labels) for worker in self.workers)

    def stop(self) -> None:
        """End all processes, starting with those that take requests."""
        for server in self.every():
            server.stop()


def wait_until_up(role: str, server: Server) -> Server:
    """Return `server` once it serves."""
    server.wait_for_banner("Try it:" if role in ("gateway", "service") else "Ready.")
    return server


def gpu_pids(worker: Server) -> list[int]:
    return [process.pid for process in processes.family(worker.pid) if stand.GPU_CHILD in process.command]


@contextlib.contextmanager
def fleet(
    target: str,
    *flags: str,
    name: str,
    gateways: int = 1,
    workers: int = 1,
    controllers: int = 1,
    keep: str = "no",
    gateway_flags: Sequence[str] = (),
    worker_flags: Sequence[str] = (),
    controller_flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    grpc: bool = False,
    versions: Sequence[str] = (),
    others: Mapping[str, str] | None = None,
    sharing: int = 0,
) -> Iterator[Fleet]:
    """Run a whole fleet while the context lasts.

    `versions` of the model are assigned to the worker hosts in turn. `sharing` more hosts have all models, including `others`, on one GPU that has
    room for all but one of them.
    """
    with Redis(f"{name}-redis", keep) as server:
        by_role = (gateway_flags, worker_flags)
        made = Fleet(server, target, name, flags, *by_role, environment or {}, grpc, controller_flags, others or {})
        try:
            named = versions or ("",)
            made.controllers += [made.start("controller") for _ in range(controllers)]
            made.workers += [made.start("worker", named[number % len(named)]) for number in range(workers)]
            for number in range(sharing):
                made.workers.append(made.start("worker", named[number % len(named)], tuple(made.others)))
            made.gateways += [made.start("gateway") for _ in range(gateways)]
            for role, servers in made.rosters.items():
                for started in servers:
                    wait_until_up(role, started)
            yield made
        finally:
            made.stop()


@contextlib.contextmanager
def lone_service(
    target: str,
    *flags: str,
    name: str,
    environment: Mapping[str, str] | None = None,
    grpc: bool = False,
    version: str = "",
    others: Mapping[str, str] | None = None,
) -> Iterator[Fleet]:
    """Run one service with its broker in memory while the context lasts. Its GPUs share all models."""
    made = Fleet(None, target, name, flags, environment=environment or {}, grpc=grpc, others=others or {})
    try:
        made.services.append(made.start("service", version=version, models=tuple(made.others)))
        wait_until_up("service", made.services[0])
        yield made
    finally:
        made.stop()


def emulated(batch_ms: float, max_batch: int, *flags: str, hosts: int, gpus: int, name: str, **more: Any) -> Any:
    return fleet(
        stand.EMULATED_GPU,
        *("--max-batch-size", str(max_batch), *flags),
        name=name,
        workers=hosts,
        worker_flags=("--workers", str(gpus)),
        environment={"EMULATED_MS": str(batch_ms), "EMULATED_MAX": str(max_batch)},
        **more,
    )


def _role_of(role: str) -> Any:
    def role_of(process: Process) -> str:
        return "gpu" if stand.GPU_CHILD in process.command else role

    return role_of

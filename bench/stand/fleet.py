"""A fleet under test: a Redis of its own, gateways, worker hosts and controllers, each a process that can be replaced. Or one
service with its broker in memory, in the same shape.

All of them share the core of servers, as everything does that is measured. Redis is the distribution's `redis-server`:
a build with another malloc gives other figures. It listens on 127.0.0.1, keeps what it keeps in a folder of the fleet's
own, and can be killed and started again at the same port.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import redis

from bench.stand import processes, stand
from bench.stand.processes import Process
from bench.stand.stand import Broken, Server

SCRIPTS = frozenset({"fcall", "fcall_ro", "eval", "evalsha"})
"""Commands by which clients run what is atomic."""
READS = frozenset({"xread", "blpop", "brpop", "blmpop", "bzpopmin", "bzmpop", "blmove"})
"""Commands by which clients wait."""
MOST_LOGGED = 1_000_000
"""Commands that its log is to hold."""
PREFIX = "headway"
"""What keys begin with."""
MODEL = "default"
"""Name of the model that is meant by those who name none."""
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
"""Keys of a queue that are empty when it has nothing to do: lanes, departures, leases, suspects, payloads, bulk entries."""


@dataclass(frozen=True, slots=True)
class Operations:
    """What Redis was asked to do; the difference of two is what came between.

    Attributes:
        scripts: calls of scripts and functions.
        reads: blocking reads that returned.
        inside: all other commands, which scripts run inside the server, but for a few of upkeep.
        arrivals: times that Redis read from a socket: what came in one go counts once.
        by_command: calls of each command.
        script_us: microseconds inside scripts, by Redis's own clock.
    """

    scripts: int
    reads: int
    inside: int
    arrivals: int
    script_us: float
    by_command: Mapping[str, int]

    def __sub__(self, before: Operations) -> Operations:
        return Operations(
            self.scripts - before.scripts,
            self.reads - before.reads,
            self.inside - before.inside,
            self.arrivals - before.arrivals,
            self.script_us - before.script_us,
            {name: more for name, calls in self.by_command.items() if (more := calls - before.by_command.get(name, 0))},
        )


class Redis:
    """A redis-server. Use it as a context manager.

    Arguments:
        name: for messages and the file its output goes to.
        keep: `no`, or how often the append-only file is brought to disk: `everysec` or `always`.

    Attributes:
        keep: see above.
        url: where Headway finds it.
    """

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
        """The process that runs, or ran last."""
        if self._server is None:
            raise Broken(f"{self._name} was never started")
        return self._server

    def start(self) -> None:
        """Start it, with what it kept; returns when it answers.

        Raises:
            Broken: it is not installed, or does not come up.
        """
        if shutil.which("redis-server") is None:
            raise Broken("redis-server is not installed. On Debian and Ubuntu: apt-get install redis-server")
        command = ["redis-server"]
        for key, value in self._settings.items():
            command += [f"--{key}", str(value)]
        self._server = Server(self._name, command, lambda _: "redis")
        self._server.wait_for(self.answers)

    def answers(self) -> bool:
        """Whether it is up, with all that it kept loaded."""
        with self.client() as client, contextlib.suppress(redis.RedisError):
            return bool(client.ping())
        return False

    def client(self) -> redis.Redis:
        """A client for looking at it."""
        return redis.Redis.from_url(self.url, socket_timeout=5.0, socket_connect_timeout=5.0, decode_responses=False)

    def operations(self) -> Operations:
        """What it was asked to do since it started."""
        with self.client() as client:
            stats: dict[str, Any] = client.info("commandstats")
            arrivals = int(client.info("stats")["total_reads_processed"])
        calls = {name.removeprefix("cmdstat_").partition("|")[0]: 0 for name in stats}
        for name, one in stats.items():
            calls[name.removeprefix("cmdstat_").partition("|")[0]] += int(one["calls"])
        scripts, reads = (sum(calls.get(name, 0) for name in names) for names in (SCRIPTS, READS))
        script_us = sum(float(stats[f"cmdstat_{name}"]["usec"]) for name in SCRIPTS if f"cmdstat_{name}" in stats)
        return Operations(scripts, reads, sum(calls.values()) - scripts - reads, arrivals, script_us, calls)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[dict[str, list[int]]]:
        """Have it log every command while the context lasts; then the dict has, by command or function, the microseconds
        that each call took by its own clock. Logging makes each a little slower."""
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
        """What it holds of entries by kind: `waiting`, `leased`, `suspect`, `payloads` and `bulk`; kinds it has none of are left
        out. Answers that a gateway did not come back for are no matter: they end by themselves."""
        found: dict[str, int] = {}
        with self.client() as client:
            for key in client.scan_iter(match=f"{PREFIX}:*"):
                kind = KINDS.get(key.partition(b"}")[2].partition(b":")[2].rstrip(b"0123456789"))
                if kind is not None:
                    count = client.zcard(key) if client.type(key) == b"zset" else client.hlen(key)
                    found[kind] = found.get(kind, 0) + int(count)
        return found

    def endless_values(self) -> int:
        """How many large values it holds that would stay for ever."""
        with self.client() as client:
            keys = [key for kind in ("P", "R", "zp") for key in client.scan_iter(match=f"{PREFIX}:*}}:{kind}:*")]
            return sum(client.ttl(key) == -1 for key in keys)


@dataclass(slots=True)
class Fleet:
    """The processes of a fleet. Use `fleet` to start one.

    Attributes:
        store: what they share; None: nothing, as there is one service with its broker in memory.
        target: what the workers serve.
        name: what the names of its processes begin with.
        flags: of every role.
        gateway_flags, worker_flags, controller_flags: of those roles alone.
        environment: variables of its workers; MODEL_VERSION is that of the model, where one is named.
        grpc: whether gateways have a port for gRPC, too.
        others: targets of further models by name, which some worker hosts run, too, on the same GPUs.
        gateways, workers, controllers: that run, or ran until somebody ended them.
        services: the same of whole services.
        ever: all that were ever started.
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
        """What they share, where they share it."""
        if self.store is None:
            raise Broken(f"{self.name} has no Redis")
        return self.store

    @property
    def rosters(self) -> dict[str, list[Server]]:
        """Processes by role."""
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
        """Of the first gateway."""
        return self.gateways[0].url

    @property
    def urls(self) -> list[str]:
        """Of all gateways."""
        return [gateway.url for gateway in self.gateways]

    def every(self) -> list[Server]:
        """All processes of Headway."""
        return [*self.gateways, *self.services, *self.workers, *self.controllers]

    def start(self, role: str, version: str = "", models: Sequence[str] = (), flags: Sequence[str] = ()) -> Server:
        """One more `gateway`, `worker`, `controller` or `service`; returns before it is up.

        It is of a version if that is named, and runs further models if there are any. `flags` are its own.

        Its place among its kind is the caller's to give: a fleet that is being shot at has its own order.
        """
        name = f"{self.name}-{role}-{len(self.ever) + 1}"
        takes, runs = role in ("gateway", "service"), role in ("worker", "service")
        command = [sys.executable, "-m", stand.module, "serve" if role == "service" else role]
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
        """CPU seconds so far by role: `gateway`, `worker`, `gpu`, `controller` and `redis`."""
        seconds: dict[str, float] = {}
        for server in (*self.every(), *([self.store.server] if self.store is not None else [])):
            for role, used in server.usage().items():
                seconds[role] = seconds.get(role, 0.0) + used
        return seconds

    def total(self, name: str, **labels: str) -> float:
        """Sum of a metric over all worker hosts."""
        return sum(worker.total(name, **labels) for worker in self.workers)

    def stop(self) -> None:
        """End all of it: what takes requests first."""
        for server in self.every():
            server.stop()


def wait_until_up(role: str, server: Server) -> Server:
    """Return `server`, which was started as `role`, when it serves.

    Raises:
        Broken: it does not come up.
    """
    server.wait_for_banner("Try it:" if role in ("gateway", "service") else "Ready.")
    return server


def gpu_pids(worker: Server) -> list[int]:
    """Process ids of the GPU processes of a worker host."""
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
    """A whole fleet, up and ready, until the context ends.

    Arguments:
        target: what it serves.
        flags: of every role.
        name: what the names of its processes begin with.
        gateways: how many of them.
        workers: how many worker hosts.
        controllers: how many of them.
        keep: what Redis keeps on disk; see `Redis`.
        gateway_flags: of gateways alone.
        worker_flags: of worker hosts alone.
        controller_flags: of controllers alone.
        environment: variables of its workers.
        grpc: whether gateways have a port for gRPC, too.
        versions: versions of the model that the worker hosts run, in turn.
        others: targets of further models by name.
        sharing: number of worker hosts beside those, each with all models on one GPU, which holds all but one of them loaded.

    Raises:
        Broken: something does not come up.
    """
    with Redis(f"{name}-redis", keep) as server:
        made = Fleet(
            server,
            target,
            name,
            flags,
            gateway_flags,
            worker_flags,
            environment or {},
            grpc,
            controller_flags,
            others or {},
        )
        try:
            named = versions or ("",)
            made.controllers += [made.start("controller") for _ in range(controllers)]
            made.workers += [made.start("worker", named[number % len(named)]) for number in range(workers)]
            for number in range(sharing):
                made.workers.append(made.start("worker", named[number % len(named)], tuple(made.others)))
            made.gateways += [made.start("gateway") for _ in range(gateways)]
            for role, servers in (
                ("controller", made.controllers), ("worker", made.workers), ("gateway", made.gateways),
            ):  # fmt: skip
                for one in servers:
                    wait_until_up(role, one)
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
    """One service with its broker in memory, up and ready, until the context ends; see `fleet`. Its GPUs share all models."""
    made = Fleet(None, target, name, flags, environment=environment or {}, grpc=grpc, others=others or {})
    try:
        made.services.append(made.start("service", version=version, models=tuple(made.others)))
        wait_until_up("service", made.services[0])
        yield made
    finally:
        made.stop()


def emulated(batch_ms: float, max_batch: int, *flags: str, hosts: int, gpus: int, name: str, **more: Any) -> Any:
    """A `fleet` of `hosts` worker hosts, each with `gpus` GPUs made of sleep.

    Arguments:
        batch_ms: run time of a batch.
        max_batch: most inputs in one.
        flags: further flags of every role.
        hosts: how many worker hosts.
        gpus: how many GPUs on each.
        name: what the names of its processes begin with.
        more: passed on to `fleet`.
    """
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

"""What clients see behind Envoy, HAProxy and nginx, one at a time, each with its file of `deploy/`, over TLS.

    python bench/promises/proxied.py                          all of it behind each: half an hour a proxy
    python bench/promises/proxied.py --proxy nginx --only rolling --seconds 60
    python bench/promises/proxied.py --only troubles --troubles redis-stalled gateway-killed --proxy haproxy

rolling    300 requests/s, half of them over HTTP/1.1, a third over gRPC, the rest over HTTP/2, while gateways and worker hosts are restarted one
           after the other, again and again
slow       clients that send a byte at a time, and requests and polls that take 30 s, beside 100 requests/s
troubles   one after the other of TROUBLES, each in a fleet of its own: two gateways, two worker hosts with a GPU made of sleep each, two
           controllers, and Redis, alone, under Sentinels or as a cluster. 100 requests/s, and after two seconds the trouble. `recovery` is the
           seconds from its beginning to the end of the last request that failed or took over a second

Of idle connections that end, tests/e2e/test_proxies.py asks; of planned failovers, tests/e2e/failover_drill.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, Self

import aiohttp

from bench.promises.callers import Callers, GrpcCallers, History
from bench.promises.crowd import loop_factory
from bench.stand import fleet, proxies, stand
from bench.stand.findings import Findings
from bench.stand.fleet import Fleet
from bench.stand.proxies import KINDS, Behind
from bench.stand.stand import Broken, Server
from tests.clients.environments import client_command
from tests.servers.balancers import Balancer
from tests.servers.cluster import ClusterSetup
from tests.servers.ports import LOOPBACK, Port
from tests.servers.redis import RedisServer
from tests.servers.sentinel import SentinelSetup

BATCH_MS, MAX_BATCH = 50.0, 32
LAME_DUCK_MS = 5000
RATES = {"http/1.1": 150.0, "grpc": 100.0, "http/2": 50.0}
"""Requests per second of `rolling`."""
WAIT = 30.0
"""Seconds of a long request, and of a long poll."""
TARGET = f"{stand.TARGETS}:Waiting"
LONG = ("--queue-timeout-ms", "60000", "--request-timeout-ms", "60000", "--task-timeout-ms", "60000")
PATIENT = ("--gpu-timeout-ms", "40000", "--broker-timeout-ms", "20000")
LAME_DUCK = ("--lame-duck-ms", str(LAME_DUCK_MS))
BEFORE, AFTER = 2.0, 4.0
"""Seconds of load before a trouble, and after it."""
LATE = 1.0
"""Seconds after which an answer counts as late."""

Row = dict[str, object]


def main() -> int:
    options = _options()
    stand.end_in_order()
    stand.pin_to_load_core()
    findings = Findings(
        "proxied", rates=RATES, seconds=options.seconds, batch_ms=BATCH_MS, max_batch=MAX_BATCH, lame_duck_ms=LAME_DUCK_MS,
        pinning=stand.PINNING,
    )  # fmt: skip
    rows: dict[str, list[Row]] = {name: [] for name in options.only}
    for kind in options.proxy:
        for name in options.only:
            findings.say(f"{name} behind {kind} …")
            try:
                measured = PARTS[name](kind, options, findings)
            except (Broken, OSError) as exc:
                measured = [{"behind": kind, "seen": f"could not run: {exc}"[:120]}]
            for row in measured:
                findings.say(f"  {row}")
            rows[name] += measured
    for name, measured in rows.items():
        findings.table(name, measured)
    return findings.close()


# Gateways and workers come and go.


def rolling(kind: str, options: argparse.Namespace, findings: Findings) -> list[Row]:
    """Restart all that serves, under load, for `options.seconds`."""
    restarts: Counter[str] = Counter()

    async def work(scene: Scene, front: Balancer) -> dict[str, History]:
        loop = asyncio.get_running_loop()
        authority = front.certificates.trusted.read_bytes()
        loads: dict[str, Callers | GrpcCallers] = {
            "http/1.1": Callers(front.url, RATES["http/1.1"], 0, front.certificates.context("http/1.1")),
            "grpc": GrpcCallers(f"127.0.0.1:{front.port}", authority, RATES["grpc"], 1),
        }
        running = [loop.create_task(load.run()) for load in loads.values()]
        until = loop.time() + options.seconds
        while loop.time() < until:
            for role in ("gateway", "worker"):
                for place in range(2):
                    if loop.time() < until:
                        await scene.end(role, place)
                        await scene.start(role, place)
                        restarts[role] += 1
        for load in loads.values():
            load.end_load()
        return dict(zip(loads, await asyncio.gather(*running), strict=True))

    with ExitStack() as stack:
        scene, front = _scene(stack, kind, LAME_DUCK)
        over_http_2 = _http_2(front)
        stack.callback(over_http_2.kill)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            histories = runner.run(work(scene, front))
        outcomes = json.loads(over_http_2.communicate(timeout=60)[0].splitlines()[-1])
    rows = [_row(kind, name, history) for name, history in histories.items()]
    requests, failed = sum(outcomes.values()), sum(outcomes.values()) - outcomes.get("ok", 0)
    rows.append({"behind": kind, "over": "http/2", "requests": requests, "failed": failed, "seen": _seen(outcomes)})
    for row in rows:
        row["restarts"] = ", ".join(f"{count} {role}s" for role, count in restarts.items())
        findings.none(f"rolling restart behind {kind}, {row['over']}: failed", int(str(row["failed"])))
    return rows


def _http_2(front: Balancer) -> subprocess.Popen[str]:
    """Clients over HTTP/2, which end with their input."""
    arguments = (front.url, str(front.certificates.trusted), f"{RATES['http/2']:g}")
    command, environ = client_command("deploy", "http2_program.py", *arguments)
    pipe = subprocess.PIPE
    process = subprocess.Popen(stand.on_load_core(command), env=environ, stdin=pipe, stdout=pipe, text=True)
    if process.stdout is None or process.stdout.readline() != "up\n":
        raise Broken("the clients over HTTP/2 did not get a first answer")
    return process


# Clients that take their time, and requests that do.


def slow(kind: str, options: argparse.Namespace, findings: Findings) -> list[Row]:
    """Slow clients, long requests and long polls beside a load."""

    async def work(front: Balancer) -> dict[str, Counter[str]]:
        trust = front.certificates.context("http/1.1")
        callers = Callers(front.url, 100.0, 0, trust)
        load = asyncio.create_task(callers.run())
        await asyncio.sleep(2.0)
        connections = aiohttp.TCPConnector(limit=0, ssl=trust)
        patience = aiohttp.ClientTimeout(120)
        async with aiohttp.ClientSession(front.url, connector=connections, timeout=patience) as client:
            asked = {
                name: asyncio.gather(*(_outcome(ask(client)) for _ in range(count)))
                for name, (count, ask) in SLOW.items()
            }
            outcomes = {name: Counter(await answers) for name, answers in asked.items()}
        callers.end_load()
        outcomes["100 requests/s beside them"] = (await load).outcomes
        return outcomes

    with ExitStack() as stack:
        _, front = _scene(stack, kind, LONG, PATIENT, workers=4)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            outcomes = runner.run(work(front))
    rows: list[Row] = []
    for name, seen in outcomes.items():
        failed = seen.total() - seen["ok"]
        findings.none(f"slow clients behind {kind}, {name}: failed", failed)
        rows.append({"behind": kind, "what": name, "requests": seen.total(), "failed": failed, "seen": _seen(seen)})
    return rows


async def _outcome(asked: Awaitable[str]) -> str:
    try:
        return await asked
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        return repr(exc)[:80]


async def _output(expected: str, request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> str:
    async with request as answer:
        content = await answer.json(content_type=None)
    return "ok" if content.get("output") == expected else f"{answer.status} {content}"[:80]


async def _trickle(client: aiohttp.ClientSession) -> str:
    """Send a body a byte at a time, for 8 s."""
    text = "slowly " * 10
    body = json.dumps({"input": text}).encode()

    async def octets() -> AsyncIterator[bytes]:
        for at in range(len(body)):
            yield body[at : at + 1]
            await asyncio.sleep(8.0 / len(body))

    fields = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    return await _output(text.upper(), client.post(ROUTE, data=octets(), headers=fields))


async def _wait_long(client: aiohttp.ClientSession) -> str:
    text = f"wait {WAIT:g} long"
    return await _output(text.upper(), client.post(ROUTE, json={"input": text}))


async def _poll(client: aiohttp.ClientSession) -> str:
    """Wait for the end of a long task with one poll."""
    text = f"wait {WAIT:g} polled"
    async with client.post(ROUTE, json={"input": text}, headers={"Prefer": "respond-async"}) as accepted:
        task = (await accepted.json())["task_id"]
    return await _output(text.upper(), client.get(f"/v1/result/{task}?wait=60"))


ROUTE = "/v1/inference"
SLOW: dict[str, tuple[int, Callable[[aiohttp.ClientSession], Awaitable[str]]]] = {
    "a byte at a time, 8 s": (100, _trickle),
    f"answers after {WAIT:g} s": (8, _wait_long),
    f"polls of {WAIT:g} s": (8, _poll),
}
"""Number of clients of each kind, and what each does."""


# Troubles of a fleet.

Act = Callable[["Scene"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Trouble:
    """One trouble.

    Attributes:
        act: makes it, and returns when it is over.
        store: builds what the fleet shares, in a folder.
        failing: why clients may see errors, as the documents say; empty if they may not.
    """

    what: str
    act: Act
    store: Callable[[Path], AbstractContextManager[Store]] = lambda folder: RedisServer("redis", folder, durable=True)
    failing: str = ""
    flags: tuple[str, ...] = ()


def restarted(role: str) -> Act:
    async def act(scene: Scene) -> None:
        for place in range(2):
            await scene.end(role, place)
            await scene.start(role, place)

    return act


def killed(role: str) -> Act:
    async def act(scene: Scene) -> None:
        scene.of(role)[0].kill()
        await asyncio.sleep(2.0)
        await scene.start(role, 0)

    return act


def still(role: str, seconds: float = 6.0) -> Act:
    async def act(scene: Scene) -> None:
        pids = fleet.gpu_pids(scene.of("worker")[0]) if role == "gpu" else [scene.of(role)[0].pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for pid in pids if role != "gpu" else ():  # Its host has put another one in its place.
            os.kill(pid, signal.SIGCONT)

    return act


async def gpu_killed(scene: Scene) -> None:
    for pid in fleet.gpu_pids(scene.of("worker")[0]):
        os.kill(pid, signal.SIGKILL)


def redis_away(seconds: float, *, empty: bool = False) -> Act:
    async def act(scene: Scene) -> None:
        scene.redis.kill()
        if empty:
            shutil.rmtree(scene.redis.folder / "appendonlydir")
        await asyncio.sleep(seconds)
        await asyncio.to_thread(scene.redis.start)

    return act


def redis_stalled(seconds: float) -> Act:
    async def act(scene: Scene) -> None:
        scene.redis.pause()
        await asyncio.sleep(seconds)
        scene.redis.resume()

    return act


async def redis_flushed(scene: Scene) -> None:
    await asyncio.to_thread(scene.redis.command, "FLUSHALL")


async def redis_full(scene: Scene) -> None:
    await asyncio.to_thread(scene.redis.command, "CONFIG", "SET", "maxmemory", 1)
    await asyncio.sleep(3.0)
    await asyncio.to_thread(scene.redis.command, "CONFIG", "SET", "maxmemory", "2gb")


async def sentinel_killed(scene: Scene) -> None:
    assert isinstance(scene.store, SentinelSetup)
    scene.store.servers[0].kill()
    await asyncio.to_thread(scene.store.fail_over)
    await asyncio.sleep(12.0)


class Cluster(ClusterSetup):
    """A cluster that puts a replica in the place of a killed primary within seconds."""

    def __init__(self, folder: Path) -> None:
        super().__init__("redis", folder, durable=True, replicas=True)

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'{LOOPBACK}:{server.port}' for server in self.servers)}"

    def __enter__(self) -> Self:
        super().__enter__()
        for server in (*self.servers, *self.replicas):
            server.command("CONFIG", "SET", "cluster-node-timeout", 3000)
        return self


async def cluster_killed(scene: Scene) -> None:
    scene.redis.kill()
    await asyncio.sleep(10.0)


watched = partial(SentinelSetup, "redis", durable=True)
SHARDED = ("--shards", "4")
AWAY = "Redis is away for longer than --broker-timeout-ms: 503"
HELD = "what the process held at that instant"
TROUBLES = {
    "gateways-restarted": Trouble("gateways restarted one by one", restarted("gateway")),
    "workers-restarted": Trouble("worker hosts restarted one by one", restarted("worker")),
    "controllers-restarted": Trouble("controllers restarted one by one", restarted("controller")),
    "gateway-killed": Trouble("a gateway killed (SIGKILL), back after 2 s", killed("gateway"), failing=HELD),
    "worker-killed": Trouble("a worker host killed, back after 2 s", killed("worker")),
    "gpu-killed": Trouble("a GPU process killed", gpu_killed),
    "controller-killed": Trouble("a controller killed, back after 2 s", killed("controller")),
    "gateway-stopped": Trouble("a gateway stands still (SIGSTOP) for 6 s", still("gateway"), failing=HELD),
    "worker-stopped": Trouble("a worker host stands still for 6 s", still("worker")),
    "gpu-stopped": Trouble("a GPU process stands still", still("gpu", 4.0), failing=HELD),
    "controller-stopped": Trouble("a controller stands still for 6 s", still("controller")),
    "redis-blip": Trouble("Redis stalls for 0.3 s", redis_stalled(0.3)),
    "redis-stalled": Trouble("Redis stalls for 3 s", redis_stalled(3.0), failing=AWAY),
    "redis-restarted": Trouble("Redis killed, back after 0.3 s", redis_away(0.3)),
    "redis-killed": Trouble("Redis killed, back after 3 s", redis_away(3.0), failing=AWAY),
    "redis-emptied": Trouble("Redis killed, back empty after 0.3 s", redis_away(0.3, empty=True)),
    "redis-flushed": Trouble("all keys of Redis removed", redis_flushed),
    "redis-memory": Trouble("Redis out of memory for 3 s", redis_full, failing="429 memory"),
    "sentinel-killed": Trouble("primary killed under Sentinels", sentinel_killed, watched, AWAY),
    "cluster-killed": Trouble("a primary of a cluster killed", cluster_killed, Cluster, AWAY, SHARDED),
}


def troubles(kind: str, options: argparse.Namespace, findings: Findings) -> list[Row]:
    rows: list[Row] = []
    for name in options.troubles:
        trouble = TROUBLES[name]
        try:
            history, began = _befallen(trouble, kind)
        except (Broken, OSError, AssertionError, subprocess.CalledProcessError) as exc:
            rows.append({"trouble": trouble.what, "behind": kind, "seen": f"could not run: {exc}"[:120]})
            continue
        outcomes, wrong = history.outcomes, history.outcomes["wrong"]
        failed = len(history.requests) - outcomes["ok"] - wrong
        bad = [request for request in history.requests if request.outcome != "ok" or request.ended - request.due > LATE]
        ends = (request.ended - began for request in bad)
        rows.append({
            "trouble": trouble.what, "behind": kind, "requests": len(history.requests), "failed": failed, "wrong": wrong,
            "recovery, s": round(max(0.0, *ends, 0.0), 1), "slowest, s": round(max(history.latencies, default=0.0), 2),
            "seen": _seen(outcomes),
        })  # fmt: skip
        for example in history.examples[:3]:
            findings.say(f"  {example}")
        findings.none(f"{name} behind {kind}: wrong", wrong)
        if not trouble.failing:
            findings.none(f"{name} behind {kind}: failed", failed)
    return rows


def _befallen(trouble: Trouble, kind: str) -> tuple[History, float]:
    """What clients saw of a trouble, and when it began."""

    async def work(scene: Scene, front: Balancer) -> tuple[History, float]:
        await asyncio.sleep(2.0)  # The balancer notices.
        callers = Callers(front.url, 100.0, 0, front.certificates.context("http/1.1"))
        load = asyncio.create_task(callers.run())
        try:
            await asyncio.sleep(BEFORE)
            began = callers.loop.time()
            await trouble.act(scene)
            await asyncio.sleep(AFTER)
            callers.end_load()
            return await load, began
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="headway-bench-")))
        store = stack.enter_context(trouble.store(folder))
        scene, front = _scene(stack, kind, LAME_DUCK, controllers=2, flags=trouble.flags, store=store)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(work(scene, front))


# Fleets.


class Store(Protocol):
    @property
    def url(self) -> str: ...


class Scene:
    """A fleet whose gateways keep their ports, and its store, to be used as a context manager."""

    def __init__(
        self,
        store: Store,
        counts: dict[str, int],
        flags: Sequence[str],
        gateways: Sequence[str],
        workers: Sequence[str],
    ) -> None:
        self.store = store
        self._held = [(Port(), Port()) for _ in range(counts["gateway"])]
        self.ports = [Behind(*(port.number for port in pair)) for pair in self._held]
        environment = {"EMULATED_MS": str(BATCH_MS), "EMULATED_MAX": str(MAX_BATCH)}
        common = ("--broker", store.url, *flags)
        batch = ("--max-batch-size", str(MAX_BATCH))
        self._fleet = Fleet(None, TARGET, "proxied", common, gateways, (*batch, *workers), environment)
        self._counts = counts

    def __enter__(self) -> Scene:
        try:
            for role, count in self._counts.items():
                self.of(role).extend(self._started(role, place) for place in range(count))
            for role in self._counts:
                for place in range(len(self.of(role))):
                    self._up(role, place)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def redis(self) -> RedisServer:
        """The server, or the first one."""
        server = self.store.servers[0] if isinstance(self.store, SentinelSetup | Cluster) else self.store
        assert isinstance(server, RedisServer)
        return server

    def of(self, role: str) -> list[Server]:
        return self._fleet.rosters[role]

    async def end(self, role: str, place: int) -> None:
        """End a process; raise Broken if its exit code isn't 0."""
        server = self.of(role)[place]
        if code := await asyncio.to_thread(server.stop):
            raise Broken(f"{server.name} ended with exit code {code}:\n{server.output[-2000:]}")

    async def start(self, role: str, place: int) -> None:
        """Start a process anew; returns when it serves, and a gateway is ready."""
        self.of(role)[place] = self._started(role, place)
        await asyncio.to_thread(self._up, role, place)

    def close(self) -> None:
        for server in self._fleet.every():
            with contextlib.suppress(ProcessLookupError):
                if server.is_running:
                    os.kill(server.pid, signal.SIGCONT)
        self._fleet.stop()
        for pair in self._held:
            for port in pair:
                port.close()

    def _started(self, role: str, place: int) -> Server:
        if role != "gateway":
            return self._fleet.start(role)
        at = self.ports[place]
        return self._fleet.start(role, flags=("--port", str(at.http), "--grpc-port", str(at.grpc)))

    def _up(self, role: str, place: int) -> None:
        server = fleet.wait_until_up(role, self.of(role)[place])
        if role == "gateway":
            server.wait_for(lambda: _ready(self.ports[place].http))


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _scene(
    stack: ExitStack,
    kind: str,
    gateways: Sequence[str] = (),
    worker_flags: Sequence[str] = (),
    *,
    workers: int = 2,
    controllers: int = 1,
    flags: Sequence[str] = (),
    store: Store | None = None,
) -> tuple[Scene, Balancer]:
    """A fleet that is ready, and the proxy in front of it."""
    if store is None:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="headway-bench-")))
        store = stack.enter_context(RedisServer("redis", folder, durable=True))
    counts = {"controller": controllers, "worker": workers, "gateway": 2}
    if not proxies.program(kind):
        raise Broken(f"{kind} is not installed: {'make clients' if kind == 'envoy' else f'apt-get install {kind}'}")
    scene = stack.enter_context(Scene(store, counts, flags, gateways, worker_flags))
    folder = Path(stack.enter_context(TemporaryDirectory(prefix=f"headway-{kind}-")))
    return scene, stack.enter_context(Balancer(kind, folder, scene.ports, proxies.Certificates(folder)))


def _row(kind: str, over: str, history: History) -> Row:
    latencies = history.latencies
    outcomes = history.outcomes
    return {
        "behind": kind,
        "over": over,
        "requests": len(history.requests),
        "failed": len(history.requests) - outcomes["ok"],
        "p50, ms": round(1000 * latencies[len(latencies) // 2], 1),
        "p99, ms": round(1000 * latencies[int(len(latencies) * 0.99)], 1),
        "slowest, s": round(latencies[-1], 2),
        "seen": _seen(outcomes),
    }


def _seen(outcomes: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(outcomes).most_common() if name != "ok")


PARTS: dict[str, Callable[[str, argparse.Namespace, Findings], list[Row]]] = {
    "rolling": rolling,
    "slow": slow,
    "troubles": troubles,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What clients see behind each proxy, with its file of deploy/.")
    parser.add_argument("--proxy", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=180.0, help="of a rolling restart")
    parser.add_argument("--troubles", nargs="+", choices=TROUBLES, default=list(TROUBLES), metavar="TROUBLE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

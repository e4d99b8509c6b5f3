"""Drills behind real balancers: what befalls a fleet, one thing after the other, and what its clients see of it.

    python bench/promises/drills.py                                  all of them, behind each proxy: about an hour
    python bench/promises/drills.py --only gateways-rolling redis-stalled --proxy haproxy
    python bench/promises/drills.py --list

Each drill has a fleet of its own: two gateways, two worker hosts with a GPU made of sleep each, two controllers, a Redis
(or three under Sentinels, or a cluster of six), and the balancer in front, with its file of `deploy/`. Clients send
100 requests/s over TLS, open-loop, each with a text of its own. After two seconds the trouble comes.

failed     no answer, or an error
wrong      an answer to another text, or a second one
recovery   seconds from the beginning of the trouble to the end of the last request that failed or took over a second
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.promises.callers import Callers, History
from bench.promises.crew import Crew, Post
from bench.promises.crowd import loop_factory
from bench.stand import stand, stores
from bench.stand.findings import Findings
from bench.stand.proxies import KINDS, Behind, Proxy
from bench.stand.stand import Broken
from bench.stand.stores import Shared, Store, Watched

RATE = 100.0
BATCH_MS, MAX_BATCH = 50.0, 32
COUNTS = {"gateway": 2, "worker": 2, "controller": 2}
LAME_DUCK_MS = 5000
"""As the documents have it behind a balancer."""
BEFORE, AFTER = 2.0, 4.0
"""Seconds of load before the trouble begins, and after it is over."""
LATE = 1.0
"""Seconds after which an answer counts as late."""
DISK_MB = 8


@dataclass(frozen=True, slots=True)
class Scene:
    """What a drill works with."""

    store: Store
    crew: Crew

    @property
    def redis(self) -> stores.Node:
        """The server, or the one that is the primary to begin with."""
        return self.store.nodes[0]


Trouble = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Drill:
    """One of them.

    Attributes:
        what: in words.
        trouble: makes it; returns when it is over.
        store: builds what the fleet shares.
        failing: why clients may see errors, if they may; as the documents say.
        flags: of all processes.
    """

    what: str
    trouble: Trouble
    store: Callable[[str, Path | None], Store] = Store
    failing: str = ""
    flags: tuple[str, ...] = ()
    small_disk: bool = False


async def _roll(posts: Sequence[Post]) -> None:
    """One after the other: end, wait for that, start, wait until it is ready."""
    for post in posts:
        await post.end()
        await post.start()


def rolling(role: str) -> Trouble:
    return lambda scene: _roll(scene.crew.of(role))


def killed(role: str) -> Trouble:
    async def trouble(scene: Scene) -> None:
        post = scene.crew.of(role)[0]
        post.kill()
        await asyncio.sleep(2.0)
        await post.start()

    return trouble


def stopped(role: str, seconds: float) -> Trouble:
    async def trouble(scene: Scene) -> None:
        with scene.crew.of(role)[0].still():
            await asyncio.sleep(seconds)

    return trouble


async def gpu_killed(scene: Scene) -> None:
    for pid in scene.crew.of("worker")[0].gpus():
        os.kill(pid, signal.SIGKILL)


async def gpu_stopped(scene: Scene) -> None:
    pids = scene.crew.of("worker")[0].gpus()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(4.0)


def redis_away(seconds: float, *, empty: bool = False) -> Trouble:
    async def trouble(scene: Scene) -> None:
        scene.redis.kill()
        if empty:
            scene.redis.empty()
        await asyncio.sleep(seconds)
        await asyncio.to_thread(scene.redis.start)

    return trouble


def redis_stalled(seconds: float) -> Trouble:
    async def trouble(scene: Scene) -> None:
        scene.redis.pause()
        try:
            await asyncio.sleep(seconds)
        finally:
            scene.redis.resume()

    return trouble


async def redis_flushed(scene: Scene) -> None:
    await asyncio.to_thread(scene.redis.ask, "FLUSHALL")


async def redis_full(scene: Scene) -> None:
    await asyncio.to_thread(scene.redis.ask, "CONFIG", "SET", "maxmemory", 1)
    await asyncio.sleep(3.0)
    await asyncio.to_thread(scene.redis.ask, "CONFIG", "SET", "maxmemory", "2gb")


async def disk_full(scene: Scene) -> None:
    """Fill the disk that the append-only file is on, and make room again."""
    ballast = Path(str(await asyncio.to_thread(scene.redis.ask, "CONFIG", "GET", "dir")).split("'")[-2]) / "ballast"

    def fill() -> None:
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                return

    await asyncio.to_thread(fill)
    await asyncio.sleep(4.0)
    ballast.unlink()


async def sentinel_planned(scene: Scene) -> None:
    assert isinstance(scene.store, Watched)
    await asyncio.to_thread(scene.store.fail_over)
    await asyncio.sleep(12.0)


async def primary_killed(scene: Scene) -> None:
    scene.redis.kill()
    await asyncio.sleep(12.0)


async def cluster_planned(scene: Scene) -> None:
    assert isinstance(scene.store, Shared)
    for primary in scene.store.nodes[:3]:
        await asyncio.to_thread(scene.store.replica_of(primary).ask, "CLUSTER", "FAILOVER")
        await asyncio.sleep(2.0)


async def cluster_killed(scene: Scene) -> None:
    for node in scene.store.nodes[:1]:
        node.kill()
    await asyncio.sleep(10.0)


SHARDED = ("--shards", "4")
AWAY = "Redis is away for longer than --broker-timeout-ms: 503"
HELD = "what the process held at that instant"
DRILLS = {
    "gateways-rolling": Drill("gateways restarted one by one", rolling("gateway")),
    "workers-rolling": Drill("worker hosts restarted one by one", rolling("worker")),
    "controllers-rolling": Drill("controllers restarted one by one", rolling("controller")),
    "gateway-killed": Drill("a gateway killed (SIGKILL), back after 2 s", killed("gateway"), failing=HELD),
    "worker-killed": Drill("a worker host killed, back after 2 s", killed("worker")),
    "gpu-killed": Drill("a GPU process killed", gpu_killed),
    "controller-killed": Drill("a controller killed, back after 2 s", killed("controller")),
    "gateway-stopped": Drill("a gateway stands still (SIGSTOP) for 6 s", stopped("gateway", 6.0), failing=HELD),
    "worker-stopped": Drill("a worker host stands still for 6 s", stopped("worker", 6.0)),
    "gpu-stopped": Drill("a GPU process stands still", gpu_stopped, failing=HELD),
    "controller-stopped": Drill("a controller stands still for 6 s", stopped("controller", 6.0)),
    "redis-blip": Drill("Redis stalls for 0.3 s", redis_stalled(0.3)),
    "redis-stalled": Drill("Redis stalls for 3 s", redis_stalled(3.0), failing=AWAY),
    "redis-restarted": Drill("Redis killed, back after 0.3 s", redis_away(0.3)),
    "redis-killed": Drill("Redis killed, back after 3 s", redis_away(3.0), failing=AWAY),
    "redis-emptied": Drill("Redis killed, back empty after 0.3 s", redis_away(0.3, empty=True)),
    "redis-flushed": Drill("all keys of Redis removed", redis_flushed),
    "redis-memory": Drill("Redis out of memory for 3 s", redis_full, failing="429 memory"),
    "redis-disk": Drill("Redis's disk full for 4 s", disk_full, failing=AWAY, small_disk=True),
    "sentinel-planned": Drill("planned failover by Sentinels", sentinel_planned, lambda name, _: Watched(name)),
    "sentinel-killed": Drill(
        "primary killed under Sentinels", primary_killed, lambda name, _: Watched(name), failing=AWAY
    ),
    "cluster-planned": Drill(
        "planned failover of each primary of a cluster", cluster_planned, lambda name, _: Shared(name), flags=SHARDED
    ),
    "cluster-killed": Drill(
        "a primary of a cluster killed", cluster_killed, lambda name, _: Shared(name), failing=AWAY, flags=SHARDED
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What clients saw of a drill."""

    history: History
    began: float
    took: float

    @property
    def outcomes(self) -> Counter[str]:
        return self.history.outcomes

    @property
    def failed(self) -> int:
        """Requests without a right answer, wrong ones left out."""
        return len(self.history.requests) - self.outcomes["ok"] - self.outcomes["wrong"]

    @property
    def wrong(self) -> int:
        return self.outcomes["wrong"] + self.history.twice + self.history.unasked

    @property
    def recovery(self) -> float:
        """Seconds; 0 when nothing failed or was late."""
        ends = (
            request.ended - self.began
            for request in self.history.requests
            if request.outcome != "ok" or request.ended - request.due > LATE
        )
        return max(0.0, *ends, 0.0)

    def row(self, drill: Drill, proxy: str) -> dict[str, object]:
        """Its row of the table."""
        others = {name or "none": count for name, count in self.outcomes.most_common() if name != "ok"}
        return {
            "drill": drill.what,
            "behind": proxy,
            "requests": len(self.history.requests),
            "failed": self.failed,
            "wrong": self.wrong,
            "recovery, s": round(self.recovery, 1),
            "slowest, s": round(max(self.history.latencies, default=0.0), 2),
            "seen": ", ".join(f"{count} {name}" for name, count in others.items()),
        }


def main() -> int:
    options = _options()
    if options.list:
        for name, drill in DRILLS.items():
            print(f"{name:<20} {drill.what}")
        return 0
    stand.end_in_order()
    stand.pin_to_load_core()
    findings = Findings(
        "drills", rate=RATE, batch_ms=BATCH_MS, max_batch=MAX_BATCH, processes=COUNTS, lame_duck_ms=LAME_DUCK_MS,
        pinning=stand.PINNING,
    )  # fmt: skip
    rows: list[dict[str, object]] = []
    for name, proxy in itertools.product(options.only, options.proxy):
        drill = DRILLS[name]
        findings.say(f"{name} behind {proxy} …")
        try:
            outcome = _held(drill, proxy)
        except (Broken, OSError, subprocess.CalledProcessError) as exc:
            rows.append({"drill": drill.what, "behind": proxy, "seen": f"could not run: {exc}"[:120]})
            findings.say(f"  could not run: {exc}")
            continue
        rows.append(outcome.row(drill, proxy))
        findings.say(f"  {len(outcome.history.requests)} requests, {outcome.failed} failed, {outcome.wrong} wrong")
        for example in outcome.history.examples[:3]:
            findings.say(f"  {example}")
        findings.none(f"{name} behind {proxy}: wrong", outcome.wrong)
        if not drill.failing:
            findings.none(f"{name} behind {proxy}: failed", outcome.failed)
    findings.table("Drills", rows)
    return findings.close()


def _held(drill: Drill, proxy: str) -> Outcome:
    """Have one drill, on a fleet of its own."""
    with ExitStack() as stack:
        place = stack.enter_context(_small_disk()) if drill.small_disk else None
        store = stack.enter_context(drill.store("drills", place))
        flags = {"": drill.flags, "gateway": ("--lame-duck-ms", str(LAME_DUCK_MS))}
        crew = stack.enter_context(Crew(store.url, COUNTS, flags, BATCH_MS, MAX_BATCH))
        front = stack.enter_context(Proxy(proxy, [Behind(post.port, post.grpc_port) for post in crew.of("gateway")]))
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_drilled(drill, Scene(store, crew), front))


async def _drilled(drill: Drill, scene: Scene, front: Proxy) -> Outcome:
    for post in scene.crew.of("gateway"):
        await asyncio.to_thread(post.server.wait_for, post.ready)
    await asyncio.sleep(2.0)  # The balancer notices.
    callers = Callers(front.url, RATE, 0, front.certificates.context("http/1.1"))
    load = asyncio.create_task(callers.run())
    try:
        await asyncio.sleep(BEFORE)
        began = callers.loop.time()
        await drill.trouble(scene)
        took = callers.loop.time() - began
        await asyncio.sleep(AFTER)
        callers.end_load()
        return Outcome(await load, began, took)
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


@contextlib.contextmanager
def _small_disk() -> Iterator[Path]:
    """A file system of DISK_MB, for as long as the context lasts. Needs to be root on Linux."""
    with TemporaryDirectory(prefix="headway-disk-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", folder]
        subprocess.run(command, check=True, capture_output=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=False, capture_output=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Drills behind real balancers, and what clients see of them.")
    parser.add_argument("--only", nargs="+", choices=DRILLS, default=list(DRILLS), metavar="NAME")
    parser.add_argument("--proxy", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

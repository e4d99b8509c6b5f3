"""How many instructions Redis takes for each call of its functions, by valgrind.

    python bench/cost/instructions.py                 two minutes
    python bench/cost/instructions.py --times 50      a first impression

One process makes the same calls, on a clock that only the program moves. So two runs differ by 1 % even on a busy machine, and show the effect
of a change to the functions. The instructions of a PING are subtracted from each number.

valgrind and redis-server have to be installed. On Debian and Ubuntu: apt-get install valgrind redis-server
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

import redis

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.stand import Broken, Server
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.connection import RedisConnection
from headway.core.departure import Load, Rule
from headway.core.queue_limits import QueueLimits
from headway.model import DedupKey, DedupKind, Entry, ItemResult, Lease, Limit, Slot, WorkerInfo, WorkerStatus
from headway.runtime.counters import BrokerCounts

LIMITS = QueueLimits(tiers=3, max_batch=64, reserved_share=0.05, max_queue=5000)
LIMIT = Limit("key", "key", 1e6, 1e6)
INPUT = "the quick brown fox " * 5
GATEWAY = "gateway-1"
SLOTS = [Slot(worker=f"host-1-gpu-{number}", model="m", max_batch=LIMITS.max_batch) for number in range(2)]
HEARTBEATS = 0.5
TOTAL = re.compile(rb"^(?:totals|summary): (\d+)", re.MULTILINE)
_numbers = itertools.count(1)


class AtOnce:
    """A policy that lets everything leave immediately."""

    def rule(self, load: Load) -> Rule:
        return Rule(size=1)


class ManualLoop(asyncio.SelectorEventLoop):
    at = 1e6

    def time(self) -> float:
        return self.at


class Watched:
    """A redis-server under valgrind, used as a context manager."""

    def __init__(self) -> None:
        self.port = stand.free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="headway-bench-instructions-"))
        command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={self._folder}/o"]
        command += ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--save", "", "--hz", "1", "--dynamic-hz", "no"]
        self._server = Server("instructions-redis", command, lambda _: "redis")

    def __enter__(self) -> Self:
        self._server.wait_for(self._answers)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        shutil.rmtree(self._folder)

    def control(self, *command: str) -> None:
        """Tell valgrind to count, reset its counts, or write them."""
        subprocess.run(
            ["callgrind_control", *command, str(self._server.pid)], check=True, capture_output=True, timeout=120.0
        )

    def counted(self) -> int:
        for file in self._folder.glob("o*"):
            file.unlink()
        self.control("--dump=now")
        totals = [TOTAL.search(file.read_bytes()) for file in self._folder.glob("o*")]
        return max(int(total[1]) for total in totals if total)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError), redis.Redis(port=self.port, socket_timeout=5.0) as client:
            return bool(client.ping())
        return False


class Caller:
    def __init__(self, watched: Watched, loop: ManualLoop) -> None:
        self._loop, self.slots = loop, SLOTS
        self._heard_at = -math.inf
        self.connection = RedisConnection(f"redis://127.0.0.1:{watched.port}/0", timeout=math.inf, clock=loop.time)
        self.broker = RedisBroker(self.connection, {"m": LIMITS}, BrokerCounts(), lambda: 0.5)
        self._read = 0

    async def wait(self, seconds: float) -> None:
        """Let time pass. Slots send their heartbeats."""
        self._loop.at += seconds
        if self._loop.at > self._heard_at + HEARTBEATS:
            self._heard_at = self._loop.at
            for slot in self.slots:
                await self.heartbeat(slot)

    async def heartbeat(self, slot: Slot) -> None:
        await self.broker.heartbeat(WorkerInfo(worker_id=slot.worker, model="m", status=WorkerStatus.HEALTHY))

    async def enqueue(self, count: int = 1, tenant: str = "acme", task: bool = False) -> None:
        entries = [self._entry(tenant, task) for _ in range(count)]
        if await self.broker.enqueue(entries) != [None] * count:
            raise Broken("an entry was refused")

    async def claim(self, most: int = LIMITS.max_batch) -> Lease:
        slot = Slot(worker=SLOTS[0].worker, model="m", max_batch=most)
        lease = await self.broker.claim(slot, AtOnce())
        if not isinstance(lease, Lease):
            raise Broken("there was nothing to claim")
        return lease

    async def complete(self, lease: Lease) -> None:
        await self.broker.complete(lease, [ItemResult(str(entry.input).upper()) for entry in lease.entries])
        _, self._read = await self.broker.replies(GATEWAY, self._read)

    async def serve(self, enqueues: int, each: int = 1, tenants: int = 1, task: bool = False) -> None:
        """Make `enqueues` calls with `each` entries, from tenants in turn. Claim and complete all entries, and read the answers."""
        for number in range(enqueues):
            await self.wait(0.001)
            await self.enqueue(each, f"tenant {number % tenants}", task)
        await self.wait(0.001)
        lease = await self.claim()
        await self.wait(0.003)
        await self.complete(lease)

    async def lone(self) -> None:
        """Claim in vain, then wake the slot with a new entry."""
        await self.wait(0.01)
        await self.broker.claim(SLOTS[0], AtOnce())
        await self.serve(1)

    def _entry(self, tenant: str, task: bool) -> Entry:
        id = f"{next(_numbers):026d}"
        keys = (DedupKey(DedupKind.TASK, id, b"digest", 60.0, False),) if task else ()
        return Entry(id, "m", INPUT, 1, tenant, GATEWAY, 2.0, 4.0, limits=(LIMIT,), dedup_keys=keys)


def main() -> int:
    parser = argparse.ArgumentParser(description="How many instructions Redis takes for each call of its functions.")
    parser.add_argument("--times", type=int, default=200, help="calls of each kind (default %(default)d)")
    options = parser.parse_args()
    stand.end_in_order()
    if not (shutil.which("valgrind") and shutil.which("redis-server")):
        print("valgrind or redis-server is not installed: apt-get install valgrind redis-server", file=sys.stderr)
        return 2
    findings = Findings("instructions", times=options.times)
    with Watched() as watched, asyncio.Runner(loop_factory=ManualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, ManualLoop)
        rows = runner.run(_measure(watched, loop, options.times))
    findings.table("instructions of Redis for each call, less those of a PING", rows)
    return findings.close()


async def _measure(watched: Watched, loop: ManualLoop, times: int) -> list[dict[str, object]]:
    caller = Caller(watched, loop)
    await caller.connection.open()
    for _ in range(30):
        await caller.serve(2, tenants=2)
    counts: dict[str, float] = {}
    watched.control("--instr=on")

    async def measure(name: str, act: Callable[[], Awaitable[object]], calls: int = 1, share: int = 1) -> None:
        watched.control("--zero")
        rounds = max(times // share, 5)
        for _ in range(rounds):
            await act()
        counts[name] = watched.counted() / rounds / calls

    await caller.wait(10.0)
    await measure("PING", lambda: caller.connection._calls.call("", "PING"))
    await measure("enqueue of one with a limit", caller.enqueue)
    leases: list[Lease] = []

    async def claim() -> None:
        leases.append(await caller.claim(4))

    await measure("claim of 4, others wait", claim, share=8)
    left = iter(leases)
    await measure("completion of 4, and its answers read", lambda: caller.complete(next(left)), share=8)
    await caller.complete(await caller.claim())
    await measure("mean of 3 enqueues, claim, completion", lambda: caller.serve(3), 5, 2)
    await measure("mean of 4 enqueues of 2 from 3 tenants, claim, completion", lambda: caller.serve(4, 2, 3), 6, 4)
    await measure("mean of 4 enqueues of a task, claim, completion", lambda: caller.serve(4, task=True), 6, 8)
    await measure("mean where one entry wakes a slot", caller.lone, 4, 4)
    await measure("heartbeat, and its line in the registry", lambda: caller.heartbeat(SLOTS[0]), share=2)
    await measure("three calls for 64, an entry", lambda: caller.serve(1, 64), 64, 20)
    caller.slots = [*SLOTS, *(Slot(worker=f"host-{number}-gpu-0", model="m", max_batch=64) for number in range(2, 64))]
    await caller.wait(HEARTBEATS + 0.1)
    await measure("mean of 3 enqueues, claim, completion, with 64 hosts", lambda: caller.serve(3), 5, 2)
    watched.control("--instr=off")
    await caller.broker.close()
    await caller.connection.close()
    ping = counts.pop("PING")
    return [{"calls": name, "instructions": round(count - ping)} for name, count in counts.items()]


if __name__ == "__main__":
    sys.exit(main())

"""A faulty broker on virtual time: `Server` is a real in-memory broker, and `Connection` a process's connection to it.

How a call ends (`Server.mode`):
    fine     normally
    refuse   BrokerUnavailable, and nothing is done
    lose     BrokerUnavailable, but it is done: the answer was lost
    stall    BrokerUnavailable after CALL_TIMEOUT seconds, but it is done when the stall ends
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.core.departure import Policy
from headway.core.locality import Contender
from headway.core.queue_limits import QueueLimits
from headway.core.retention import KeptLimits
from headway.errors import BrokerUnavailable
from headway.model import Lease, Limit, NoWork, Reply, Slot
from headway.runtime.counters import BrokerCounts
from tests.virtual_time import Clock

T = TypeVar("T")

CALL_TIMEOUT = 1.0
"""Seconds after which a call is given up, as `broker_timeout_ms` says by default."""
MODES = ("fine", "refuse", "lose", "stall")


class Server:
    """`mode` says how calls end, unless `script` returns another mode for a call. While `paused`, it takes reads only.
    `calls` has every call so far: its time, its name, and what it was made with."""

    def __init__(
        self, clock: Clock, limits: QueueLimits, counters: BrokerCounts, models: Sequence[str] = ("m",)
    ) -> None:
        self.clock, self._models = clock, models
        self.counters = counters
        self.dead = DeadLetterBox()
        self.mode, self.paused = "fine", False
        self.script: Callable[[str], str | None] = lambda name: None
        self.calls: list[tuple[float, str, Any]] = []
        self.losses = 0
        self._limits = limits
        self._late: list[Callable[[], Awaitable[Any]]] = []
        self._recovered = asyncio.Event()
        self._cut: dict[str, asyncio.Future[None]] = {}
        self.inner = self._fresh()

    @property
    def epoch(self) -> str:
        return f"epoch {self.losses}"

    def _fresh(self) -> MemoryBroker:
        inner = MemoryBroker(
            dict.fromkeys(self._models, self._limits), self.dead, self.counters, self.clock, lambda: 0.5
        )
        # Fences must not repeat after a loss, or a running batch would be mistaken for another.
        inner._fences = itertools.count(1 + self.losses * 1_000_000)
        return inner

    def cut(self) -> None:
        """Break every call that is waiting for an event."""
        for cut in self._cut.values():
            cut.set_result(None)
        self._cut.clear()

    def lose_everything(self, *, cut: bool = False) -> None:
        """Restart without the data. Breaks the calls that wait for work, and with `cut` all calls that wait."""
        self.losses += 1
        self.inner = self._fresh()
        if cut:
            self.cut()
        if bell := self._cut.pop("listen", None):
            bell.set_result(None)

    async def fail(self, mode: str = "refuse") -> None:
        """Use this mode from now on, and break the calls that are waiting."""
        await self.become(mode)
        self.cut()

    async def become(self, mode: str) -> None:
        """Use this mode from now on. If a stall ends, the delayed calls are done first."""
        self.mode = mode
        if mode != "stall":
            late, self._late = self._late, []
            for call in late:
                await call()
            recovered, self._recovered = self._recovered, asyncio.Event()
            recovered.set()

    async def call(self, name: str, what: Any, do: Callable[[MemoryBroker], Awaitable[T]]) -> T:
        self.calls.append((self.clock(), name, what))
        mode = self.script(name) or self.mode
        if mode == "refuse":
            raise BrokerUnavailable("refused")
        if mode == "stall":
            try:
                async with asyncio.timeout(CALL_TIMEOUT):
                    await self._recovered.wait()
            except TimeoutError:
                self._late.append(lambda: do(self.inner))
                raise BrokerUnavailable("timed out") from None
        result = await do(self.inner)
        if mode == "lose":
            raise BrokerUnavailable("connection reset")
        return result

    async def wait_for(self, name: str, what: Any, wait: Callable[[MemoryBroker], Awaitable[T]]) -> T:
        """Make a call that waits for an event. It fails if it starts in trouble, or when it is cut."""
        self.calls.append((self.clock(), name, what))
        mode = self.script(name) or self.mode
        if mode in ("refuse", "lose"):
            raise BrokerUnavailable("refused")
        if mode == "stall":
            await self._recovered.wait()
        waiting = asyncio.ensure_future(wait(self.inner))
        try:
            if name not in self._cut:
                self._cut[name] = asyncio.get_running_loop().create_future()
            both: set[asyncio.Future[Any]] = {waiting, self._cut[name]}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return await waiting
            raise BrokerUnavailable("connection reset")
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    def named(self, *names: str) -> list[tuple[float, str, Any]]:
        return [call for call in self.calls if call[1] in names]


def passed(name: str, what: Callable[..., Any] = lambda *_: None, told: str = "") -> Any:
    """Return a method that forwards a call. It records the call as `told`, with `what` applied to its arguments."""

    async def method(connection: Connection, *arguments: Any, **options: Any) -> Any:
        noted = what(*arguments, **options)
        return await connection.call(told or name, noted, lambda inner: getattr(inner, name)(*arguments, **options))

    return method


class Connection:
    """See Broker. Repeating a claim whose answer was lost returns the same lease."""

    near, remote = None, True
    linger = 0.001

    def __init__(self, server: Server) -> None:
        self.server = server
        self.epoch = ""
        self._granted: dict[str, tuple[str, Lease]] = {}

    @property
    def apart_from(self) -> float:
        return self.server.inner.apart_from

    @property
    def memory_pressure(self) -> bool:
        return self.server.inner.memory_pressure

    @property
    def kept(self) -> KeptLimits:
        return self.server.inner.kept

    async def call(self, name: str, what: Any, do: Callable[[MemoryBroker], Awaitable[T]]) -> T:
        result = await self.server.call(name, what, do)
        self.epoch = self.server.epoch
        return result

    enqueue = passed("enqueue", list)
    enqueue_bulk = passed("enqueue_bulk", list)
    complete = passed("complete", lambda lease, items: lease)
    release = passed("release", lambda lease, failure=None: (lease, failure))
    extend = passed("extend", lambda lease: lease)
    withdraw = passed("withdraw", lambda submissions, gateway: list(submissions))
    probe = passed("probe", lambda gateway: gateway)
    cancel_task = passed("cancel_task", lambda tenant, id: (tenant, id))
    state = passed("state", lambda tenant, id: (tenant, id), "stage")
    outcome = passed("outcome", lambda tenant, id: (tenant, id), "recall")
    heartbeat = passed("heartbeat", lambda worker: worker, "beat")
    workers = passed("workers")
    bulk_queues = passed("bulk_queues")
    depths = passed("depths")
    loads = passed("loads")

    async def claim(self, slot: Slot, policy: Policy) -> Lease | NoWork:
        async def once(inner: MemoryBroker) -> Lease | NoWork:
            epoch, lease = self._granted.get(slot.worker, ("", None))
            if lease is not None and epoch == self.server.epoch and await inner.extend(lease):
                return lease
            claimed = await inner.claim(slot, policy)
            if isinstance(claimed, Lease):
                self._granted[slot.worker] = (self.server.epoch, claimed)
            return claimed

        claimed = await self.call("claim", slot, once)
        self._granted.pop(slot.worker, None)
        return claimed

    async def wait_for_work(self, slot: Slot, until: float | None) -> None:
        await self.server.wait_for("listen", slot, lambda inner: inner.wait_for_work(slot, until))

    async def contenders(self, slots: Sequence[Slot]) -> Sequence[Contender]:
        return [Contender(slot.model) for slot in slots]

    async def takes_reads_only(self) -> bool:
        return self.server.paused

    async def replies(self, gateway: str, after: int) -> tuple[Sequence[Reply], int]:
        read = await self.server.wait_for("replies", (gateway, after), lambda inner: inner.replies(gateway, after))
        self.epoch = self.server.epoch
        return read

    def rate_limit_debt(self, limit: Limit) -> float:
        return self.server.inner.rate_limit_debt(limit)

    async def reap(self, rest: float = 0.0) -> float:
        return await self.call("reap", None, lambda inner: inner.reap())

    def know(self, models: Mapping[str, QueueLimits], others: bool = False) -> None:
        self.server.inner.know(models, others)

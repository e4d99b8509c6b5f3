"""Claims of batches from a queue in the server. Each claim sends a departure rule, computed from the queue's last known load."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from headway.brokers.redis import entry_wire, wire
from headway.brokers.redis.function_library import RULE_AGE
from headway.brokers.redis.large_values import LargeValues
from headway.brokers.redis.steps import ServerClock, Steps
from headway.core.departure import Load, Policy
from headway.model import Entry, Lease, NoWork, Slot
from headway.runtime.logger import get_logger

log = get_logger(__name__)

SHARDS = 256  # Maximum number of shards of a model. A lease's fence is the queue's fence times SHARDS, plus the shard.
TRIES = 4  # Maximum number of tries of a claim, if the server keeps asking for a newer rule.

_INPUT = attrgetter("input")


class Granted(msgspec.Struct, frozen=True):
    """Lease from the server. `waited` is each entry's wait in seconds. `unreadable` is why an entry can't be read, or empty."""

    lease: Lease
    waited: Sequence[float]
    unreadable: str = ""


class LastLoad:
    """Load of one queue, as the server last reported it. After each report, `learn_times` is called
    with its time and the time at which the queue's state was created, both on the server's clock."""

    def __init__(self, clock: ServerClock, learn_times: Callable[[float, float], None]) -> None:
        self._clock, self._learn_times = clock, learn_times
        self._load: tuple[float, Load] | None = None

    def learn(self, load: bytes) -> None:
        now, born, known = wire.read_load(load)
        self._load = now, known
        self._learn_times(now, born)

    def rule(self, policy: Policy, took: float) -> bytes:
        """Pack the departure rule for the last load, or an empty rule if that load is too old. The seconds that the last
        call `took` are added to the rule's time, so that a distant server doesn't reject the rule as too old."""
        if self._load is None:
            return wire.pack_rule(0.0, 0, None)
        stamp, load = self._load
        if self._clock.now() - stamp > RULE_AGE:
            return wire.pack_rule(0.0, 0, None)
        return wire.pack_rule(stamp + took, load.slots, policy.rule(load))


class Claims:
    """Claims from one queue, and the leases that result. `key` is the prefix of the queue's keys."""

    def __init__(
        self, steps: Steps, load: LastLoad, values: LargeValues, key: str, shard: int, lease_seconds: float
    ) -> None:
        self._steps, self._load, self._values = steps, load, values
        self._key, self._shard, self._lease_seconds = key, shard, lease_seconds

    async def claim(self, name: str, slot: Slot, policy: Policy, token: str, guest: bool) -> Granted | NoWork:
        """Claim the batch that leaves now, or return when to claim again. `name` is the slot's name in the server. A repeated
        claim has the same `token`. A slot is a `guest` if its home is another shard."""
        loop, took = asyncio.get_running_loop(), 0.0
        for _ in range(TRIES):
            began = loop.time()
            rule = self._load.rule(policy, took)
            answer = await self._steps.claim("claim", name, slot.max_batch, token, int(guest), rule)
            if answer[0] == b"lease":
                return await self._granted(slot, answer)
            self._load.learn(answer[-1])
            took = loop.time() - began
            if answer[0] == b"wait":
                [until] = wire.read_numbers(answer[1])
                return NoWork(None if math.isinf(until) else until)
        return NoWork(self._steps.clock.now() + RULE_AGE)

    async def _granted(self, slot: Slot, answer: list[Any]) -> Granted | NoWork:
        _, numbers, reason, arrivals, payloads = answer
        now, fence, left_at, ends, time_left, attempt = wire.read_numbers(numbers)
        self._steps.clock.learn(now)
        entries: list[Entry] = []
        unreadable = ""
        waited = [left_at - arrived for arrived in wire.read_numbers(arrivals)]
        try:
            stored = entry_wire.read_payloads(payloads)
            inputs: Sequence[entry_wire.Apart | None] = [None] * len(stored)
            if list in map(type, map(_INPUT, stored)) and any(entry.apart for entry in stored):
                inputs = await self._inputs(int(fence), stored)
                lost = [at for at, entry in enumerate(stored) if entry.apart and inputs[at] is None]
                if lost:
                    log.info("inputs of a batch are missing", worker=slot.worker, count=len(lost), of=len(stored))
                if lost and not await self._steps.call("lose", int(fence), wire.encode(lost)):
                    return NoWork(self._steps.clock.now())
                kept = [at for at in range(len(stored)) if at not in lost]
                stored, inputs = [stored[at] for at in kept], [inputs[at] for at in kept]
                waited = [waited[at] for at in kept]
            entries = [entry_wire.entry_of(entry, apart) for entry, apart in zip(stored, inputs, strict=True)]
        except wire.UNREADABLE as exc:
            unreadable = f"an entry cannot be read: {wire.reason(exc)}"
        lease = Lease(
            fence=int(fence) * SHARDS + self._shard,
            slot=slot,
            entries=tuple(entries),
            reason=reason.decode(),
            granted_at=left_at,
            expires_at=ends,
            time_left=time_left,
            attempt=int(attempt),
        )
        return Granted(lease, waited, unreadable)

    async def _inputs(self, fence: int, stored: Sequence[entry_wire.StoredEntry]) -> Sequence[entry_wire.Apart | None]:
        """Return each entry's separately stored input, or None for an entry that has none or whose input is gone. Meanwhile,
        the lease is renewed."""
        reading = asyncio.ensure_future(asyncio.gather(*(self._values.input_of(self._key, entry) for entry in stored)))
        # If `extend` fails first, nobody retrieves this exception.
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not (await asyncio.wait({reading}, timeout=self._lease_seconds / 3))[0]:
                await self._steps.call("extend", fence)
            return await reading
        finally:
            reading.cancel()

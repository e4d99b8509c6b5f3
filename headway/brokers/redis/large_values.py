"""Large inputs and outputs, which are stored apart from their entries and replies.

A step of the queue carries a few hundred bytes of each entry then, however large the input is: Redis copies what is an
argument of a function, or its result, several times, and serves nobody meanwhile. An input is stored ahead of its entry
and read after the claim; an output is stored ahead of the completion, and read after the reply.

    gateway ──SET input──▶ enqueue … claim ──GET input──▶ worker ──SET output──▶ complete … reply ──GET output──▶ gateway

A value goes in the same step as what it belongs to. Each has an end of its own besides, should that never come. A process moves a
few at a time, and tenants take turns: the values of one wait for no more than a few of another's.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import secrets
from collections.abc import Sequence

from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.entry_wire import WireEntry
from headway.brokers.redis.wire import encode
from headway.core.values import octets
from headway.model import Entry, Octets, Value
from headway.runtime.fair_slots import FairSlots

GRACE_SECONDS = 60
"""Seconds for which an input outlasts its entry's deadline."""
OUTPUT_SECONDS = 240
"""Seconds after which an output ends that was not read: longer than the stream that names it."""
AT_ONCE = 2
"""Most values that a process sends or reads at the same time."""


class LargeValues:
    """Store of the large values of one process's entries and replies.

    Arguments:
        connection: connection to the server.
        threshold: bytes above which a value is stored apart; infinite for none.
    """

    def __init__(self, connection: RedisConnection, threshold: float) -> None:
        self.threshold = threshold
        self._connection = connection
        self._secret = secrets.token_bytes(16)
        self._slots = FairSlots(AT_ONCE)
        self._outputs = 0

    def is_large(self, value: Value | None) -> bool:
        """Whether a value is stored apart."""
        return value is not None and len(value) > self.threshold

    def name_of(self, entry: Entry) -> str:
        """Kind and token of an entry's input; empty where that is not large. A submission always has the same."""
        if not self.is_large(entry.input):
            return ""
        submission = encode((entry.gateway, *entry.submission))
        return _kind(entry.input) + _token(hashlib.blake2b(submission, key=self._secret, digest_size=8).digest())

    async def bring(self, queue: str, entries: Sequence[Entry]) -> None:
        """Store the large inputs of these entries beside the queue whose keys begin with `queue`.

        Raises:
            OutOfMemory: the server has no room; some may be stored.
            BrokerUnavailable: no answer in time; they may be stored.
        """
        large = [entry for entry in entries if self.is_large(entry.input)]
        await asyncio.gather(*(self._bring(queue, entry) for entry in large))

    async def _bring(self, queue: str, entry: Entry) -> None:
        seconds = math.ceil(entry.timeout) + GRACE_SECONDS
        async with self._slots.of(entry.tenant):
            await self._connection.store(f"{queue}P:{self.name_of(entry)[1:]}", octets(entry.input), seconds)

    async def input_of(self, queue: str, found: WireEntry) -> Value | None:
        """Input of a claimed entry that is stored apart; None when it is not there."""
        return await self.read(f"{queue}P:{found.apart[1:]}", found.apart, found.length, found.tenant)

    async def bring_output(self, queue: str, value: Value, tenant: str) -> str:
        """Store a tenant's output beside a queue. Returns its kind and token."""
        self._outputs += 1
        digest = hashlib.blake2b(b"%d" % self._outputs, key=self._secret, digest_size=8).digest()
        name = _kind(value) + _token(digest)
        async with self._slots.of(tenant):
            await self._connection.store(f"{queue}R:{name[1:]}", octets(value), OUTPUT_SECONDS)
        return name

    async def output_of(self, queue: str, name: str, length: int, tenant: str) -> Value | None:
        """A tenant's output that is stored apart; None when it is not there."""
        return await self.read(f"{queue}R:{name[1:]}", name, length, tenant)

    async def read(self, key: str, name: str, length: int, tenant: str) -> Value | None:
        """Read a stored value.

        Arguments:
            key: where it is stored.
            name: its kind and token.
            length: its bytes.
            tenant: tenant whose it is.

        Returns:
            The value; None when it is not there, or is not what was stored.
        """
        async with self._slots.of(tenant):
            found = await self._connection.fetch(key, length)
        if found is None or len(found) != length:
            return None
        if name[:1] == "t":
            return found.decode("utf-8", "surrogatepass")
        return Octets(found) if name[:1] == "o" else found


def digest_of(value: Value) -> str:
    """Digest of an input, as the functions make it of what is stored."""
    return hashlib.sha1(octets(value), usedforsecurity=False).hexdigest()


def _kind(value: Value) -> str:
    """Letter for the kind of a value: a text, octets, or any other JSON."""
    if isinstance(value, str):
        return "t"
    return "o" if isinstance(value, Octets) else "j"


def _token(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")

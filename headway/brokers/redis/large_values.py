"""Large inputs and outputs, stored apart from their entries and replies.

Redis copies arguments and results of a function several times, and is blocked meanwhile. So an input is stored before its entry and
read after the claim. An output is stored before the completion and read after the reply.

    gateway ──SET input──▶ enqueue … claim ──GET input──▶ worker ──SET output──▶ complete … reply ──GET output──▶ gateway

Parameters are stored ahead of the input in the same value. A value is dropped in the step that ends its owner, and expires if that
step never comes. A process moves a few values at a time, and tenants take turns.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import secrets
from collections.abc import Callable, Sequence

from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.entry_wire import Apart, StoredEntry
from headway.brokers.redis.function_library import OUTPUT_SECONDS
from headway.brokers.redis.wire import StoredApart, encode
from headway.core.values import octets
from headway.model import KIND, KIND_OF_LETTER, Entry, Value, ValueKind, kind_of
from headway.runtime.fair_turns import FairSlots

GRACE_SECONDS = 60  # Seconds that an input outlasts its entry's deadline.
PREFIX = 4  # Bytes ahead of stored parameters, which hold their length.
TEXT = KIND[ValueKind.TEXT].letter
AT_ONCE = 2  # Maximum number of values that a process sends or reads at the same time.


class LargeValues:
    """Store for the large values of a process's entries and replies. `threshold` is in bytes, and may be infinite."""

    def __init__(self, connection: RedisConnection, threshold: float) -> None:
        self.threshold = threshold
        self._connection = connection
        self._secret = secrets.token_bytes(16)
        self._slots = FairSlots(AT_ONCE)
        self._outputs = 0

    def is_large(self, value: Value | None) -> bool:
        return value is not None and len(value) > self.threshold

    def name_of(self, entry: Entry) -> str:
        """Return kind and token of a large entry's input, which are always the same for a submission."""
        submission = encode((entry.gateway, *entry.submission))
        letter = kind_of(entry.input).letter
        kind = letter.upper() if entry.parameters else letter
        return kind + _token(hashlib.blake2b(submission, key=self._secret, digest_size=8).digest())

    async def bring(self, queue: str, entries: Sequence[Entry]) -> None:
        """Store the inputs of large entries beside the queue with the key prefix `queue`. After OutOfMemory or
        BrokerUnavailable some may be stored."""
        await asyncio.gather(*(self._bring(f"{queue}P:{self.name_of(entry)[1:]}", entry) for entry in entries))

    async def _bring(self, key: str, entry: Entry) -> None:
        seconds = math.ceil(entry.timeout) + GRACE_SECONDS
        async with self._slots.of(entry.tenant):
            await self._connection.store(key, content_of(entry), seconds)

    async def input_of(self, queue: str, stored: StoredEntry) -> Apart | None:
        """Read the separately stored input and parameters of a claimed entry. Return None if they are gone."""
        if (apart := stored.apart) is None:
            return None
        return await self.read_input(f"{queue}P:{apart[0][1:]}", stored.tenant, apart)

    async def read_input(self, key: str, tenant: str, apart: StoredApart, *, whole: bool = False) -> Apart | None:
        """Read input and parameters stored under a key, or return None if they don't exist or have another length. They are
        read `whole` if another entry's input may replace them meanwhile."""
        name, length = apart
        async with self._slots.of(tenant):
            content = await (self._connection.fetch_whole if whole else self._connection.fetch)(key, length)
        if content is None or len(content) != length:
            return None
        kind, parameters = name[:1], b""
        if kind.isupper():
            start = PREFIX + int.from_bytes(content[:PREFIX], "big")
            kind, parameters, content = kind.lower(), content[PREFIX:start], content[start:]
        return KIND_OF_LETTER[kind].of(content), parameters

    async def bring_output(self, queue: str, value: Value, tenant: str) -> str:
        """Store a tenant's output beside a queue. Returns its kind and token."""
        self._outputs += 1
        digest = hashlib.blake2b(b"%d" % self._outputs, key=self._secret, digest_size=8).digest()
        name = kind_of(value).letter + _token(digest)
        content = value if isinstance(value, str) and value.isascii() else octets(value)
        async with self._slots.of(tenant):
            await self._connection.store(f"{queue}R:{name[1:]}", content, OUTPUT_SECONDS)
        return name

    async def output_of(
        self, queue: str, name: str, length: int, tenant: str, wanted: Callable[[], bool] = lambda: True
    ) -> Value | None:
        """Read a tenant's output, or return None if it doesn't exist or is no longer `wanted` when its turn comes."""
        key = f"{queue}R:{name[1:]}"
        async with self._slots.of(tenant):
            if not wanted():
                return None
            if name[0] == TEXT:
                return await self._connection.fetch_text(key, length)
            content = await self._connection.fetch(key, length)
        return None if content is None or len(content) != length else KIND_OF_LETTER[name[0]].of(content)


def content_of(entry: Entry) -> bytes:
    """Return the bytes that are stored for an entry."""
    if not entry.parameters:
        return octets(entry.input)
    return b"".join((len(entry.parameters).to_bytes(PREFIX, "big"), entry.parameters, octets(entry.input)))


def length_of(entry: Entry) -> int:
    """Return the length of `content_of(entry)`."""
    return len(octets(entry.input)) + (PREFIX + len(entry.parameters) if entry.parameters else 0)


def digest_of(entry: Entry) -> str:
    """Return the digest of an entry's stored bytes, as the server's functions compute it."""
    return hashlib.sha1(content_of(entry), usedforsecurity=False).hexdigest()


def _token(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")

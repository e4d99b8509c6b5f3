"""Large inputs and outputs, which are stored apart from their entries and replies.

A step of the queue carries a few hundred bytes of each entry then, however large its input and its parameters are: Redis copies what is an
argument of a function, or its result, several times, and serves nobody meanwhile. An input is stored ahead of its entry
and read after the claim; an output is stored ahead of the completion, and read after the reply.

    gateway ──SET input──▶ enqueue … claim ──GET input──▶ worker ──SET output──▶ complete … reply ──GET output──▶ gateway

Parameters lie ahead of the input, in one value with it. A value goes in the same step as what it belongs to. Each has an end of its own besides, should that never come. A process moves a
few at a time, and tenants take turns: the values of one wait for no more than a few of another's.
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

GRACE_SECONDS = 60
"""Seconds for which an input outlasts its entry's deadline."""
PREFIX = 4
"""Bytes ahead of parameters that are stored with an input, which tell their length."""
TEXT = KIND[ValueKind.TEXT].letter
"""Letter for the kind of a text."""
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
        """Whether an output is stored apart."""
        return value is not None and len(value) > self.threshold

    def name_of(self, entry: Entry) -> str:
        """Kind and token of the input of a large entry. A submission always has the same."""
        submission = encode((entry.gateway, *entry.submission))
        letter = kind_of(entry.input).letter
        kind = letter.upper() if entry.parameters else letter
        return kind + _token(hashlib.blake2b(submission, key=self._secret, digest_size=8).digest())

    async def bring(self, queue: str, entries: Sequence[Entry]) -> None:
        """Store the inputs of these large entries beside the queue whose keys begin with `queue`.

        Raises:
            OutOfMemory: the server has no room; some may be stored.
            BrokerUnavailable: no answer in time; they may be stored.
        """
        await asyncio.gather(*(self._bring(f"{queue}P:{self.name_of(entry)[1:]}", entry) for entry in entries))

    async def _bring(self, key: str, entry: Entry) -> None:
        seconds = math.ceil(entry.timeout) + GRACE_SECONDS
        async with self._slots.of(entry.tenant):
            await self._connection.store(key, content_of(entry), seconds)

    async def input_of(self, queue: str, found: StoredEntry) -> Apart | None:
        """Input and parameters of a claimed entry that are stored apart; None when they are not there."""
        if (apart := found.apart) is None:
            return None
        return await self.read_input(f"{queue}P:{apart[0][1:]}", found.tenant, apart)

    async def read_input(self, key: str, tenant: str, apart: StoredApart, *, whole: bool = False) -> Apart | None:
        """Input and parameters that are stored under a key; None when they are not there, or are not what was stored.

        `whole`: those of another entry may take their place meanwhile.
        """
        name, length = apart
        content = await self._fetch(key, length, tenant, whole=whole)
        if content is None:
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
        """A tenant's output that is stored apart; None when it is not there, or no longer `wanted` once it could be read."""
        key = f"{queue}R:{name[1:]}"
        async with self._slots.of(tenant):
            if not wanted():
                return None
            if name[0] == TEXT:
                return await self._connection.fetch_text(key, length)
            found = await self._connection.fetch(key, length)
        return None if found is None or len(found) != length else KIND_OF_LETTER[name[0]].of(found)

    async def _fetch(self, key: str, length: int, tenant: str, *, whole: bool = False) -> bytes | None:
        """Bytes that a tenant has stored; None when they are not there, or not as many."""
        async with self._slots.of(tenant):
            read = self._connection.fetch_whole if whole else self._connection.fetch
            found = await read(key, length)
        return None if found is None or len(found) != length else found


def content_of(entry: Entry) -> bytes:
    """Bytes that are stored of an entry."""
    if not entry.parameters:
        return octets(entry.input)
    return b"".join((len(entry.parameters).to_bytes(PREFIX, "big"), entry.parameters, octets(entry.input)))


def length_of(entry: Entry) -> int:
    """Length of the bytes that are stored of an entry."""
    return len(octets(entry.input)) + (PREFIX + len(entry.parameters) if entry.parameters else 0)


def digest_of(entry: Entry) -> str:
    """Digest of what is stored of an entry, as the functions make it."""
    return hashlib.sha1(content_of(entry), usedforsecurity=False).hexdigest()


def _token(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")

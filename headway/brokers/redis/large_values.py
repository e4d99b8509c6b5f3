"""Large inputs and outputs, which are stored separately from their entries and replies.

Redis copies the arguments and results of a function several times, and is blocked while it does. So an input is stored before its
entry and read after the claim. An output is stored before the completion and read after the reply.

    gateway ──SET input──▶ enqueue … claim ──GET input──▶ worker ──SET output──▶ complete … reply ──GET output──▶ gateway

Parameters are stored in the same value, before the input. A value is dropped in the step that ends its entry or reply, and expires if
that step never happens. A process transfers a few values at a time, and tenants take turns."""

from __future__ import annotations

import asyncio
import base64
import codecs
import hashlib
import math
import secrets
from collections.abc import Callable, Sequence

from headway.brokers.redis.entry_wire import Apart, StoredEntry
from headway.brokers.redis.function_library import OUTPUT_SECONDS
from headway.brokers.redis.link import Ask, Client
from headway.brokers.redis.wire import StoredApart, encode
from headway.core.values import octets
from headway.model import KIND, KIND_OF_LETTER, Entry, Value, ValueKind, kind_of
from headway.runtime.fair_turns import FairSlots

GRACE_SECONDS = 60  # Seconds for which an input is kept after its entry's deadline.
PREFIX = 4  # Number of bytes before stored parameters that hold their length.
TEXT = KIND[ValueKind.TEXT].letter
AT_ONCE = 2  # Maximum number of values that a process sends or reads at the same time.
SLOWEST = 10_000_000  # Minimum bytes per second for large values. Lengthens the timeouts of such calls.
PIECE = 1 << 19  # Bytes of a large value per answer. One this size blocks Redis for 0.1 ms, one of 8 MB for 6 ms.
_text_decoder = codecs.getincrementaldecoder("utf-8")


class StoredValues:
    """Large values in the server, which are stored under separate keys and transferred with a client of their own."""

    def __init__(self, client: Client, ask: Ask) -> None:
        self._client, self._ask = client, ask

    async def store(self, key: str, value: bytes | str, seconds: int) -> None:
        """Store a value that expires after some seconds. Raises OutOfMemory."""
        wait = len(value) / SLOWEST
        await self._ask(lambda: self._client.call(key, "SET", key, value, "EX", seconds, large=True), wait)

    async def fetch(self, key: str, length: int) -> bytes | None:
        """Read a value of known length in pieces. Its key must never get another value. Returns None if it doesn't exist."""
        return await self._ask(lambda: self._joined_pieces(key, length, PIECE), length / SLOWEST)

    async def fetch_text(self, key: str, length: int) -> str | None:
        """Read a string like `fetch`, and decode each piece as it arrives. `length` is in bytes."""
        return await self._ask(lambda: self._text(key, length), length / SLOWEST)

    async def fetch_whole(self, key: str, length: int) -> bytes | None:
        """Read a value of known length in one piece, because it may be replaced meanwhile. Returns None if it doesn't exist."""
        return await self._ask(lambda: self._joined_pieces(key, length, length), length / SLOWEST)

    async def _joined_pieces(self, key: str, length: int, most: int) -> bytes | None:
        pieces: list[bytes] = []
        if not await self._pieces(key, length, most, pieces.append):
            return None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _text(self, key: str, length: int) -> str | None:
        decode, pieces = _text_decoder("surrogatepass").decode, list[str]()
        if not await self._pieces(key, length, PIECE, lambda piece: pieces.append(decode(piece))):
            return None
        pieces.append(decode(b"", True))
        return "".join(pieces)

    async def _pieces(self, key: str, length: int, most: int, take: Callable[[bytes], None]) -> bool:
        """Pass each piece of a value to `take`. Returns False if the value doesn't exist, or disappears between two pieces."""
        for begin in range(0, length, most):
            end = min(begin + most, length)
            piece = await self._client.call(key, "GETRANGE", key, begin, end - 1, large=True)
            if piece is None or len(piece) != end - begin:
                return False
            take(piece)
        return True


class LargeValues:
    """Store for the large values of a process's entries and replies. `threshold` is in bytes, and may be infinite."""

    def __init__(self, stored: StoredValues, threshold: float) -> None:
        self.threshold = threshold
        self._stored = stored
        self._secret = secrets.token_bytes(16)
        self._slots = FairSlots(AT_ONCE)
        self._outputs = 0

    def is_large(self, value: Value | None) -> bool:
        return value is not None and len(value) > self.threshold

    def name_of(self, entry: Entry) -> str:
        """Return the kind and token of a large entry's input. They are always the same for a submission."""
        submission = encode((entry.gateway, *entry.submission))
        letter = kind_of(entry.input).letter
        kind = letter.upper() if entry.parameters else letter
        return kind + _token(hashlib.blake2b(submission, key=self._secret, digest_size=8).digest())

    async def bring(self, queue: str, entries: Sequence[Entry]) -> None:
        """Store the inputs of large entries next to the queue with the key prefix `queue`. After OutOfMemory or BrokerUnavailable,
        some may have been stored."""
        await asyncio.gather(*(self._bring(f"{queue}P:{self.name_of(entry)[1:]}", entry) for entry in entries))

    async def _bring(self, key: str, entry: Entry) -> None:
        seconds = math.ceil(entry.timeout) + GRACE_SECONDS
        async with self._slots.of(entry.tenant):
            await self._stored.store(key, content_of(entry), seconds)

    async def input_of(self, queue: str, stored: StoredEntry) -> Apart | None:
        """Return a claimed entry's input and parameters if they are stored separately. None if they aren't, or are gone."""
        if (apart := stored.apart) is None:
            return None
        return await self.read_input(f"{queue}P:{apart[0][1:]}", stored.tenant, apart)

    async def read_input(self, key: str, tenant: str, apart: StoredApart, *, whole: bool = False) -> Apart | None:
        """Read the input and parameters stored under a key, or return None if they don't exist or have another length. Pass `whole`
        if another entry's input may replace them while they are read."""
        name, length = apart
        async with self._slots.of(tenant):
            content = await (self._stored.fetch_whole if whole else self._stored.fetch)(key, length)
        if content is None or len(content) != length:
            return None
        kind, parameters = name[:1], b""
        if kind.isupper():
            start = PREFIX + int.from_bytes(content[:PREFIX], "big")
            kind, parameters, content = kind.lower(), content[PREFIX:start], content[start:]
        return KIND_OF_LETTER[kind].of(content), parameters

    async def bring_output(self, queue: str, value: Value, tenant: str) -> str:
        """Store a tenant's output next to a queue. Returns its kind and token."""
        self._outputs += 1
        digest = hashlib.blake2b(b"%d" % self._outputs, key=self._secret, digest_size=8).digest()
        name = kind_of(value).letter + _token(digest)
        content = value if isinstance(value, str) and value.isascii() else octets(value)
        async with self._slots.of(tenant):
            await self._stored.store(f"{queue}R:{name[1:]}", content, OUTPUT_SECONDS)
        return name

    async def output_of(
        self, queue: str, name: str, length: int, tenant: str, wanted: Callable[[], bool] = lambda: True
    ) -> Value | None:
        """Read a tenant's output. Return None if it doesn't exist, or if it is no longer `wanted` when its turn comes."""
        key = f"{queue}R:{name[1:]}"
        async with self._slots.of(tenant):
            if not wanted():
                return None
            if name[0] == TEXT:
                return await self._stored.fetch_text(key, length)
            content = await self._stored.fetch(key, length)
        return None if content is None or len(content) != length else KIND_OF_LETTER[name[0]].of(content)


def content_of(entry: Entry) -> bytes:
    """Return the bytes that are stored for a large entry."""
    if not entry.parameters:
        return octets(entry.input)
    return b"".join((len(entry.parameters).to_bytes(PREFIX, "big"), entry.parameters, octets(entry.input)))


def length_of(entry: Entry) -> int:
    """Return the length of `content_of(entry)`."""
    return len(octets(entry.input)) + (PREFIX + len(entry.parameters) if entry.parameters else 0)


def digest_of(entry: Entry) -> str:
    """Return the digest of an entry's stored bytes, as computed by the server's functions."""
    return hashlib.sha1(content_of(entry), usedforsecurity=False).hexdigest()


def _token(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")

"""Table of live API keys in memory, a million of them if need be.

No step takes long, however many keys there are. They lie in many buckets, as one large one would stand still while
it grows, and is let go of in one go. A key is packed into one piece of bytes, which takes little room and gives the
garbage collector nothing to look at. A piece begins with the key's end, so that ended keys are found by comparing
bytes.

A *reading* goes through all keys of the store: keys that it has not met are dropped at its end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import inf

import msgspec

from headway.model import ApiKey, ModelLimit

BUCKETS = 1024
_READINGS = 256
_ENDS = struct.Struct(">d")


class Rights(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Part of a key that requests need; see `headway.model.ApiKey`."""

    digest: bytes
    user: str
    tenant: str
    tier: str
    models: tuple[str, ...]
    rate: float | None
    burst: float | None
    model_limits: tuple[ModelLimit, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Rights).decode


def pack(key: ApiKey, reading: int = 0) -> bytes:
    """Pack a key. Bytes of earlier ends, none before 1970, compare as less."""
    ends = inf if key.expires_at is None else key.expires_at
    rights = Rights(key.digest, key.user, key.tenant, key.tier, key.models, key.rate, key.burst, key.model_limits)
    return _ENDS.pack(ends) + bytes((reading,)) + _encode(rights)


def unpack(packed: bytes) -> tuple[float, Rights]:
    """End of a packed key (Unix time in seconds, infinite for none) and its rights."""
    return _ENDS.unpack_from(packed)[0], _decode(memoryview(packed)[9:])


class KeyTable:
    """Keys by their ids.

    Attributes:
        changes: number that grows with whatever changes what `find` says.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._buckets: list[dict[str, bytes]] = [{} for _ in range(BUCKETS)]
        self._reading = 0
        self._swept = 0

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def find(self, id: str) -> bytes | None:
        """Packed form of a key. It is one and the same object until the store tells of the key again."""
        return self._buckets[hash(id) % BUCKETS].get(id)

    def put(self, key: ApiKey, now: float) -> None:
        """Keep a key, or drop it if it has ended by Unix time `now`."""
        self.changes += 1
        bucket = self._buckets[hash(key.id) % BUCKETS]
        if key.expires_at is not None and key.expires_at <= now:
            bucket.pop(key.id, None)
        else:
            bucket[key.id] = pack(key, self._reading)

    def drop_ended(self, now: float, buckets: int) -> None:
        """Drop the keys that have ended by Unix time `now` from that many `buckets`, others with each call."""
        self.changes += 1
        limit = _ENDS.pack(now)
        for _ in range(buckets):
            bucket = self._buckets[self._swept]
            self._swept = (self._swept + 1) % BUCKETS
            for id in [id for id, packed in bucket.items() if packed[:8] <= limit]:
                del bucket[id]

    def begin_reading(self) -> None:
        """Begin a reading. Keys that are put from now on have been met."""
        self._reading = (self._reading + 1) % _READINGS

    def end_reading(self) -> Iterator[None]:
        """Drop the keys that were not met since the reading began; yields wherever there may be a pause.

        It stops early once another reading begins.
        """
        reading = self._reading
        for bucket in self._buckets:
            if reading != self._reading:
                return
            self.changes += 1
            for id in [id for id, packed in bucket.items() if packed[8] != reading]:
                del bucket[id]
            yield

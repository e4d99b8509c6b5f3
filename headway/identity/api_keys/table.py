"""Table of live API keys, with room for a million.

No step takes long, however many keys there are. They are spread over many small dictionaries, because a large one blocks while
it grows and when it is freed. A key is packed into bytes, which take little room and give the garbage collector nothing to
visit. They begin with the key's end, so that ended keys are found by comparing bytes.

A *reading* goes through all keys of the store. Keys that it has not met are dropped at its end.
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
    """The part of an `ApiKey` that requests need."""

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
    """Pack a key. Packed keys compare by their ends, from 1970 on."""
    ends = inf if key.expires_at is None else key.expires_at
    rights = Rights(key.digest, key.user, key.tenant, key.tier, key.models, key.rate, key.burst, key.model_limits)
    return _ENDS.pack(ends) + bytes((reading,)) + _encode(rights)


def unpack(packed: bytes) -> tuple[float, Rights]:
    """Return the end (Unix time in seconds, infinite for none) and the rights of a packed key."""
    return _ENDS.unpack_from(packed)[0], _decode(memoryview(packed)[9:])


class KeyTable:
    """Packed keys by id. `changes` grows whenever an answer of `find` may have changed."""

    def __init__(self) -> None:
        self.changes = 0
        self._buckets: list[dict[str, bytes]] = [{} for _ in range(BUCKETS)]
        self._reading = 0
        self._swept = 0

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def find(self, id: str) -> bytes | None:
        """Return a packed key, which stays the same object until the store reports the key again."""
        return self._buckets[hash(id) % BUCKETS].get(id)

    def put(self, key: ApiKey, now: float) -> None:
        """Store a key, or drop it if it has ended by Unix time `now`."""
        self.changes += 1
        bucket = self._buckets[hash(key.id) % BUCKETS]
        if key.expires_at is not None and key.expires_at <= now:
            bucket.pop(key.id, None)
        else:
            bucket[key.id] = pack(key, self._reading)

    def drop_ended(self, now: float, buckets: int) -> None:
        """Drop keys that have ended by Unix time `now` from the next `buckets` buckets."""
        self.changes += 1
        limit = _ENDS.pack(now)
        for _ in range(buckets):
            bucket = self._buckets[self._swept]
            self._swept = (self._swept + 1) % BUCKETS
            for id in [id for id, packed in bucket.items() if packed[:8] <= limit]:
                del bucket[id]

    def begin_reading(self) -> None:
        """Begin a reading, which has met every key that is stored from now on."""
        self._reading = (self._reading + 1) % _READINGS

    def end_reading(self) -> Iterator[None]:
        """Drop the keys that the reading has not met. Yield where there may be a pause. Stop if another reading begins."""
        reading = self._reading
        for bucket in self._buckets:
            if reading != self._reading:
                return
            self.changes += 1
            for id in [id for id, packed in bucket.items() if packed[8] != reading]:
                del bucket[id]
            yield

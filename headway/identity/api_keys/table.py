"""Table of live API keys in memory, a million of them if need be.

No step takes long, however many keys there are. They lie in many small tables, as one large one would stand still while
it grows, and is let go of in one go. A key is packed into one piece of bytes, which takes little room and gives the
garbage collector nothing to look at. A piece begins with the key's end, so that ended keys are found by comparing
bytes.

A *round* is one reading of all keys: keys that no round has met any more are dropped at its end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import inf

import msgspec

from headway.model import ApiKey

SHARDS = 1024
_ROUNDS = 256
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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Rights).decode


def pack(key: ApiKey, round: int = 0) -> bytes:
    """Pack a key. Bytes of earlier ends, none before 1970, compare as less."""
    ends = inf if key.expires_at is None else key.expires_at
    rights = Rights(key.digest, key.user, key.tenant, key.tier, key.models, key.rate, key.burst)
    return _ENDS.pack(ends) + bytes((round,)) + _encode(rights)


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
        self._shards: list[dict[str, bytes]] = [{} for _ in range(SHARDS)]
        self._round = 0
        self._swept = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def find(self, id: str) -> bytes | None:
        """Packed form of a key. It is one and the same object until the store tells of the key again."""
        return self._shards[hash(id) % SHARDS].get(id)

    def put(self, key: ApiKey, now: float) -> None:
        """Keep a key, or drop it if it has ended by Unix time `now`."""
        self.changes += 1
        shard = self._shards[hash(key.id) % SHARDS]
        if key.expires_at is not None and key.expires_at <= now:
            shard.pop(key.id, None)
        else:
            shard[key.id] = pack(key, self._round)

    def drop_ended(self, now: float, shards: int) -> None:
        """Drop the keys that have ended by Unix time `now` from `shards` of the small tables, others with each call."""
        self.changes += 1
        limit = _ENDS.pack(now)
        for _ in range(shards):
            shard = self._shards[self._swept]
            self._swept = (self._swept + 1) % SHARDS
            for id in [id for id, packed in shard.items() if packed[:8] <= limit]:
                del shard[id]

    def begin_round(self) -> None:
        """Begin a reading of all keys. Keys that are put from now on have been met."""
        self._round = (self._round + 1) % _ROUNDS

    def end_round(self) -> Iterator[None]:
        """Drop the keys that were not met since the round began; yields wherever there may be a pause.

        It stops early once another round begins.
        """
        round = self._round
        for shard in self._shards:
            if round != self._round:
                return
            self.changes += 1
            for id in [id for id, packed in shard.items() if packed[8] != round]:
                del shard[id]
            yield

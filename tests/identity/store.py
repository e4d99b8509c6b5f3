"""A store of keys in memory, which a test can put out of reach."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from headway.core.rotation import check_new
from headway.errors import StoreUnavailable
from headway.model import Key


class StoreInMemory:
    """See `headway.ports.KeyStore`.

    Arguments:
        keys: in it at first.

    Attributes:
        away: each call fails while it is set.
        stuck: each call takes for ever while it is set.
        opened, closed: how often it was.
    """

    def __init__(self, *keys: Key) -> None:
        self._keys = {key.id: key for key in keys}
        self._revisions = dict.fromkeys(self._keys, 1)
        self._revision = 1
        self.away = self.stuck = False
        self.opened = self.closed = 0

    async def open(self) -> None:
        await self._reached()
        self.opened += 1

    async def add(self, key: Key) -> None:
        await self._reached()
        check_new(key, self._keys.values())
        self._put(key)

    async def get(self, id: str) -> Key | None:
        await self._reached()
        return self._keys.get(id)

    async def expire(self, id: str, at: float) -> bool:
        await self._reached()
        key = self._keys.get(id)
        if key is None:
            return False
        self._put(msgspec.structs.replace(key, expires_at=at if key.expires_at is None else min(at, key.expires_at)))
        return True

    async def keys(self) -> Sequence[Key]:
        await self._reached()
        return sorted(self._keys.values(), key=lambda key: (key.created_at, key.id))

    async def changes(self, since: int) -> tuple[int, Sequence[Key]]:
        await self._reached()
        return self._revision, [self._keys[id] for id, revision in self._revisions.items() if revision > since]

    async def close(self) -> None:
        self.closed += 1

    def forget(self, id: str) -> None:
        """Remove a key as by hand, which no revision tells of."""
        del self._keys[id], self._revisions[id]

    def restore(self, *keys: Key) -> None:
        """Be a copy from earlier on, with these keys."""
        self._keys = {key.id: key for key in keys}
        self._revisions = dict.fromkeys(self._keys, 1)
        self._revision = 1

    def _put(self, key: Key) -> None:
        self._revision += 1
        self._keys[key.id], self._revisions[key.id] = key, self._revision

    async def _reached(self) -> None:
        if self.stuck:
            await asyncio.Event().wait()
        if self.away:
            raise StoreUnavailable("the store is away")

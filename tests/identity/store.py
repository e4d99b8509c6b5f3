"""An in-memory key store that tests can make unavailable."""

import asyncio
import itertools
from collections.abc import Sequence

import msgspec

from headway.errors import StoreUnavailable
from headway.model import ApiKey
from headway.model.identity import check_new
from headway.ports import KeyChanges, KeyMark

_marks = itertools.count()


class StoreInMemory:
    """See `headway.ports.KeyStore`. Starts with `keys`.
    away: while set, each call fails.
    write_blocked: while set, each call hangs.
    slow_from_start: while set, each call that reads from the first key on hangs.
    opened, closed: number of times it was.
    """

    def __init__(self, *keys: ApiKey) -> None:
        self.restore(*keys)
        self.slow_from_start = False
        self.away = self.write_blocked = False
        self.opened = self.closed = 0

    async def open(self) -> None:
        await self._reached()
        self.opened += 1

    async def add(self, key: ApiKey) -> None:
        await self._reached()
        check_new(key, self._keys.values())
        self._put(key)

    async def get(self, id: str) -> ApiKey | None:
        await self._reached()
        return self._keys.get(id)

    async def expire(self, id: str, at: float) -> bool:
        await self._reached()
        key = self._keys.get(id)
        if key is None:
            return False
        self._put(msgspec.structs.replace(key, expires_at=at if key.expires_at is None else min(at, key.expires_at)))
        return True

    async def keys(self) -> Sequence[ApiKey]:
        await self._reached()
        return sorted(self._keys.values(), key=lambda key: (key.created_at, key.id))

    async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
        await self._reached()
        if self.slow_from_start and not since.revision:
            await asyncio.Event().wait()
        if since.mark and self._marks.get(since.revision) != since.mark:
            return None
        later = sorted((revision, id) for id, revision in self._revisions.items() if revision > since.revision)[:limit]
        upto = KeyMark(later[-1][0], self._marks[later[-1][0]]) if later else since
        return KeyChanges([self._keys[id] for _, id in later], upto, len(later) == limit)

    async def latest(self) -> KeyMark:
        await self._reached()
        return KeyMark(self._revision, self._marks.get(self._revision, ""))

    async def remove_ended(self, before: float, limit: int) -> int:
        await self._reached()
        ended = [
            id
            for id, key in self._keys.items()
            if key.expires_at is not None and max(key.expires_at, key.created_at) < before
        ][:limit]
        for id in ended:
            self.forget(id)
        return len(ended)

    async def close(self) -> None:
        self.closed += 1

    def forget(self, id: str) -> None:
        del self._keys[id], self._revisions[id]

    def restore(self, *keys: ApiKey) -> None:
        """Go back to an earlier copy that has these keys."""
        self._keys = {key.id: key for key in keys}
        self._revisions = {id: number for number, id in enumerate(self._keys, start=1)}
        self._revision = len(self._keys)
        self._marks = {number: f"{next(_marks)}" for number in range(1, self._revision + 1)}

    def _put(self, key: ApiKey) -> None:
        self._revision += 1
        self._keys[key.id], self._revisions[key.id] = key, self._revision
        self._marks[self._revision] = f"{next(_marks)}"

    async def _reached(self) -> None:
        if self.write_blocked:
            await asyncio.Event().wait()
        if self.away:
            raise StoreUnavailable("the store is away")

"""Warning at the start of API keys in the ledger's database that no setting asks for.

An operator who has made keys there most likely wants them to be asked for, and a forgotten setting would let everybody
in unseen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.errors import SettingError, StoreUnavailable
from headway.ports import KeyMark, KeyStore
from headway.runtime.logger import get_logger
from headway.runtime.periodic import BareResource
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

PAGE = 500
"""Keys that are read at once."""
AGAIN = 10.0
"""Seconds until a store that did not answer is asked again."""


class UnusedKeys(BareResource):
    """A `lifecycle.Resource` that counts the keys once, and logs their number. It keeps nothing from starting.

    Arguments:
        store: builds the store of the ledger's database.
        who: words for those who are let in without keys.
        wall: Unix time in seconds, by which keys expire.
    """

    def __init__(self, store: Callable[[], KeyStore], who: str, wall: Callable[[], float]) -> None:
        self._store = store
        self._who = who
        self._wall = wall

    def start(self, supervisor: Supervisor) -> None:
        """Start counting."""
        supervisor.start("unused keys", self._look)

    async def _look(self) -> None:
        while True:
            try:
                count = await self._count()
            except StoreUnavailable:
                await asyncio.sleep(AGAIN)
                continue
            except SettingError:
                return  # There is no place for keys, so there are none.
            if count:
                hint = "Set --keys ledger to ask for them, or revoke them."
                log.warning("API keys in the ledger are not used", keys=count, let_in=self._who, hint=hint)
            return

    async def _count(self) -> int:
        """Number of keys that have not ended."""
        store, count, mark = self._store(), 0, KeyMark()
        try:
            await store.open()
            while True:
                found = await store.changes(mark, PAGE)
                if found is None:
                    return count
                now = self._wall()
                count += sum(key.expires_at is None or key.expires_at > now for key in found.keys)
                if not found.more:
                    return count
                mark = found.upto
        finally:
            await store.close()

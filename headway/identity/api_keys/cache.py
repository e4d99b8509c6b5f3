"""Cache of a store of API keys: requests are authenticated from memory, without asking the store.

    store ──changes, each second──▶ cache ◀──identify── each request
          ──all keys, in bites────▶

A key that is added or revoked is known after the next refresh; one that expires ends at its instant. While the store is
away the cache serves on with what it last heard. Once the store is found damaged every key is refused, as the cache
cannot know which keys were revoked.

The changes come first, and never wait for the reading of all keys. That reading begins anew at once when the store
turns out to have another history than before, as after a failover that lost the last changes. Otherwise it begins anew
now and then, for what a store cannot tell: a row removed by hand. Ended keys are not held; the store removes them after
`Settings.keys_retention_s`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from hmac import compare_digest
from math import inf
from typing import TypeVar

import msgspec

from headway.config import Settings
from headway.errors import SERVICE_OVERLOADED, RequestError, StoreCorrupted, StoreUnavailable
from headway.identity.api_keys.credential import digest, parse
from headway.identity.api_keys.table import BUCKETS, KeyTable, Rights, unpack
from headway.identity.principals import make_principal
from headway.model import ApiKey, Principal
from headway.ports import KeyIdentity, KeyMark, KeyStore, WatchedIdentity
from headway.runtime.counters import Counters
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic
from headway.runtime.supervisor import Supervisor

T = TypeVar("T")

log = get_logger(__name__)

ANSWER_WITHIN = 2.0
"""Seconds for which a call waits for the store."""
PAGE = 500
"""Keys that are read at once, which takes some milliseconds of the event loop."""
OPEN_PAGE = 4 * PAGE
"""Keys that are read at once before the first request is served."""
SEEN = 10_000
"""Good credentials that are remembered as they came, so that they need not be parsed again."""
AFRESH_EVERY = 60.0
"""Seconds from one reading of all keys to the next."""
BITE_PAUSE = 0.25
"""Seconds between two bites of that reading, where there is no hurry."""
TRY_AGAIN = 1.0
"""Seconds until a bite that failed is tried again."""
ENDED_SHARE = BUCKETS // 64
"""Part of the table that each refresh searches for ended keys: all of it once a minute."""
RETIRE_EVERY = 600.0
"""Seconds between two removals of long ended keys from the store."""
RETIRE_PAGE = 1000
RETRY_AFTER = 5.0
"""Seconds after which a client should ask again while keys cannot be checked."""
TIERS_TOLD = 100
"""Most keys of unknown tiers that the log names."""
_DAMAGED = "API keys cannot be checked, as the place where they are kept is damaged"


class _Good(msgspec.Struct, eq=False):
    """A key as it came: its id, packed form, principal and end, and the table's changes up to which that holds."""

    id: str
    kept: bytes
    principal: Principal | None
    ends: float
    upto: int


class _Reading:
    """One reading of all keys.

    Attributes:
        hurry: whether somebody waits for it.
        upto: the last change that was read.
        newer: ids of keys that changed meanwhile; what a bite says of them may be older.
    """

    def __init__(self, hurry: bool) -> None:
        self.hurry = hurry
        self.upto = 0
        self.newer: set[str] = set()


class ApiKeyCache(WatchedIdentity, KeyIdentity):
    """Identity of API keys, and a `lifecycle.Resource`.

    Arguments:
        store: store of the keys.
        settings: settings of tiers and rates, and the days for which ended keys are kept.
        counters: counters that take the age of the cached keys.
        clock: monotonic seconds.
        wall: Unix time in seconds, by which keys expire.
    """

    def __init__(
        self,
        store: KeyStore,
        settings: Settings,
        counters: Counters,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._store = store
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._wall = wall
        self._table = KeyTable()
        self._nobody = Rights(os.urandom(32), "", "", "", (), None, None)
        self._seen: dict[bytes, _Good] = {}
        """Good keys that came of late, by the BLAKE2b digest of the header value that held them."""
        self._turn = asyncio.Lock()
        """Lock of the calls for changes: a late answer must not undo what another call has heard."""
        self._upto = KeyMark()
        self._fresh: float | None = None
        """Monotonic instant at which all changes were last known; None before the first."""
        self._reading: _Reading | None = None
        self._hurry = asyncio.Event()
        self._looked = -inf
        """Unix time of the last refresh."""
        self._reached = self._whole = self._damaged = False
        self._misfits: set[str] = set()
        """Ids of keys that the log has named for their tiers."""

    def __len__(self) -> int:
        return len(self._table)

    async def open(self) -> None:
        """Reach the store and read all keys.

        Raises:
            StoreUnavailable: the store does not answer.
            SettingError: the store cannot be used.
        """
        if not self._reached:
            await self._store.open()
            self._reached = True
        await self._begin_anew()
        while self._reading is not None:
            await self._read_on(self._reading, OPEN_PAGE)
        await self.refresh()

    def start(self, supervisor: Supervisor) -> None:
        """Ask the store for changes each second from now on, and for all keys now and then."""
        Periodic("keys", self.refresh, self._clock, "store of keys").start(supervisor)
        supervisor.start("keys, all of them", self._read_all_on)
        supervisor.start("ended keys", self._retire_on)

    async def close(self) -> None:
        """Close the store. The cached keys stay known."""
        await self._store.close()

    # Who asks.

    def identify(self, authorization: bytes) -> Principal | None:
        """Principal of the key in an `Authorization` header (`Bearer KEY`); None for any other header.

        Raises:
            RequestError: the store of keys is damaged, so that no key can be checked.
        """
        if self._damaged:
            raise RequestError(_DAMAGED, code=SERVICE_OVERLOADED, retry_after=RETRY_AFTER)
        came = blake2b(authorization).digest()
        good = self._seen.get(came)
        if good is None or (good.upto != self._table.changes and not self._holds(good)):
            good = self._look_up(authorization)
            if good is None:
                return None
            if len(self._seen) >= SEEN:
                self._seen.clear()
            self._seen[came] = good
        return good.principal if self._wall() < good.ends else None

    def principal_of(self, key: str) -> Principal | None:
        if self._damaged:
            raise RequestError(_DAMAGED, code=SERVICE_OVERLOADED, retry_after=RETRY_AFTER)
        kept = self._table.find(key)
        if kept is None:
            return None
        ends, rights = unpack(kept)
        return self._principal(key, rights) if self._wall() < ends else None

    def watch(self, authorization: bytes) -> Callable[[], Principal | None] | None:
        """To make the digest of a key takes longer than all else that is asked of a key that came before."""
        came = blake2b(authorization).digest()
        if came not in self._seen:
            return None
        good = self._seen[came]

        def still() -> Principal | None:
            nonlocal good
            if good.upto == self._table.changes and not self._damaged:
                return good.principal if self._wall() < good.ends else None
            principal = self.identify(authorization)
            good = self._seen.get(came, good)
            return principal

        return still

    def _holds(self, good: _Good) -> bool:
        """Whether the store has not told of a change of a key since the key came."""
        if self._table.find(good.id) is not good.kept:
            return False
        good.upto = self._table.changes
        return True

    def _look_up(self, authorization: bytes) -> _Good | None:
        if authorization[:7].lower() != b"bearer ":
            return None
        found = parse(authorization[7:].strip())
        if found is None:
            return None
        id, secret = found
        # An unknown id costs the same: the time it takes must not tell which ids there are.
        kept = self._table.find(id)
        ends, rights = (inf, self._nobody) if kept is None else unpack(kept)
        if not compare_digest(digest(secret), rights.digest) or kept is None:
            return None
        return _Good(id, kept, self._principal(id, rights), ends, self._table.changes)

    def _principal(self, id: str, rights: Rights) -> Principal | None:
        if rights.tier not in self._settings.tier_names:
            return None
        return make_principal(
            self._settings,
            rights.user,
            rights.tenant,
            rights.tier,
            key=id,
            rate=rights.rate,
            burst=rights.burst,
            models=rights.models,
            model_limits=rights.model_limits,
        )

    # What has changed.

    @property
    def rereads(self) -> str:
        """See Rereadable."""
        return "keys"

    async def reread(self) -> None:
        """Ask for changes, and have all keys read again from now on. Raises StoreUnavailable."""
        await self.refresh()
        self._begin(hurry=True)

    async def refresh(self) -> None:
        """Ask for changes.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        async with self._turn:
            await self._refresh()

    async def _refresh(self) -> None:
        began = self._clock()
        if self._fresh is not None:
            self._counters.keys_age = began - self._fresh
        self._forget_ended()
        more = True
        while more:
            found = await self._asked(self._store.changes(self._upto, PAGE))
            if found is None:
                log.warning("the store of keys has another history than before; all keys are read again")
                await self._begin_anew()
                break
            for key in found.keys:
                self._learn(key)
                if self._reading is not None:
                    self._reading.newer.add(key.id)
            self._upto, more = found.upto, found.more
        if self._whole:
            self._fresh = began
            self._counters.keys_age = self._clock() - began

    def _learn(self, key: ApiKey) -> None:
        now = self._wall()
        self._table.put(key, now)
        if key.tier in self._settings.tier_names or key.id in self._misfits or len(self._misfits) >= TIERS_TOLD:
            return
        if key.expires_at is None or key.expires_at > now:
            self._misfits.add(key.id)
            log.error("a key has a tier that there is not; it is refused", key=key.id, tier=key.tier)

    def _forget_ended(self) -> None:
        now = self._wall()
        if now < self._looked - 1.0:  # Some may have ended by a clock that was wrong.
            self._begin(hurry=True)
        self._looked = now
        self._table.drop_ended(now, ENDED_SHARE)

    async def _asked(self, call: Awaitable[T]) -> T:
        """Answer of a call to the store.

        Raises:
            StoreUnavailable: the store does not answer in time.
        """
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                return await call
        except TimeoutError:
            raise StoreUnavailable(f"the store of keys does not answer within {ANSWER_WITHIN:g} s") from None
        except StoreCorrupted:
            self._damaged, self._whole = True, False
            self._begin(hurry=True)
            raise

    # All keys.

    async def _begin_anew(self) -> None:
        """Begin a new reading of all keys. Changes are asked for from here on; the reading brings all before them."""
        self._whole = False
        self._upto = await self._asked(self._store.latest())
        self._begin(hurry=True)

    def _begin(self, *, hurry: bool) -> None:
        self._reading = _Reading(hurry)
        self._table.begin_reading()
        if hurry:
            self._hurry.set()

    async def _read_on(self, reading: _Reading, limit: int = PAGE) -> None:
        """Read a bite, and end the reading with the last one."""
        found = await self._asked(self._store.changes(KeyMark(reading.upto), limit))
        if found is None or reading is not self._reading:
            return
        for key in found.keys:
            if key.id not in reading.newer:
                self._learn(key)
        reading.upto = found.upto.revision
        if found.more:
            return
        for _ in self._table.end_reading():
            await asyncio.sleep(0)
        if reading is self._reading:
            self._reading = None
            self._whole, self._damaged = True, False

    async def _read_all_on(self) -> None:
        failed = 0
        while True:
            if self._reading is None:
                await self._wait_for_turn()
            reading = self._reading
            if reading is None:
                continue
            try:
                await self._read_on(reading)
                pause, failed = 0.0 if reading.hurry else BITE_PAUSE, 0
            except StoreUnavailable as exc:
                pause, failed = TRY_AGAIN, failed + 1
                if failed == 3 and self._whole:
                    log.warning("not all keys can be read again; their changes are", error=str(exc))
            await asyncio.sleep(pause)

    async def _wait_for_turn(self) -> None:
        """Return when all keys are to be read again."""
        try:
            async with asyncio.timeout(AFRESH_EVERY):
                await self._hurry.wait()
        except TimeoutError:
            if self._reading is None:
                self._begin(hurry=False)
        self._hurry.clear()

    async def _retire_on(self) -> None:
        told = False
        while True:
            await asyncio.sleep(RETIRE_EVERY)
            try:
                await self._retire()
            except StoreUnavailable as exc:
                if not told:  # Where a service may only read, headway keys removes them.
                    log.info("ended keys stay in their store", error=str(exc))
                told = True

    async def _retire(self) -> None:
        before = self._wall() - self._settings.keys_retention_s
        removed = RETIRE_PAGE
        while removed == RETIRE_PAGE:
            removed = await self._store.remove_ended(before, RETIRE_PAGE)
            await asyncio.sleep(BITE_PAUSE)

"""Cache for a key store, so that requests are authenticated from memory and never wait for the store.

    store ──changes, every second──▶ cache ◀──identify── every request
          ──all keys, in pages────▶

New and revoked keys take effect at the next refresh. Keys expire on time. While the store is unreachable, the cached keys stay
valid. If the store is damaged, all keys are refused, because a revoked key might look valid.

All keys are reread every minute, because the change log doesn't include rows that were deleted by hand. They are also reread
immediately if the store's history differs, for example after a failover that lost the last changes. Changes still take effect
during a reading. Expired keys are removed from the cache immediately, and from the store after `Settings.keys_retention_s`."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Awaitable, Callable, Iterator
from hashlib import blake2b
from hmac import compare_digest
from math import inf
from typing import TypeVar

import msgspec

from headway.config import Settings
from headway.errors import SERVICE_OVERLOADED, RequestError, StoreCorrupted, StoreUnavailable
from headway.identity.api_keys.credential import digest, parse
from headway.identity.principals import make_principal
from headway.model import ApiKey, ModelLimit, Principal
from headway.ports import KeyIdentity, KeyMark, KeyStore, WatchedIdentity
from headway.runtime.counters import StoreCounts
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

BUCKETS = 1024
_READINGS = 256
_ENDS = struct.Struct(">d")


class Rights(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The fields of an `ApiKey` that requests need."""

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
    """Pack a key. Packed keys sort by their expiry times, if these are after 1970."""
    ends = inf if key.expires_at is None else key.expires_at
    rights = Rights(key.digest, key.user, key.tenant, key.tier, key.models, key.rate, key.burst, key.model_limits)
    return _ENDS.pack(ends) + bytes((reading,)) + _encode(rights)


def unpack(packed: bytes) -> tuple[float, Rights]:
    """Return when a packed key expires (Unix time in seconds, or infinity), and its rights."""
    return _ENDS.unpack_from(packed)[0], _decode(memoryview(packed)[9:])


class KeyTable:
    """Packed keys by id. `changes` is incremented whenever results of `find` may have changed."""

    def __init__(self) -> None:
        self.changes = 0
        self._buckets: list[dict[str, bytes]] = [{} for _ in range(BUCKETS)]
        self._reading = 0
        self._swept = 0

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def find(self, id: str) -> bytes | None:
        """Return a packed key. It remains the same object until the store reports the key again."""
        return self._buckets[hash(id) % BUCKETS].get(id)

    def put(self, key: ApiKey, now: float) -> None:
        """Store a key, or drop it if it has expired by Unix time `now`."""
        self.changes += 1
        bucket = self._buckets[hash(key.id) % BUCKETS]
        if key.expires_at is not None and key.expires_at <= now:
            bucket.pop(key.id, None)
        else:
            bucket[key.id] = pack(key, self._reading)

    def drop_ended(self, now: float, buckets: int) -> None:
        """Drop keys that have expired by Unix time `now` from the next `buckets` buckets."""
        self.changes += 1
        limit = _ENDS.pack(now)
        for _ in range(buckets):
            bucket = self._buckets[self._swept]
            self._swept = (self._swept + 1) % BUCKETS
            for id in [id for id, packed in bucket.items() if packed[:8] <= limit]:
                del bucket[id]

    def begin_reading(self) -> None:
        """Start reading all keys. Keys that are put from now on count as read."""
        self._reading = (self._reading + 1) % _READINGS

    def end_reading(self) -> Iterator[None]:
        """Drop the keys that weren't read. Yield whenever the caller may pause. Stop if a new reading of all keys has begun."""
        reading = self._reading
        for bucket in self._buckets:
            if reading != self._reading:
                return
            self.changes += 1
            for id in [id for id, packed in bucket.items() if packed[8] != reading]:
                del bucket[id]
            yield


T = TypeVar("T")

ANSWER_WITHIN = 2.0  # Maximum seconds for a call to the store.
PAGE = 500  # Keys per page. A page blocks the event loop for a few milliseconds.
OPEN_PAGE = 4 * PAGE  # Keys per page before the first request is served.
SEEN = 10_000  # Maximum number of valid header values to remember, so that they needn't be parsed again.
REREAD_EVERY = 60.0  # Seconds between readings of all keys.
PAGE_PAUSE = 0.25  # Seconds between pages while nobody is waiting for them.
TRY_AGAIN = 1.0  # Seconds before a failed page is retried.
ENDED_SHARE = BUCKETS // 64  # Buckets that each refresh searches for expired keys. All of them take about a minute.
RETIRE_EVERY = 600.0  # Seconds between removals of old expired keys from the store.
RETIRE_PAGE = 1000
RETRY_AFTER = 5.0  # Seconds after which clients should try again while keys cannot be checked.
TIERS_LOGGED = 100
_DAMAGED = "API keys cannot be checked, because their store is damaged"


class _Good(msgspec.Struct, eq=False):
    """Cached result for a valid header value. Once the table's `changes` exceed `upto`, check that it still has `packed`."""

    id: str
    packed: bytes
    principal: Principal | None
    ends: float
    upto: int


class _Reading:
    """State of reading all keys. If `hurry`, requests are waiting for it. `upto` is the revision of the last key read. The keys in
    `newer` have changed since the start, so pages may contain outdated versions of them."""

    def __init__(self, hurry: bool) -> None:
        self.hurry = hurry
        self.upto = 0
        self.newer: set[str] = set()


class ApiKeyCache(WatchedIdentity, KeyIdentity):
    """Identity for API keys, and a `lifecycle.Resource`. Sets the age of the cached keys in `counters`. `wall` returns Unix time."""

    def __init__(
        self,
        store: KeyStore,
        settings: Settings,
        counters: StoreCounts,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._store, self._settings, self._counters, self._clock, self._wall = store, settings, counters, clock, wall
        self._table = KeyTable()
        self._nobody = Rights(os.urandom(32), "", "", "", (), None, None)
        self._seen: dict[bytes, _Good] = {}  # Recent valid header values by BLAKE2b digest.
        self._turn = asyncio.Lock()  # Held while reading changes, so that a late answer doesn't undo newer ones.
        self._upto = KeyMark()
        self._fresh: float | None = None  # Monotonic time when the cache was last up to date; None at first.
        self._reading: _Reading | None = None
        self._hurry = asyncio.Event()
        self._looked = -inf  # Unix time of the last refresh.
        self._reached = self._whole = self._damaged = False
        self._misfits: set[str] = set()

    def __len__(self) -> int:
        return len(self._table)

    async def open(self) -> None:
        """Open the store and read all keys. Raises StoreUnavailable, or SettingError if the store is unusable."""
        if not self._reached:
            await self._store.open()
            self._reached = True
        await self._start_over()
        while self._reading is not None:
            await self._read_on(self._reading, OPEN_PAGE)
        await self.refresh()

    def start(self, supervisor: Supervisor) -> None:
        Periodic("keys", self.refresh, self._clock, "store of keys").start(supervisor)
        supervisor.start("keys, all of them", self._read_all_on)
        supervisor.start("ended keys", self._retire_forever)

    async def close(self) -> None:
        await self._store.close()

    # Requests.

    def identify(self, authorization: bytes) -> Principal | None:
        """Return the principal of a header value (`Bearer KEY`), or None if the key is invalid. Raises RequestError if the
        store is damaged."""
        if self._damaged:
            raise RequestError(_DAMAGED, code=SERVICE_OVERLOADED, retry_after=RETRY_AFTER)
        header_digest = blake2b(authorization).digest()
        good = self._seen.get(header_digest)
        if good is None or (good.upto != self._table.changes and not self._holds(good)):
            good = self._look_up(authorization)
            if good is None:
                return None
            if len(self._seen) >= SEEN:
                self._seen.clear()
            self._seen[header_digest] = good
        return good.principal if self._wall() < good.ends else None

    def principal_of(self, key: str) -> Principal | None:
        if self._damaged:
            raise RequestError(_DAMAGED, code=SERVICE_OVERLOADED, retry_after=RETRY_AFTER)
        packed = self._table.find(key)
        if packed is None:
            return None
        ends, rights = unpack(packed)
        return self._principal(key, rights) if self._wall() < ends else None

    def watch(self, authorization: bytes) -> Callable[[], Principal | None] | None:
        """Return a function that checks a known header value again without computing its digest, the most expensive step."""
        seen = blake2b(authorization).digest()
        if seen not in self._seen:
            return None
        good = self._seen[seen]

        def still() -> Principal | None:
            nonlocal good
            if good.upto == self._table.changes and not self._damaged:
                return good.principal if self._wall() < good.ends else None
            principal = self.identify(authorization)
            good = self._seen.get(seen, good)
            return principal

        return still

    def _holds(self, good: _Good) -> bool:
        if self._table.find(good.id) is not good.packed:
            return False
        good.upto = self._table.changes
        return True

    def _look_up(self, authorization: bytes) -> _Good | None:
        if authorization[:7].lower() != b"bearer ":
            return None
        parsed = parse(authorization[7:].strip())
        if parsed is None:
            return None
        id, secret = parsed
        # Unknown ids take the same time, so that nobody can find out which ids exist.
        packed = self._table.find(id)
        ends, rights = (inf, self._nobody) if packed is None else unpack(packed)
        if not compare_digest(digest(secret), rights.digest) or packed is None:
            return None
        return _Good(id, packed, self._principal(id, rights), ends, self._table.changes)

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

    # Changes.

    @property
    def rereads(self) -> str:
        return "keys"

    async def reread(self) -> None:
        await self.refresh()
        self._begin(hurry=True)

    async def refresh(self) -> None:
        """Read the changes from the store. Raises StoreUnavailable."""
        async with self._turn:
            await self._refresh()

    async def _refresh(self) -> None:
        began = self._clock()
        if self._fresh is not None:
            self._counters.keys_age = began - self._fresh
        self._forget_ended()
        more = True
        while more:
            changes = await self._asked(self._store.changes(self._upto, PAGE))
            if changes is None:
                log.warning("the key store's history has changed; reading all keys again")
                await self._start_over()
                break
            for key in changes.keys:
                self._learn(key)
                if self._reading is not None:
                    self._reading.newer.add(key.id)
            self._upto, more = changes.upto, changes.more
        if self._whole:
            self._fresh = began
            self._counters.keys_age = self._clock() - began

    def _learn(self, key: ApiKey) -> None:
        now = self._wall()
        self._table.put(key, now)
        if key.tier in self._settings.tier_names or key.id in self._misfits or len(self._misfits) >= TIERS_LOGGED:
            return
        if key.expires_at is None or key.expires_at > now:
            self._misfits.add(key.id)
            log.error("a key is refused, because its tier does not exist", key=key.id, tier=key.tier)

    def _forget_ended(self) -> None:
        now = self._wall()
        if now < self._looked - 1.0:  # The clock was set back, so keys may have been dropped too early.
            self._begin(hurry=True)
        self._looked = now
        self._table.drop_ended(now, ENDED_SHARE)

    async def _asked(self, call: Awaitable[T]) -> T:
        """Await a call to the store. Raises StoreUnavailable if the store doesn't respond in time."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                return await call
        except TimeoutError:
            raise StoreUnavailable(f"the key store did not respond within {ANSWER_WITHIN:g} s") from None
        except StoreCorrupted:
            self._damaged, self._whole = True, False
            self._begin(hurry=True)
            raise

    # All keys.

    async def _start_over(self) -> None:
        """Start reading all keys again, and read changes from the current mark on."""
        self._whole = False
        self._upto = await self._asked(self._store.latest())
        self._begin(hurry=True)

    def _begin(self, *, hurry: bool) -> None:
        self._reading = _Reading(hurry)
        self._table.begin_reading()
        if hurry:
            self._hurry.set()

    async def _read_on(self, reading: _Reading, limit: int = PAGE) -> None:
        page = await self._asked(self._store.changes(KeyMark(reading.upto), limit))
        if page is None or reading is not self._reading:
            return
        for key in page.keys:
            if key.id not in reading.newer:
                self._learn(key)
        reading.upto = page.upto.revision
        if page.more:
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
                pause, failed = 0.0 if reading.hurry else PAGE_PAUSE, 0
            except StoreUnavailable as exc:
                pause, failed = TRY_AGAIN, failed + 1
                if failed == 3 and self._whole:
                    log.warning("cannot reread all keys; still following their changes", error=str(exc))
            await asyncio.sleep(pause)

    async def _wait_for_turn(self) -> None:
        try:
            async with asyncio.timeout(REREAD_EVERY):
                await self._hurry.wait()
        except TimeoutError:
            if self._reading is None:
                self._begin(hurry=False)
        self._hurry.clear()

    async def _retire_forever(self) -> None:
        logged = False
        while True:
            await asyncio.sleep(RETIRE_EVERY)
            before, removed = self._wall() - self._settings.keys_retention_s, RETIRE_PAGE
            try:
                while removed == RETIRE_PAGE:
                    removed = await self._store.remove_ended(before, RETIRE_PAGE)
                    await asyncio.sleep(PAGE_PAUSE)
            except StoreUnavailable as exc:
                if not logged:  # With read-only access, this is left to `headway keys`.
                    log.info("expired keys cannot be removed from their store", error=str(exc))
                logged = True

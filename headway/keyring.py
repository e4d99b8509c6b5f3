"""The callers of a store of API keys, held in memory: who asks is told without asking the store.

    store ──changes, each second──▶ ring ◀──identify── each request

A key that is added or revoked is known after the next beat; one that expires ends at its instant. While the store is away
the ring serves on with what it last heard. Once the store is found damaged nobody is let in, as nobody knows what was revoked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from hashlib import sha256
from hmac import compare_digest
from math import inf
from typing import NamedTuple

import structlog

from headway.config import Settings
from headway.errors import SERVICE_OVERLOADED, RequestError, StoreCorrupted, StoreUnavailable
from headway.identity.api_key import digest, parse
from headway.identity.callers import make_caller
from headway.model import Caller, Key
from headway.ports import KeyStore
from headway.pulse import Pulse
from headway.supervisor import Supervisor
from headway.tally import Tally

log = structlog.get_logger(__name__)

ANSWER_WITHIN = 2.0
"""Seconds for which a beat waits for the store."""
SEEN = 10_000
"""Good keys that are remembered as they came, so that they need not be taken apart again."""
AFRESH_EVERY = 60.0
"""Seconds after which all keys are read again, for what a store cannot tell: a row removed by hand."""
RETRY_AFTER = 5.0
"""Seconds after which to ask again who is told that keys cannot be checked."""
_DAMAGED = "API keys cannot be checked, as the place where they are kept is damaged"


class _Held(NamedTuple):
    digest: bytes
    caller: Caller | None
    ends: float


class KeyRing:
    """The Identity of API keys, and a `lifecycle.Resource`.

    Arguments:
        store: where the keys are.
        settings: for tiers and rates.
        tally: is told how old the keys are that are gone by.
        clock: monotonic seconds.
        wall: Unix time, by which keys expire.
    """

    def __init__(
        self,
        store: KeyStore,
        settings: Settings,
        tally: Tally,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._store = store
        self._settings = settings
        self._tally = tally
        self._clock = clock
        self._wall = wall
        self._held: dict[str, _Held] = {}
        self._nobody = _Held(os.urandom(32), None, inf)
        self._seen: dict[bytes, _Held] = {}
        """Good keys that came of late, by the SHA-256 of what they came in."""
        self._revision = 0
        self._fresh: float | None = None
        self._whole = -inf
        self._reached = False
        self._damaged = False

    def __len__(self) -> int:
        return len(self._held)

    async def open(self) -> None:
        """Reach the store and read all keys.

        Raises:
            StoreUnavailable: it does not answer.
            SettingError: it will not do.
        """
        if not self._reached:
            await self._store.open()
            self._reached = True
        await self.refresh()

    def start(self, supervisor: Supervisor) -> None:
        """Ask the store for changes each second from now on."""
        Pulse("keys", self.refresh, self._clock, "store of keys").start(supervisor)

    async def close(self) -> None:
        """Let go of the store; the keys are known on."""
        await self._store.close()

    def identify(self, authorization: bytes) -> Caller | None:
        """The caller whose key this `Authorization` header carries (`Bearer KEY`); None for any other.

        Raises:
            RequestError: the store of keys is damaged: who has a key cannot be told.
        """
        if self._damaged:
            raise RequestError(_DAMAGED, code=SERVICE_OVERLOADED, retry_after=RETRY_AFTER)
        came = sha256(authorization).digest()
        held = self._seen.get(came)
        if held is None:
            held = self._look_up(authorization)
            if held is None:
                return None
            if len(self._seen) >= SEEN:
                self._seen.clear()
            self._seen[came] = held
        return held.caller if self._wall() < held.ends else None

    def _look_up(self, authorization: bytes) -> _Held | None:
        if authorization[:7].lower() != b"bearer ":
            return None
        found = parse(authorization[7:].strip())
        if found is None:
            return None
        id, secret = found
        # An unknown id costs the same: the time it takes must not tell which ids there are.
        held = self._held.get(id, self._nobody)
        return held if compare_digest(digest(secret), held.digest) else None

    async def refresh(self) -> None:
        """Hear of what has changed.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        try:
            await self._refresh()
            self._damaged = False
        except StoreCorrupted:
            self._damaged = True
            raise

    async def _refresh(self) -> None:
        began = self._clock()
        if self._fresh is not None:
            self._tally.keys_age = began - self._fresh
        afresh = began - self._whole >= AFRESH_EVERY
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                revision, keys = await self._store.changes(0 if afresh else self._revision)
                if revision < self._revision and not afresh:  # An older copy has taken the place of the store.
                    afresh = True
                    revision, keys = await self._store.changes(0)
        except TimeoutError:
            raise StoreUnavailable(f"the store of keys does not answer within {ANSWER_WITHIN:g} s") from None
        if keys or afresh:
            self._seen.clear()
        if afresh:
            self._held = {key.id: self._hold(key) for key in keys}
            self._whole = began
        else:
            self._held.update({key.id: self._hold(key) for key in keys})
        self._revision, self._fresh = revision, began
        self._tally.keys_age = self._clock() - began

    def _hold(self, key: Key) -> _Held:
        ends = inf if key.expires_at is None else key.expires_at
        known = self._held.get(key.id)
        try:
            caller = make_caller(
                self._settings,
                key.user,
                key.tenant,
                key.tier,
                key=key.id,
                rate=key.rate,
                burst=key.burst,
                models=key.models,
            )
        except ValueError:
            if self._wall() < ends and (known is None or known.caller is not None):
                log.error("a key has a tier that there is not; it is refused", key=key.id, tier=key.tier)
            return _Held(key.digest, None, ends)
        if known is not None and known.caller == caller:
            caller = known.caller
        return _Held(key.digest, caller, ends)

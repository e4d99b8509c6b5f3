"""Culprits: inputs that made the model fail. For a while they are not run again, and their callers ride apart.

A caller is a tenant and the user on whose behalf it asks or, without keys, a client's address. A caller rides apart, in batches of
its own, from the failure of one of its inputs alone until APART_SECONDS have passed without another. The more often its inputs
fail, the smaller these batches are.

A caller also rides apart if its output was left out of a batch because outputs were too large together, as all that ride with it
would wait for their transfer. Its batches are as large as the outputs allow."""

from __future__ import annotations

import hashlib
import math

import msgspec

from headway.core.values import octets
from headway.model import MOST_OUTPUT, Entry

CallerKey = tuple[str, str]  # Tenant, and user or address on whose behalf it asks.

APART_SECONDS = 30.0  # Seconds since its last culprit for which a caller rides apart.
MOST_APART = 16  # Limit on callers that ride apart. The one whose last culprit is longest ago is the first to return.
KNOWN_SECONDS = 180.0  # Seconds for which an input that failed alone is answered without a run.
MOST_KNOWN = 256  # Limit on known inputs of one tenant. The oldest are forgotten first.
MOST_TENANTS = 1000  # Limit on tenants with known inputs.
ALL_GENERATIONS = -1  # Generation of an input that stays known even if workers change.
GENERATION_STEP = 1e-6  # Shortest time in seconds between generations, which are numbered by their first instants.
SAME_INSTANT = 1e-3  # Seconds by which a batch may seem to have left before a generation that it belongs to.
ERROR_BYTES = 400  # Bytes kept of a known input's first error.
PRIOR = 32.0  # Successful inputs that a caller is credited with before its first culprit.
LONE_ROOM = 4 * MOST_OUTPUT  # Limit in bytes on outputs of a caller's own batch while nobody else asks.
MEMORY = 1024.0  # Inputs of a caller after which its counts are halved, so that later inputs weigh more.


def caller_of(entry: Entry) -> CallerKey:
    """Return the caller to whom an entry's failures are charged."""
    return entry.tenant, entry.caller


def digest(entry: Entry) -> bytes:
    """Return the digest of an input, within its model's queue, under which its failure is remembered."""
    hashed = hashlib.sha256(len(entry.parameters).to_bytes(8, "big"))
    hashed.update(entry.parameters)
    hashed.update(octets(entry.input) if isinstance(entry.input, str) else b"\0" + octets(entry.input))
    return hashed.digest()


def best_group(share: float, each: float) -> float:
    """Return how many inputs to run together so that a good answer costs the least GPU time, if a `share` of inputs is bad.

    A batch of n takes α + βn. One that fails, as about n·share of them do, is halved: log₂ n + 1 runs more, of 2n inputs together. So
    an input costs α/n + β + share·(α·(1 + log₂ n) + 2βn), which is least at this n. `share` is above 0 and at most 1; `each` is β/α."""
    searched = share / math.log(2.0)
    return 2.0 / (searched + math.sqrt(searched * searched + 8.0 * share * each))


class _Caller(msgspec.Struct):
    until: float
    ran: float = PRIOR
    bad: float = 0.0
    largest: int = 0


_Known = tuple[float, float, str]
_UNKNOWN: _Known = (-math.inf, 0.0, "")
_PAST = -2  # A past generation.


class Culprits:
    """Known callers and inputs of one queue."""

    __slots__ = ("_callers", "_generation", "_known", "active")

    def __init__(self) -> None:
        self._callers: dict[CallerKey, _Caller] = {}  # Callers, the one whose last culprit is longest ago first.
        # Known inputs by tenant: until when each is known, in which generation, and its error; the oldest first.
        self._known: dict[str, dict[bytes, _Known]] = {}
        self._generation = 0.0
        self.active = False  # True if there are any. It is a plain attribute, as it is read for each entry.

    def found(self, entry: Entry, now: float, killed: bool = False, error: str = "", left_at: float = math.inf) -> None:
        """Note an input that failed alone, with the error for its sender. If `killed`, it killed its worker in several runs. The
        workers may have changed since its last run began, at `left_at`."""
        self._set_apart(caller_of(entry), now)
        inputs = self._known.pop(entry.tenant, {})
        asked = digest(entry)
        inputs.pop(asked, None)
        # An exception from before the workers changed says nothing about those here now.
        generation = self._generation if left_at >= self._generation - SAME_INSTANT else _PAST
        kept = error.encode(errors="replace")[:ERROR_BYTES].decode(errors="ignore")
        inputs[asked] = now + KNOWN_SECONDS, ALL_GENERATIONS if killed else generation, kept
        self._known[entry.tenant] = inputs
        if len(inputs) > MOST_KNOWN:
            del inputs[next(iter(inputs))]
        if len(self._known) > MOST_TENANTS:
            del self._known[next(iter(self._known))]

    def left_out(self, key: CallerKey, size: int, now: float) -> None:
        caller = self._set_apart(key, now)
        caller.largest = max(caller.largest, size)

    def sends_large(self, key: CallerKey, now: float) -> bool:
        caller = self._callers.get(key)
        return caller is not None and caller.until > now and caller.largest > 0

    def _set_apart(self, key: CallerKey, now: float) -> _Caller:
        caller = self._callers.pop(key, None)
        if caller is None and len(self._callers) >= MOST_APART:
            del self._callers[next(iter(self._callers))]
        if caller is None or caller.until <= now:
            caller = _Caller(now)
        caller.until = now + APART_SECONDS
        self._callers[key] = caller
        self.active = True
        return caller

    def ran(self, key: CallerKey, count: int, clean: bool) -> None:
        """Note a run of `count` inputs of a caller that weren't suspect before."""
        caller = self._callers.get(key)
        if caller is not None:
            caller.ran += count
            caller.bad += not clean
            if caller.ran > MEMORY:
                caller.ran, caller.bad = caller.ran / 2.0, caller.bad / 2.0

    def rides_apart(self, key: CallerKey, now: float) -> bool:
        """Return True if a caller had culprits, or an output left out, in the last APART_SECONDS."""
        caller = self._callers.get(key)
        if caller is None:
            return False
        if caller.until <= now:
            del self._callers[key]
            self.active = bool(self._callers or self._known)
            return False
        return True

    def group_size(self, key: CallerKey, limit: int, each: float = 0.0, room: int = MOST_OUTPUT) -> int:
        """Return how many inputs of a caller to run together, with `room` bytes for large outputs; see `best_group`."""
        caller = self._callers.get(key)
        if caller is None:
            return limit
        if caller.largest:
            limit = min(limit, room // caller.largest)
        return max(1, min(limit, int(best_group(max(caller.bad, 1.0) / caller.ran, each) + 0.5)))

    def knows(self, entry: Entry, now: float) -> str | None:
        """Return the first error of an equal input of the entry's tenant that failed alone in the last KNOWN_SECONDS, else None."""
        inputs = self._known.get(entry.tenant)
        if not inputs or not entry.caller:
            return None
        until, generation, error = inputs.get(digest(entry), _UNKNOWN)
        if until <= now:
            self._tidy(entry.tenant, inputs, now)
            return None
        return error if generation in (self._generation, ALL_GENERATIONS) else None

    def renew(self, now: float = 0.0) -> None:
        """Begin a generation, as a worker came or left, or has another backend or other code. Inputs that only raised are
        forgotten, as their worker or old code may have been at fault."""
        self._generation = max(now, self._generation + GENERATION_STEP)

    def _tidy(self, tenant: str, inputs: dict[bytes, _Known], now: float) -> None:
        for asked in [asked for asked, (until, *_) in inputs.items() if until <= now]:
            del inputs[asked]
        if not inputs:
            del self._known[tenant]
        self.active = bool(self._callers or self._known)

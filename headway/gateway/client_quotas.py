"""Client quotas for connections, unfinished bodies and unread answers. They cover all ports of a process.

No client can take so much that others are shut out. A connection belongs to its tenant from its first request on. Before that, it
belongs to a common owner, the strangers. When the strangers' quota is used up, a new connection replaces the oldest idle one, so a
flood of idle connections doesn't shut anybody out.

Without authentication, a connection belongs to the client's address. A proxy is then a single owner, so by default there is no
limit per address."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Protocol

from headway.config import Settings
from headway.core.budget import GREED, Budget
from headway.errors import PAYLOAD_TOO_LARGE, RATE_LIMITED, SERVICE_OVERLOADED, RequestError
from headway.model import Failure

STRANGERS = "\0"  # Owner of connections that haven't sent a request yet.
REFUSED = "\1"  # Owner of connections beyond a quota. They are closed once their error has been sent.
TURNED_AWAY, TURNED_AWAY_SHARE = 64, 32  # Maximum refused connections: 64, or a 32nd of the total if that is less.
_LOOKED_AT = 64  # Maximum number of strangers' connections to search for an idle one.
UNHELD = 1 << 16  # If a request's outputs have no more bytes than this, they aren't counted.


class HeldBytes(Budget):
    """Budget for the bytes that clients hold. `freed`, if set, is called whenever bytes are released."""

    __slots__ = ("freed",)

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.freed: Callable[[], None] | None = None

    def give(self, owner: str, amount: int) -> None:
        super().give(owner, amount)
        if self.freed is not None:
            self.freed()


class AnswerRoom:
    """Room for the outputs of a request with several inputs, from the first output until the answer has been written. The
    outputs may have `most` bytes in total. `why` names the setting behind this limit, for the error. `held` is the number of
    bytes counted so far; 0 for a small answer."""

    __slots__ = ("_bytes", "_most", "_owner", "_why", "held")

    def __init__(self, bytes: Budget, owner: str, most: int, why: str = "memory_mb") -> None:
        self._bytes, self._owner, self._most, self._why = bytes, owner, most, why
        self.held = 0

    def hold(self, amount: int) -> Failure | None:
        """Grow to `amount` bytes. Returns a failure if this exceeds the limit of the request or its owner."""
        if amount > self._most:
            return too_large(self._most, self._why)
        more = amount - self.held if amount > UNHELD else 0
        if more > 0 and not self._bytes.take(self._owner, more):
            error = no_room(self._bytes.used(self._owner))
            return Failure(error.code, error.message, error.retry_after, error.reason)
        self.held += max(more, 0)
        return None

    def shrink(self, amount: int) -> None:
        if self.held > amount:
            self._bytes.give(self._owner, self.held - amount)
            self.held = amount


def too_large(most: int, why: str = "memory_mb") -> Failure:
    """Return the failure for a request whose outputs exceed `most` bytes in total."""
    message = f"the outputs exceed {most} bytes in total; ask for fewer in one request ({why})"
    return Failure(PAYLOAD_TOO_LARGE, message, None, "answer")


class CountedConnection(Protocol):
    """The part of a connection that the quotas need."""

    owner: str | None  # Name of the owner; None if the connection isn't counted.
    reserved: int  # Counted bytes of unfinished bodies.
    unfetched: int  # Counted bytes of answers that the client hasn't read.

    @property
    def silent(self) -> bool:
        """True while no request is in progress."""

    def shutdown(self) -> None:
        """Close immediately."""


class Quotas:
    """Quotas of one process. `bytes` is the budget for bodies, messages and answers."""

    def __init__(self, settings: Settings) -> None:
        self._named = bool(settings.keys or settings.jwt)
        self._total = settings.max_connections
        self._connections = Budget(settings.max_connections, GREED if self._named else 0)
        self.bytes = HeldBytes(settings.bodies_bytes)
        self._most_answer = settings.bodies_bytes // 2
        self._strangers: dict[CountedConnection, None] = {}
        self._slow: dict[str, dict[CountedConnection, None]] = {}

    def answer_room(self, owner: str, most: int = 0, why: str = "") -> AnswerRoom:
        """Return room for the outputs of an owner's request: half of the byte budget, or `most` if that is set and less."""
        if most and most < self._most_answer:
            return AnswerRoom(self.bytes, owner, most, why)
        return AnswerRoom(self.bytes, owner, self._most_answer)

    def fit(self, connections: int) -> None:
        """Lower the maximum number of connections to `connections` if it is higher."""
        connections = max(connections, 1)
        if connections < self._total:
            self._connections.free -= self._total - connections
            self._total = connections

    def enter(self, counted: CountedConnection, address: str) -> bool:
        """Count a new connection. Returns False if there is no room; the caller then sends an error and closes the connection. If the
        connection has no owner afterwards, there isn't even room for an error, so close it immediately."""
        if not self._named:
            if not self._connections.take(address, 1):
                self._let_linger(counted)
                return False
            counted.owner = address
            return True
        if not self._connections.take(STRANGERS, 1):
            oldest = next((other for other in islice(self._strangers, _LOOKED_AT) if other.silent), None)
            if oldest is not None:
                oldest.shutdown()
                self.leave(oldest)
            if oldest is None or not self._connections.take(STRANGERS, 1):
                self._let_linger(counted)
                return False
        counted.owner = STRANGERS
        self._strangers[counted] = None
        return True

    def too_many(self) -> RequestError:
        """Return the error for a connection that `enter` refused."""
        if not self._connections.free:
            return RequestError("too many connections are open", code=SERVICE_OVERLOADED, retry_after=1.0)
        return too_many("too many connections of this client are")

    def belong(self, counted: CountedConnection, tenant: str) -> None:
        """Assign a connection to the tenant of its first request. Raises RequestError if the tenant has too many connections; the caller
        then sends the error and closes the connection."""
        owner = counted.owner
        if not self._named or owner is None or owner == tenant:
            return
        self.leave(counted)
        if not self._connections.take(tenant, 1):
            if not self._let_linger(counted):
                counted.shutdown()
            raise too_many(f"{self._connections.used(tenant)} connections of this tenant are")
        counted.owner = tenant

    def _let_linger(self, counted: CountedConnection) -> bool:
        """Keep a refused connection until its error has been sent. Returns False if there are too many such connections."""
        if not self._connections.take(REFUSED, 1, max(1, min(TURNED_AWAY, self._total // TURNED_AWAY_SHARE))):
            return False
        counted.owner = REFUSED
        return True

    def leave(self, counted: CountedConnection) -> None:
        if counted.owner is not None:
            self.reserve(counted, 0)
            self.keep(counted, 0)
            self._connections.give(counted.owner, 1)
            self._strangers.pop(counted, None)
            counted.owner = None

    def reserve(self, counted: CountedConnection, amount: int) -> bool:
        """Set the counted bytes of a connection's bodies. If the owner has too many, return False and change nothing."""
        more = amount - counted.reserved
        if counted.owner is not None and more:
            if more < 0:
                self.bytes.give(counted.owner, -more)
            elif not self.bytes.take(counted.owner, more):
                return False
            counted.reserved = amount
        return True

    def keep(self, counted: CountedConnection, amount: int) -> None:
        """Set the counted bytes of unread answers. If the owner has too many, its slowest connections are closed."""
        owner = counted.owner
        if owner is None:
            return
        slow = self._slow.setdefault(owner, {})
        slow[counted] = None
        more = amount - counted.unfetched
        while more > 0 and not self.bytes.take(owner, more):
            oldest = next(iter(slow))
            if oldest is counted:
                more = 0  # A single answer may wait, no matter how large.
            else:
                oldest.shutdown()
                self.leave(oldest)
        if more < 0:
            self.bytes.give(owner, -more)
        counted.unfetched += more
        if not amount:
            del slow[counted]
            if not slow:
                del self._slow[owner]

    def no_room(self, counted: CountedConnection) -> RequestError:
        """Return the error for a body that `reserve` refused."""
        return no_room(0 if counted.owner is None else self.bytes.used(counted.owner))


def no_room(used: int) -> RequestError:
    """Return the error for a body or answer that doesn't fit. `used`: bytes that its owner already holds."""
    if not used:
        message = "too many bytes of bodies and answers are in transit (memory_mb)"
        return RequestError(message, code=SERVICE_OVERLOADED, retry_after=1.0, reason="bodies")
    message = f"{used} bytes of this caller's bodies and answers are in transit; use fewer at a time (memory_mb)"
    return RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="bodies")


def too_many(whose: str) -> RequestError:
    """Return the error for a connection beyond its owner's quota. `whose` is the beginning of the message."""
    message = f"{whose} already open; use fewer (max_connections)"
    return RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="connections")

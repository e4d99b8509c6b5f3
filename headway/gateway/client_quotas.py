"""Quotas of the clients of a process, through all of its ports: connections, and bytes of unfinished bodies and of answers.

No client's share keeps the others out. A connection is its tenant's from the first request on. Until then it is a
stranger's, and all strangers together are one owner: when they have had their share, the one that came first and has
not spoken makes room for the next, so that a flood of silent connections keeps nobody from speaking. Without
authentication, the owner is the client's address. A proxy in front is then one owner, and its connections are only
bounded if that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Protocol

from headway.config import Settings
from headway.core.budget import GREED, Budget
from headway.errors import PAYLOAD_TOO_LARGE, RATE_LIMITED, SERVICE_OVERLOADED, RequestError
from headway.model import Failure

STRANGERS = "\0"
"""Owner of the connections on which no request has come yet."""

REFUSED = "\1"
"""Owner of the connections that their tenant, or their address, has too many of. They last until they have their answer."""

TURNED_AWAY, TURNED_AWAY_SHARE = 64, 32
"""Most of these at once, and the part of all connections that they may be; further ones are cut off without an answer."""

_LOOKED_AT = 64
"""Most strangers that are looked at to find one that makes room."""

UNHELD = 1 << 16
"""Bytes of the outputs of one request up to which they are not counted, as most answers are read at once."""


class HeldBytes(Budget):
    """Budget of the bytes that clients hold.

    Attributes:
        freed: is told whenever there is more room; None while nobody waits for some.
    """

    __slots__ = ("freed",)

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.freed: Callable[[], None] | None = None

    def give(self, owner: str, amount: int) -> None:
        """Take bytes back from an owner."""
        super().give(owner, amount)
        if self.freed is not None:
            self.freed()


class AnswerRoom:
    """Room for the outputs of one request with several inputs, from the first that comes until its answer has left.

    Arguments:
        bytes: budget of the bytes that clients hold.
        owner: owner for whom they are counted.
        most: most bytes that the outputs may have together.
        why: what that bound comes from, for the message of a request that passes it.

    Attributes:
        held: bytes that are counted; 0 for a small answer.
    """

    __slots__ = ("_bytes", "_most", "_owner", "_why", "held")

    def __init__(self, bytes: Budget, owner: str, most: int, why: str = "memory_mb") -> None:
        self._bytes, self._owner, self._most, self._why = bytes, owner, most, why
        self.held = 0

    def hold(self, amount: int) -> Failure | None:
        """Hold `amount` bytes in all; the failure of the request when they are too many, for one or beside its owner's others."""
        if amount > self._most:
            return too_large(self._most, self._why)
        more = amount - self.held if amount > UNHELD else 0
        if more > 0 and not self._bytes.take(self._owner, more):
            error = no_room(self._bytes.used(self._owner))
            return Failure(error.code, error.message, error.retry_after, error.reason)
        self.held += max(more, 0)
        return None

    def shrink(self, amount: int) -> None:
        """Hold no more than `amount` bytes."""
        if self.held > amount:
            self._bytes.give(self._owner, self.held - amount)
            self.held = amount


def too_large(most: int, why: str = "memory_mb") -> Failure:
    """Failure of a request whose outputs have more than so many bytes together."""
    message = f"the outputs are more than {most} bytes together; ask for fewer in one request ({why})"
    return Failure(PAYLOAD_TOO_LARGE, message, None, "answer")


class CountedConnection(Protocol):
    """Connection as the quotas count it.

    Attributes:
        owner: name of the owner it counts for; None when it is not counted.
        reserved: bytes of bodies that it holds.
        unfetched: bytes of answers that its client has not taken, as far as they are counted.
    """

    owner: str | None
    reserved: int
    unfetched: int

    @property
    def silent(self) -> bool:
        """Whether no request of its client is under way."""

    def shutdown(self) -> None:
        """Close at once."""


class Quotas:
    """Budgets of one process.

    Arguments:
        settings: settings of the bounds, and whether clients are authenticated.

    Attributes:
        bytes: budget of the bytes of bodies, messages and answers.
    """

    def __init__(self, settings: Settings) -> None:
        self._named = bool(settings.keys or settings.jwt)
        self._total = settings.max_connections
        self._connections = Budget(settings.max_connections, GREED if self._named else 0)
        self.bytes = HeldBytes(settings.bodies_bytes)
        self._most_answer = settings.bodies_bytes // 2
        self._strangers: dict[CountedConnection, None] = {}
        self._slow: dict[str, dict[CountedConnection, None]] = {}

    def answer_room(self, owner: str, most: int = 0, why: str = "") -> AnswerRoom:
        """Room for the outputs of a request of an owner: half of what all clients may hold, or `most` bytes where that is less.

        `why` tells what `most` comes from.
        """
        if most and most < self._most_answer:
            return AnswerRoom(self.bytes, owner, most, why)
        return AnswerRoom(self.bytes, owner, self._most_answer)

    def fit(self, connections: int) -> None:
        """Share no more connections than this, where that is less than were to be shared."""
        connections = max(connections, 1)
        if connections < self._total:
            self._connections.free -= self._total - connections
            self._total = connections

    def enter(self, counted: CountedConnection, address: str) -> bool:
        """Count a new connection; False when there is no room for it: then it lasts until it has its answer.

        Without an owner it must not linger after that, as too many do.
        """
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
        """Error of a connection that `enter` has refused."""
        if not self._connections.free:
            return RequestError("too many connections are open", code=SERVICE_OVERLOADED, retry_after=1.0)
        return too_many("too many connections of this client are")

    def belong(self, counted: CountedConnection, tenant: str) -> None:
        """Count a connection for the tenant whose request has come on it.

        Raises:
            RequestError: the tenant has too many connections; this one must not be kept.
        """
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
        """Let a connection last until it has its answer; False where too many such do."""
        if not self._connections.take(REFUSED, 1, max(1, min(TURNED_AWAY, self._total // TURNED_AWAY_SHARE))):
            return False
        counted.owner = REFUSED
        return True

    def leave(self, counted: CountedConnection) -> None:
        """Stop counting a connection."""
        if counted.owner is not None:
            self.reserve(counted, 0)
            self.keep(counted, 0)
            self._connections.give(counted.owner, 1)
            self._strangers.pop(counted, None)
            counted.owner = None

    def reserve(self, counted: CountedConnection, amount: int) -> bool:
        """Let a connection hold `amount` bytes in all; False, and nothing is changed, when its owner has too many."""
        more = amount - counted.reserved
        if counted.owner is not None and more:
            if more < 0:
                self.bytes.give(counted.owner, -more)
            elif not self.bytes.take(counted.owner, more):
                return False
            counted.reserved = amount
        return True

    def keep(self, counted: CountedConnection, amount: int) -> None:
        """Count `amount` bytes of answers that wait for a connection's client, in all, with the bodies of its owner.

        An owner that has too many loses those connections whose answers have waited longest.
        """
        owner = counted.owner
        if owner is None:
            return
        slow = self._slow.setdefault(owner, {})
        slow[counted] = None
        more = amount - counted.unfetched
        while more > 0 and not self.bytes.take(owner, more):
            oldest = next(iter(slow))
            if oldest is counted:
                more = 0  # One answer may wait in any case, however large.
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
        """Error of a body that `reserve` has refused."""
        return no_room(0 if counted.owner is None else self.bytes.used(counted.owner))


def no_room(used: int) -> RequestError:
    """Error of a body or an answer for which there is no room beside the `used` bytes that its owner holds."""
    if not used:
        message = "too many bytes of bodies and answers are on their way (memory_mb)"
        return RequestError(message, code=SERVICE_OVERLOADED, retry_after=1.0, reason="bodies")
    message = f"{used} bytes of this caller's bodies and answers are on their way; use fewer at once (memory_mb)"
    return RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="bodies")


def too_many(whose: str) -> RequestError:
    """Error of a connection beyond its owner's; `whose` begins its message."""
    message = f"{whose} open already; use fewer (max_connections)"
    return RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="connections")

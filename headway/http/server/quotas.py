"""Quotas of the clients of a public port: connections, and bytes of unfinished bodies and unread answers.

No client's share keeps the others out. A connection is its tenant's from the first request on. Until then it is a
stranger's, and all strangers together are one owner: when they have had their share, the one that came first and has
not spoken makes room for the next, so that a flood of silent connections keeps nobody from speaking. Without
authentication, the owner is the client's address. A proxy in front is then one owner, and its connections are only
bounded if that is asked for.
"""

from __future__ import annotations

from itertools import islice
from typing import Protocol

from headway.config import Settings
from headway.core.budget import GREED, Budget
from headway.errors import RATE_LIMITED, SERVICE_OVERLOADED, RequestError

STRANGERS = "\0"
"""Owner of the connections on which no request has come yet."""

_LOOKED_AT = 64
"""Most strangers that are looked at to find one that makes room."""


class Guest(Protocol):
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
        ...

    def shutdown(self) -> None:
        """Close at once."""
        ...


class Quotas:
    """Budgets of one public port.

    Arguments:
        settings: settings of the bounds, and whether clients are authenticated.
    """

    def __init__(self, settings: Settings) -> None:
        self._named = bool(settings.keys or settings.jwt)
        self._most = settings.max_caller_connections
        self._connections = Budget(settings.max_connections, GREED if self._named else 0)
        self._bodies = Budget(settings.max_bodies_mb << 20)
        self._strangers: dict[Guest, None] = {}
        self._slow: dict[str, dict[Guest, None]] = {}

    def enter(self, guest: Guest, address: str) -> bool:
        """Count a new connection; False when there is no room for it."""
        if not self._named:
            if not self._connections.take(address, 1, self._most):
                return False
            guest.owner = address
            return True
        if not self._connections.take(STRANGERS, 1):
            oldest = next((other for other in islice(self._strangers, _LOOKED_AT) if other.silent), None)
            if oldest is None:
                return False
            oldest.shutdown()
            self.leave(oldest)
            if not self._connections.take(STRANGERS, 1):
                return False
        guest.owner = STRANGERS
        self._strangers[guest] = None
        return True

    def belong(self, guest: Guest, tenant: str) -> None:
        """Count a connection for the tenant whose request has come on it.

        Raises:
            RequestError: the tenant has too many connections; this one is no longer counted, and must not be kept.
        """
        owner = guest.owner
        if not self._named or owner is None or owner == tenant:
            return
        self.leave(guest)
        if not self._connections.take(tenant, 1, self._most):
            raise too_many(f"{self._connections.used(tenant)} connections of this tenant are")
        guest.owner = tenant

    def leave(self, guest: Guest) -> None:
        """Stop counting a connection."""
        if guest.owner is not None:
            self.reserve(guest, 0)
            self.keep(guest, 0)
            self._connections.give(guest.owner, 1)
            self._strangers.pop(guest, None)
            guest.owner = None

    def reserve(self, guest: Guest, amount: int) -> bool:
        """Let a connection hold `amount` bytes in all; False, and nothing is changed, when its owner has too many."""
        more = amount - guest.reserved
        if guest.owner is not None and more:
            if more < 0:
                self._bodies.give(guest.owner, -more)
            elif not self._bodies.take(guest.owner, more):
                return False
            guest.reserved = amount
        return True

    def keep(self, guest: Guest, amount: int) -> None:
        """Count `amount` bytes of answers that wait for a connection's client, in all, with the bodies of its owner.

        An owner that has too many loses those connections whose answers have waited longest.
        """
        owner = guest.owner
        if owner is None:
            return
        slow = self._slow.setdefault(owner, {})
        slow[guest] = None
        more = amount - guest.unfetched
        while more > 0 and not self._bodies.take(owner, more):
            oldest = next(iter(slow))
            if oldest is guest:
                more = 0  # One answer may wait in any case, however large.
            else:
                oldest.shutdown()
                self.leave(oldest)
        if more < 0:
            self._bodies.give(owner, -more)
        guest.unfetched += more
        if not amount:
            del slow[guest]
            if not slow:
                del self._slow[owner]

    def no_room(self, guest: Guest) -> RequestError:
        """Error of a body that `reserve` has refused."""
        used = 0 if guest.owner is None else self._bodies.used(guest.owner)
        if not used:
            return RequestError(
                "too many bytes of bodies are on their way (max_bodies_mb)",
                code=SERVICE_OVERLOADED,
                retry_after=1.0,
                reason="bodies",
            )
        message = f"{used} bytes of this caller's bodies and unread answers are on their way; use fewer at once (max_bodies_mb)"
        return RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="bodies")


def too_many(whose: str) -> RequestError:
    """Error of a connection beyond its owner's; `whose` begins its message."""
    message = f"{whose} open already; use fewer (max_caller_connections)"
    return RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="connections")

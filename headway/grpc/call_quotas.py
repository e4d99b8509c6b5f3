"""Quotas of the calls on the gRPC port: calls at once, and bytes of incoming messages and unread answers.

A connection may carry calls of several tenants, as behind a proxy. So each call counts for its own tenant, or for its client's
address if there are no keys. No tenant can keep the others out.

The length of a message is known only once its beginning has come. So a call takes room for the largest message before it reads,
and then gives back what it didn't need. If there is no room, the call waits behind the other calls of its tenant.
"""

from __future__ import annotations

import asyncio
from collections import deque

from headway.config import Settings
from headway.core.budget import GREED, Budget
from headway.errors import RATE_LIMITED, SERVICE_OVERLOADED, RequestError
from headway.gateway.client_quotas import HeldBytes, no_room

STRANGERS = "\0"
"""Beginning of the owner of a call without credentials. The address follows, so that no address keeps out the probes of another."""

SMALL = 4096
"""Size in bytes up to which an answer isn't counted. All calls together hold at most some 40 MB of such answers."""


class CallQuotas:
    """Budgets of one gRPC port. `bytes` is the budget of the bytes that the clients of the process hold."""

    def __init__(self, settings: Settings, bytes: HeldBytes) -> None:
        self._named = bool(settings.keys or settings.jwt)
        self._largest = settings.max_body_bytes
        self._calls = Budget(settings.max_connections, GREED if self._named else 0)
        self._bytes = bytes
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def begin(self, owner: str) -> None:
        """Count a call. Raises RequestError if the owner has too many calls at once."""
        if not self._calls.take(owner, 1):
            used = self._calls.used(owner)
            if not used:
                raise RequestError(
                    "too many calls are in hand", code=SERVICE_OVERLOADED, retry_after=1.0, reason="calls"
                )
            message = f"{used} calls of this caller are in hand; use fewer at once (max_connections)"
            raise RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="calls")

    def end(self, owner: str) -> None:
        self._calls.give(owner, 1)

    def may_read(self, owner: str) -> bool:
        """Take room for the largest message. Return False if there is none, or other calls of the owner wait for it."""
        return owner not in self._waiting and self._bytes.take(owner, self._largest)

    async def room_to_read(self, owner: str) -> None:
        if self.may_read(owner):
            return
        waiting = self._waiting.get(owner)
        if waiting is None:
            waiting = self._waiting[owner] = deque()
            self._bytes.freed = self._admit
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # It got its room at the same moment.
                self.has_read(owner)
            elif turn in waiting:
                waiting.remove(turn)
                self._forget(owner, waiting)
            raise

    def has_read(self, owner: str, kept: int = 0) -> None:
        """Give back the room to read, except `kept` bytes for the message that came."""
        self._bytes.give(owner, self._largest - kept)

    def room_for_stream(self, owner: str) -> int:
        """Take room for the largest message while a stream is open, and return its bytes. Raises RequestError if there is none."""
        if not self._bytes.take(owner, self._largest):
            message = "too many streams and messages of this caller are on their way; use fewer at once (memory_mb)"
            raise RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="bodies")
        return self._largest

    def may_hold(self, owner: str, amount: int) -> bool:
        """Count the bytes of a received message. Return False if the owner holds too many."""
        return self._bytes.take(owner, amount)

    def keep(self, owner: str, amount: int) -> int:
        """Count an answer until it has left, and return the counted bytes. Raises RequestError if the owner reads too little."""
        if amount <= SMALL:
            return 0
        if self._bytes.take(owner, amount):
            return amount
        if used := self._bytes.used(owner):
            raise no_room(used)
        return 0  # A single answer may always wait, however large it is.

    def drop(self, owner: str, amount: int) -> None:
        if amount:
            self._bytes.give(owner, amount)

    def _admit(self) -> None:
        """Give room to waiting calls, one of each owner at a time."""
        admitted = True
        while admitted:
            admitted = False
            for owner, waiting in list(self._waiting.items()):
                while waiting and waiting[0].done():  # Its call has ended.
                    waiting.popleft()
                if waiting and self._bytes.take(owner, self._largest):
                    waiting.popleft().set_result(None)
                    admitted = True
                self._forget(owner, waiting)

    def _forget(self, owner: str, waiting: deque[asyncio.Future[None]]) -> None:
        if not waiting:
            self._waiting.pop(owner, None)
        if not self._waiting:
            self._bytes.freed = None

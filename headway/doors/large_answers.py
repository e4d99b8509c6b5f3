"""Large answers, made and sent bit by bit in turns of the event loop, and held for their owner meanwhile.

    make ──▶ make ──▶ … ──▶ header ──▶ send ──▶ send ──▶ … ──▶ next request
                                        └── the client reads too slowly: wait until it has read everything ──▶ send

The whole answer is made before any of it is sent, because an output may turn out not to be sendable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from time import monotonic

from headway.core.failures import error_of
from headway.gateway.client_quotas import AnswerRoom
from headway.runtime.fair_turns import FairTurns

TURN = 0.001
"""Seconds of making pieces in one turn of the loop; the last piece may take longer."""

WORTH_SENDING = 1 << 16
"""Average bytes of a piece from which pieces are sent separately; smaller ones are joined, which copies them."""


class LargeAnswer:
    """Body of one answer.

    Arguments:
        pieces: makes it.
        room: room held for its outputs; None for a single input, whose output is not held.
        clock: monotonic seconds.

    Attributes:
        length: bytes that are made and not yet sent.
        total: bytes of the whole answer, once it is made.
        left_since: monotonic instant since when its client has left some of it unread; 0.0 if it hasn't.
    """

    __slots__ = ("_clock", "_made", "_pieces", "_room", "left_since", "length", "total")

    def __init__(
        self, pieces: Iterator[bytes], room: AnswerRoom | None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._pieces, self._room, self._clock = pieces, room, clock
        self._made: deque[bytes] = deque()
        self.length = self.total = 0
        self.left_since = 0.0

    def make(self) -> bool:
        """Make more of it, for one turn of the loop. Return True once it is complete.

        Raises:
            RequestError, UnicodeEncodeError: it cannot be sent; RequestError also if it gets too large.
        """
        end = self._clock() + TURN
        new: list[bytes] = []
        whole = True
        for piece in self._pieces:
            new.append(piece)
            if self._clock() > end:
                whole = False
                break
        made = sum(map(len, new))
        self._made += new if made > WORTH_SENDING * len(new) else (b"".join(new),)
        self.length += made
        room = self._room
        if room is None:
            return whole
        if self.length > room.held and (failure := room.hold(self.length)) is not None:
            raise error_of(failure)
        if whole:
            room.shrink(self.length)
        return whole

    def take(self) -> bytes:
        """Remove and return the next piece to send; empty if there is none."""
        if not self._made:
            return b""
        piece = self._made.popleft()
        self.length -= len(piece)
        if self._room is not None:
            self._room.shrink(self.length)
        return piece

    async def whole(self, turns: FairTurns, tenant: str) -> bytes:
        """Make the whole answer, as `made` does, and return it in one piece."""
        await self.made(turns, tenant)
        return b"".join(self._made)

    async def made(self, turns: FairTurns, tenant: str) -> None:
        """Make the whole answer: at once if one turn suffices, else in further turns of the tenant."""
        while not self.make():
            await _turn(turns, tenant)

    async def sent(self, turns: FairTurns, tenant: str) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of an answer that is made, each in a turn of the tenant."""
        while self._made:
            yield self.take()
            await _turn(turns, tenant)


async def _turn(turns: FairTurns, tenant: str) -> None:
    """Wait for the tenant's turn."""
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    turns.wait(tenant, partial(_begin, turn))
    await turn


def _begin(turn: asyncio.Future[None]) -> None:
    """Start a turn, unless its request has ended."""
    if not turn.done():
        turn.set_result(None)

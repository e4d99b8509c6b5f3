"""Large answers: made bit by bit, in turns of the event loop that they share with large bodies, and held for their owner meanwhile.

    make ──▶ make ──▶ … ──▶ the header ──▶ send ──▶ send ──▶ … ──▶ the connection goes on
                                            └── the client takes nothing: when it has taken all that was sent ──▶ send

An answer is made before any of it is sent, since an output may turn out to be none that can be sent.
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
"""Seconds for which pieces of an answer are made in one turn of the loop; the last one may take longer."""

WORTH_SENDING = 1 << 16
"""Bytes of a piece, on average, from which each is sent by itself; smaller ones are put together, which copies them."""


class LargeAnswer:
    """Body of one answer, from its first piece to its last.

    Arguments:
        pieces: makes it.
        room: room that its outputs have; None: they are not held, as those of a single input.
        clock: monotonic seconds.

    Attributes:
        length: bytes that are made, and not sent.
        total: bytes of all of it, once that is made.
        left_since: monotonic instant at which its client first left some of it, in seconds; 0.0: it has not.
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
        """Make some more of it, for one turn of the loop. True: it is whole.

        Raises:
            RequestError, UnicodeEncodeError: it cannot be sent; RequestError also where it gets too large.
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
        """Take what is sent next out of it; empty when nothing is left."""
        if not self._made:
            return b""
        piece = self._made.popleft()
        self.length -= len(piece)
        if self._room is not None:
            self._room.shrink(self.length)
        return piece

    async def whole(self, turns: FairTurns, tenant: str) -> bytes:
        """Make all of it, as `made`, and put it together."""
        await self.made(turns, tenant)
        return b"".join(self._made)

    async def made(self, turns: FairTurns, tenant: str) -> None:
        """Make all of it at once if that is done within one turn, else in further turns of the tenant. See `make`."""
        while not self.make():
            await _turn(turns, tenant)

    async def sent(self, turns: FairTurns, tenant: str) -> AsyncGenerator[bytes, None]:
        """Take its pieces, once it is made, each in a turn of the tenant."""
        while self._made:
            yield self.take()
            await _turn(turns, tenant)


async def _turn(turns: FairTurns, tenant: str) -> None:
    """Wait for the tenant's turn."""
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    turns.wait(tenant, partial(_begin, turn))
    await turn


def _begin(turn: asyncio.Future[None]) -> None:
    """Let an answer be made on, unless its request has ended."""
    if not turn.done():
        turn.set_result(None)

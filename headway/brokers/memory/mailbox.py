"""Mailboxes in memory, in which replies wait for their gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headway.model import Reply


class Mailbox:
    """Replies to one gateway, kept until the gateway asks with a later cursor, or until they are handed over.

    Attributes:
        hand_over: takes the replies out; None for a gateway that asks.
        settle: takes the replies to a whole batch; see NearQueue. None for a gateway that asks.
    """

    def __init__(self) -> None:
        self.hand_over: Callable[[], None] | None = None
        self.settle: Callable[[Sequence[Any], Sequence[Reply]], None] | None = None
        self.replies: list[Reply] = []
        self.acknowledged = 0
        self.arrival = asyncio.Event()

    def put(self, replies: Iterable[Reply]) -> None:
        """Add replies."""
        if self.hand_over is None:
            self.arrival.set()
        elif not self.replies:
            asyncio.get_running_loop().call_soon(self.hand_over)
        self.replies += replies

    def take(self) -> Sequence[Reply]:
        """Take all replies out."""
        replies, self.replies = self.replies, []
        self.acknowledged += len(replies)
        return replies

    def acknowledge(self, cursor: int) -> Sequence[Reply]:
        """Let go of the replies up to `cursor` and return them."""
        read = max(0, cursor - self.acknowledged)
        gone = self.replies[:read]
        del self.replies[:read]
        self.acknowledged += len(gone)
        return gone

"""Mailboxes in memory, in which replies wait for their gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from headway.model import Reply


class Mailbox:
    """Replies to one gateway, kept until the gateway asks with a later cursor."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.acknowledged = 0
        self.arrival = asyncio.Event()

    def put(self, replies: Iterable[Reply]) -> None:
        """Add replies."""
        self.replies += replies
        self.arrival.set()

    def acknowledge(self, cursor: int) -> Sequence[Reply]:
        """Let go of the replies up to `cursor` and return them."""
        read = max(0, cursor - self.acknowledged)
        gone = self.replies[:read]
        del self.replies[:read]
        self.acknowledged += len(gone)
        return gone

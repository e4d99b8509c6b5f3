"""Senders of spans: the part that both ways have in common."""

from __future__ import annotations

from typing import Protocol

MOST_ANSWER = 1 << 16
"""Most bytes of a collector's answer that are read."""


class NotSent(Exception):
    """A message that the collector did not take.

    Arguments:
        why: what went wrong.
        again: whether another try may succeed.
        rest: seconds that the collector asks to wait before; None when it asks for none.
    """

    def __init__(self, why: str, again: bool = True, rest: float | None = None) -> None:
        super().__init__(why)
        self.again, self.rest = again, rest


class SpanSender(Protocol):
    """Way to a collector. Used by one thread; only `close` is called by another."""

    def send(self, body: bytes, within: float) -> bytes:
        """Send a message and return the answer.

        Arguments:
            body: the message.
            within: seconds that each step of it may take.

        Raises:
            NotSent: the collector did not take it, as far as is known.
        """
        ...

    def close(self) -> None:
        """Close the connections."""
        ...

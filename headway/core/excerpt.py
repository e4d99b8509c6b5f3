"""Excerpts of text that a client has chosen, as an error message or a line of the log may show it."""

from __future__ import annotations

MOST_CHARS = 200
"""Most characters of an excerpt in a line of the log, with what is escaped there counted as it is written."""


def excerpt(text: str) -> str:
    """`text`, or its beginning and an ellipsis where all of it would take more than MOST_CHARS characters.

    The ellipsis comes on top. A character beyond printable ASCII counts as its escape does in JSON.
    """
    if len(text) <= MOST_CHARS // 2 and text.isascii() and text.isprintable():
        return text
    room = MOST_CHARS
    for position, char in enumerate(text[: MOST_CHARS + 1]):
        room -= _written(char)
        if room < 0:
            return f"{text[:position]}…"
    return text


def _written(char: str) -> int:
    """Most characters that one takes in a line of the log."""
    if " " <= char <= "~":
        return 2 if char in "\"'\\" else 1
    return 6 if char <= "\uffff" else 12

"""Words in errors: excerpts of what a client wrote, and the known names closest to one that is unknown."""

from __future__ import annotations

from collections.abc import Iterable

MOST_CHARS = 200
"""Most characters of an excerpt in a line of the log, with what is escaped there counted as it is written."""


def excerpt(text: str) -> str:
    """Return `text`, or its beginning and an ellipsis where all of it would take more than MOST_CHARS characters.

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
    """Return the most characters that one takes in a line of the log."""
    if " " <= char <= "~":
        return 2 if char in "\"'\\" else 1
    return 6 if char <= "\uffff" else 12


def nearest(name: str, names: Iterable[str], most: int = 1, likeness: float = 0.6) -> list[str]:
    """Return the names most like `name`, the likest first: at most so many, and none of less likeness, from 0 to 1."""
    from difflib import get_close_matches  # Most processes never need it.

    return get_close_matches(name, [*names], most, likeness)

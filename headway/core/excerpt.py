"""Wording of errors: excerpts of what a client wrote, and the known names closest to an unknown one."""

from __future__ import annotations

from collections.abc import Iterable

MOST_CHARS = 200  # Limit on an excerpt, in characters as written to the log, including escapes.


def excerpt(text: str) -> str:
    """Return `text`, cut off with an ellipsis beyond MOST_CHARS characters, as counted in JSON with non-ASCII escaped."""
    if len(text) <= MOST_CHARS // 2 and text.isascii() and text.isprintable():
        return text
    room = MOST_CHARS
    for position, char in enumerate(text[: MOST_CHARS + 1]):
        room -= _written(char)
        if room < 0:
            return f"{text[:position]}…"
    return text


def _written(char: str) -> int:
    if " " <= char <= "~":
        return 2 if char in "\"'\\" else 1
    return 6 if char <= "\uffff" else 12


def nearest(name: str, names: Iterable[str], most: int = 1, likeness: float = 0.6) -> list[str]:
    """Return up to `most` names similar to `name`, most similar first. `likeness` is the required similarity, from 0 to 1."""
    from difflib import get_close_matches  # Most processes never need it.

    return get_close_matches(name, [*names], most, likeness)

"""Likeness of names: what whoever has misspelt one may have meant."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, names: Iterable[str], most: int = 1, likeness: float = 0.6) -> list[str]:
    """Names most like `name`, the likest first: at most so many, and none of less likeness, from 0 to 1."""
    from difflib import get_close_matches  # Most processes never need it.

    return get_close_matches(name, [*names], most, likeness)

"""Searches with RE2, in linear time whatever the pattern and the text. Separate from `file` because RE2 is optional.

The patterns of a rule are one expression. If that runs out of memory for its automaton, RE2 goes on without one, slower but
still linear. An RE2.Set would find nothing in that case.
"""

from __future__ import annotations

from collections.abc import Sequence

import re2

from headway.core.input_policy import Search

MOST_MEMORY = 8 << 20
"""Most bytes of memory for a rule's expression."""


class BadPattern(ValueError):
    """RE2 doesn't take a pattern; the text says why."""


def check_pattern(pattern: str) -> None:
    r"""Check a pattern. Raises BadPattern. Refuse \Q, which without \E would quote the next pattern too."""
    if r"\Q" in pattern:
        raise BadPattern(r"\Q is not taken; put a backslash before each special character instead")
    _compile(pattern)


def search_for(patterns: Sequence[str]) -> Search:
    """Return a function that tells whether a text contains any of some patterns. Raises BadPattern if they are too large."""
    find = _compile("|".join(f"(?:{pattern})" for pattern in patterns)).search

    def search(text: str) -> bool:
        return find(text.encode()) is not None

    return search


def _compile(pattern: str) -> re2._Regexp:
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = MOST_MEMORY
    try:
        return re2.compile(pattern, options)
    except re2.error as exc:
        reason = exc.args[0] if exc.args else b""
        raise BadPattern(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)) from None

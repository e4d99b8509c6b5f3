"""Searches for patterns with RE2, in time linear in the text, whatever the pattern and the text.

An expression that runs out of memory for its automaton goes on without one, slower and still linear. So the patterns of a
rule are one expression: a set of RE2's would find nothing then.
"""

from __future__ import annotations

from collections.abc import Sequence

import re2

from headway.core.input_policy import Search

MOST_MEMORY = 8 << 20
"""Most bytes of memory for the expression of one rule."""


class BadPattern(ValueError):
    """A pattern that RE2 does not take. The text says why."""


def check_pattern(pattern: str) -> None:
    r"""Check one pattern. Raises BadPattern. What a \Q without its \E quotes would go on into the next pattern."""
    if r"\Q" in pattern:
        raise BadPattern(r"\Q is not taken; put a backslash before each character that is meant as it is")
    _compile(pattern)


def search_for(patterns: Sequence[str]) -> Search:
    """Make the function that finds any of some patterns in a text. Raises BadPattern when they are too large together."""
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

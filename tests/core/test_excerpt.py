"""Excerpts of text that a client has chosen."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.excerpt import MOST_CHARS, excerpt


@given(st.text() | st.text(min_size=1).map(lambda text: text * 50))
def test_an_excerpt_is_short_however_it_is_written(text: str) -> None:
    shown = excerpt(text)
    kept = shown.removesuffix("…") if shown != text else text
    assert text.startswith(kept)
    assert len(json.dumps(kept)) <= MOST_CHARS + 2
    assert len(repr(kept)) <= MOST_CHARS + 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("m", "m"),
        ("größer", "größer"),
        ("x" * MOST_CHARS, "x" * MOST_CHARS),
        ("x" * (MOST_CHARS + 1), "x" * MOST_CHARS + "…"),
        ("\x85" * 300_000, "\x85" * 33 + "…"),
        ("\U0001f600" * 17, "\U0001f600" * 16 + "…"),
        ('"' * 101, '"' * 100 + "…"),
    ],
)
def test_escapes_count_as_they_are_written(text: str, shown: str) -> None:
    assert excerpt(text) == shown

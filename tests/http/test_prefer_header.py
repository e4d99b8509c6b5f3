"""The `Prefer` header, and when a request is handed over."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.http.inference.inference_head import Wish, read_prefer
from headway.http.inference.request_in_hand import AsyncHandoff

AT_ONCE = Wish(0.0, b"respond-async")


@pytest.mark.parametrize(
    ("value", "wish"),
    [
        (b"respond-async", AT_ONCE),
        (b"Respond-Async", AT_ONCE),
        (b"respond-async=", AT_ONCE),
        (b'respond-async=""; a=b', AT_ONCE),
        (b"respond-async, wait=10", Wish(10.0, b"respond-async, wait=10")),
        (b'wait = "10" ,, respond-async;x', Wish(10.0, b"respond-async, wait=10")),
        (b"respond-async, wait=007", Wish(7.0, b"respond-async, wait=7")),
        (b"respond-async, wait=0", Wish(0.0, b"respond-async, wait=0")),
        (b"respond-async, wait=1, wait=2", Wish(1.0, b"respond-async, wait=1")),
        (b'x="a, wait=3", respond-async', AT_ONCE),
        (b"respond-async, wait=soon", AT_ONCE),
        (b"respond-async, wait=-1", AT_ONCE),
        (b"respond-async, wait=1.5", AT_ONCE),
        (b"respond-async, wait=99999999999999999999", Wish(1e20, b"respond-async, wait=99999999999999999999")),
        (b'handling=lenient, return=minimal, respond-async, "', AT_ONCE),
        (b"wait=10", None),
        (b"respond-async=no", None),
        (b"respond-asynchronously", None),
        (b"", None),
        (b'"respond-async"', None),
        (b'x="respond-async', None),
    ],
)
def test_a_prefer_header_is_read_as_a_wish_or_ignored(value: bytes, wish: Wish | None) -> None:
    assert read_prefer(value) == wish


@given(st.binary(max_size=200))
def test_no_bytes_in_a_prefer_header_raise(value: bytes) -> None:
    wish = read_prefer(value)
    assert wish is None or (wish.wait >= 0.0 and wish.applied.startswith(b"respond-async"))


class Clockwork:
    """An event loop's timer that goes off when told."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Any]] = []
        self.cancelled = False

    def call_later(self, seconds: float, call: Any) -> Clockwork:
        self.set.append((seconds, call))
        return self

    def cancel(self) -> None:
        self.cancelled = True


def handover(wait: float) -> tuple[AsyncHandoff, Clockwork, list[str]]:
    clockwork, told = Clockwork(), list[str]()
    return AsyncHandoff(cast(asyncio.AbstractEventLoop, clockwork), wait, lambda: told.append("")), clockwork, told


def test_at_once_means_as_soon_as_it_is_admitted() -> None:
    subject, clockwork, told = handover(0.0)
    assert subject.due and not clockwork.set and not told
    subject.admitted()
    assert told == [""]
    subject.admitted()
    assert told == [""], "once"


@pytest.mark.parametrize("first", ["admitted", "time"])
def test_after_a_wait_it_takes_both(first: str) -> None:
    subject, clockwork, told = handover(2.0)
    ((seconds, expire),) = clockwork.set
    assert seconds == 2.0 and not subject.due
    steps = [subject.admitted, expire]
    for step in steps if first == "admitted" else reversed(steps):
        assert not told
        step()
    assert told == [""] and subject.due


def test_a_handover_that_ended_is_neither_timed_nor_told() -> None:
    subject, clockwork, told = handover(2.0)
    subject.end()
    assert clockwork.cancelled
    clockwork.set[0][1]()
    subject.admitted()
    assert not told

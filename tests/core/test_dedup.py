"""Answers in common: what is kept and for how long, and which requests are the same."""

from __future__ import annotations

import tracemalloc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.dedup import Consequences, Dedup, digest
from headway.core.fair_queue import queued_at
from headway.core.retention import KeptLimits
from headway.model import DedupKey, DedupKind, Entry, Reply
from tests.core.flights import NOW, PLENTY, answer, begin, left_over, make, same


class Text(str):
    """A text that can be watched."""


def test_an_input_is_let_go_of_when_its_outcome_is_there() -> None:
    sharing, inputs = Dedup(PLENTY), []

    def entry(id: str) -> Entry:
        text = Text("asked")
        inputs.append(weakref.ref(text))
        return make(id, DedupKey(DedupKind.TASK, id, b"", 60.0), same(), input=text)

    original = begin(sharing, entry("original"))
    for number in range(1000):
        assert sharing.join(queued_at(entry(f"follower {number}"), NOW), NOW) == Consequences()
    answer(sharing, original, "fine")
    for number in range(1000):
        sharing.join(queued_at(entry(f"later {number}"), NOW), NOW)
    del original
    assert sum(input() is not None for input in inputs) == 0
    assert sharing.outcome("t", "follower 7", NOW) is not None


@pytest.mark.parametrize("text", ["x" * 400, "", "☃" * 400])
def test_what_is_kept_stays_within_its_bound(text: str) -> None:
    bound = 1 << 19
    sharing = Dedup(KeptLimits.of(bound, bound))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(2000):
            id = f"{number:036}"
            dedup_keys = DedupKey(DedupKind.TASK, id, b"", 60.0), same(f"{number:064}")
            answer(sharing, begin(sharing, make(id, *dedup_keys)), str(number) + text)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < bound
    assert isinstance(sharing.outcome("t", f"{1999:036}", NOW), Reply)


def test_of_what_is_kept_identical_requests_are_forgotten_first_and_the_oldest_of_each() -> None:
    sharing = Dedup(KeptLimits.of(11_000, 11_000))
    for number in range(4):
        id = f"task {number}"
        answer(sharing, begin(sharing, make(id, DedupKey(DedupKind.TASK, id, b"", 60.0))), "x" * 1000)
        answer(sharing, begin(sharing, make(f"same {number}", same(f"{number}"))), "x" * 1000)

    def tasks() -> list[int]:
        return [number for number in range(8) if sharing.outcome("t", f"task {number}", NOW) is not None]

    assert tasks() == [0, 1, 2, 3]
    assert sharing.join(queued_at(make("again", same("0")), NOW), NOW) is None
    answer(sharing, begin(sharing, make("task 4", DedupKey(DedupKind.TASK, "task 4", b"", 60.0))), "x" * 1000)
    assert tasks() == [1, 2, 3, 4]


def test_an_outcome_that_is_larger_than_all_that_may_be_kept_is_not_kept() -> None:
    sharing = Dedup(KeptLimits.of(8000, 8000))
    answer(sharing, begin(sharing, make("1", same())), "x" * 1000)
    assert sharing.join(queued_at(make("2", same()), NOW), NOW) is None
    assert left_over(sharing) == {}


TEXTS = st.text(st.characters(exclude_categories=[]), max_size=4)


@given(st.tuples(TEXTS, TEXTS, TEXTS), st.tuples(TEXTS, TEXTS, TEXTS))
def test_what_is_asked_has_a_digest_of_its_own(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    def of(asked: tuple[str, str, str]) -> bytes:
        return digest(
            asked[0].encode("utf-8", "replace").decode(), asked[1].encode("utf-8", "replace").decode(), asked[2], b""
        )

    same = [text.encode("utf-8", "replace") for text in one[:2]] == [t.encode("utf-8", "replace") for t in other[:2]]
    assert (of(one) == of(other)) == (same and one[2] == other[2])


def test_parameters_that_mean_the_same_are_the_same() -> None:
    first = digest("m", "1", "asked", b'{"a": 1, "b": {"c": [1, 2], "d": null}}')
    assert digest("m", "1", "asked", b'{"b":{"d":null,"c":[1,2]},"a":1}') == first
    assert digest("m", "1", "asked", b'{"b":{"d":null,"c":[2,1]},"a":1}') != first
    assert digest("m", "1", "asked", b'{"a": 1, "b": {"c": [1, 2]}}') != first
    assert digest("m", "1", "asked", b"") != first
    assert digest("m", "2", "asked", b'{"a": 1, "b": {"c": [1, 2], "d": null}}') != first


def test_a_digest_is_the_same_in_every_process_and_release() -> None:
    assert digest("m", "v", "in", b'{"b":1,"a":2}').hex() == (
        "ae816caaf938e09c1b28ad4c8a51795b5d30675433e3194af37d03cf1b3c0c3e"
    )
    assert digest("m", "", "i\ud800", b"").hex() == "d5dc1cec07a5c69cb49702ed01be73aadc5d0c70359ddb292598128f0aa67219"

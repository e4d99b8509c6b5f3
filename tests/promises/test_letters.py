"""The checker on dead letters: letters that fit what failed, and one history of each kind in which they do not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.promises.checker import check
from tests.promises.evidence import Letter
from tests.promises.histories import ACCEPTED, KNOWN, LEFT, REJECTED, Scribe


@pytest.fixture
def it() -> Scribe:
    """Two inputs that failed alone, one of a list, with their letters; one that is known to fail left none."""
    made = Scribe()
    made.run("a", "reject b", "poison c", at=(1.0, 2.0))
    made.ask((0.0, 3.0), "poison c", "one", **REJECTED)
    made.ask((0.0, 3.0), "a\nreject b", "two", inputs=("a", "reject b"), blamed=1, **REJECTED)
    made.ask((4.0, 5.0), "poison c", "three", **KNOWN)
    made.history.evidence.letters = [Letter("acme", "one", "poison c"), Letter("acme", "part", "reject b")]
    return made


def wrong(it: Scribe, *more: Letter, without: str = "") -> set[str]:
    """Promises that a history breaks with more dead letters, or without one."""
    left = [letter for letter in it.history.evidence.letters or () if letter.id != without]
    it.history.evidence.letters = [*left, *more]
    return {violation.promise for violation in check(it.history)}


def test_each_failure_alone_has_its_letter_and_each_letter_its_failure(it: Scribe) -> None:
    it.history.evidence.letters_counted = 2
    assert not wrong(it)


def test_a_letter_takes_the_place_of_an_earlier_one_under_its_id(it: Scribe) -> None:
    it.run("reject d", at=(6.0, 7.0))
    it.ask((6.0, 8.0), "reject d", "one", **REJECTED)
    assert not wrong(it, Letter("acme", "one", "reject d"), without="one")
    assert wrong(it, without="one") == {"a failure without a dead letter"}


@pytest.mark.parametrize("told", [ACCEPTED, LEFT], ids=["a task", "one that left"])
def test_a_letter_takes_the_place_of_an_earlier_one_also_if_its_client_was_told_of_no_failure(
    it: Scribe, told: dict[str, Any]
) -> None:
    it.run("reject d", at=(6.0, 7.0))
    (it.task if told is ACCEPTED else it.ask)((6.0, 8.0), "reject d", "one", **told)
    assert not wrong(it, Letter("acme", "one", "reject d"), without="one")
    assert "a failure without a dead letter" in wrong(it, without="one")


def test_a_failure_without_a_letter_is_found_out_unless_data_was_lost_since(it: Scribe) -> None:
    assert wrong(it, without="part") == {"a failure without a dead letter"}
    it.fault("redis emptied", at=(6.0, 7.0))
    assert not wrong(it)


def test_letters_of_nobody_of_good_inputs_and_doubled_ones_are_found_out(it: Scribe) -> None:
    assert wrong(it, Letter("globex", "x", "poison c")) == {"a dead letter of nobody"}
    it.ask((6.0, 7.0), "d", status=504, code="DEADLINE_EXCEEDED", timeout=1.0)
    good = Letter("acme", "y", "d", attempts=3)
    assert wrong(it, good, without="x") == {"a dead letter of a good input"}
    it.fault("gpu killed", at=(6.0, 7.0))
    assert not wrong(it)
    assert wrong(it, Letter("acme", "z", "reject b"), without="y") == {"more dead letters than requests"}
    twice = {"several dead letters of one request"}
    assert wrong(it, Letter("acme", "one", "poison c", attempts=2), without="z") == twice


def test_a_letter_that_is_listed_and_cannot_be_shown_is_found_out(it: Scribe) -> None:
    unread = Letter("acme", "part", None)
    assert wrong(it, unread, without="part") == {"a dead letter that is listed and cannot be shown"}


def test_a_count_of_other_letters_than_there_are_is_found_out(it: Scribe) -> None:
    it.history.evidence.letters_counted = 3
    assert wrong(it) == {"the metrics count other dead letters than there are"}


def test_rows_of_a_tensor_have_one_letter_and_one_of_them_fails(it: Scribe) -> None:
    it.run("d", "reject e", at=(6.0, 7.0))
    it.ask((6.0, 8.0), "d\nreject e", "four", inputs=("d", "reject e"), rows=True, **REJECTED)
    assert wrong(it) == {"a failure without a dead letter"}
    assert not wrong(it, Letter("acme", "four", ["d", "reject e"]))
    numbers = [list(text.encode().ljust(9, b"\0")) for text in ("d", "reject e")]
    for one in ({"codes": numbers, "sum": list(map(sum, numbers))}, numbers):
        assert not wrong(it, Letter("acme", "four", one), without="four")
    assert wrong(it, Letter("acme", "five", ["d", "f"])) >= {"a dead letter of a good input", "a dead letter of nobody"}

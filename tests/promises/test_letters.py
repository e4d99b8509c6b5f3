"""The checker on dead letters: letters that fit what failed, and one history of each kind in which they do not."""

from typing import Any

import pytest

from tests.promises.checker import check
from tests.promises.evidence import Letter, Line
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
def test_a_letter_replaces_an_earlier_one_even_if_no_failure_was_told(it: Scribe, told: dict[str, Any]) -> None:
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


UNEXPLAINED = ["a warning that no fault explains"]


def found(what: str, whom: str, *lines: Line) -> list[str]:
    it = Scribe()
    it.fault(what, at=(10.0, 12.0), whom=whom)
    it.history.evidence.lines = list(lines)
    return [violation.promise for violation in check(it.history)]


@pytest.mark.parametrize(("process", "at", "explained"), [
    ("worker-1", 10.5, True), ("worker-1", 21.0, True), ("worker-1", 9.0, False), ("worker-1", 30.0, False), ("worker-2", 10.5, False),
])  # fmt: skip
def test_a_fault_explains_what_its_process_tells_around_it(process: str, at: float, explained: bool) -> None:
    line = Line(process, at, "warning", "batch failed", "cause='crashed' size=2")
    assert found("gpu killed", "worker-1", line) == ([] if explained else UNEXPLAINED)


def test_what_all_share_explains_what_any_process_tells() -> None:
    line = Line("gateway-3", 11.0, "warning", "the broker is out of reach", "")
    assert not found("redis paused", "redis", line)
    assert found("ledger paused", "ledger", line) == UNEXPLAINED


def test_what_befalls_a_worker_explains_what_gateways_tell_of_its_version_but_not_what_they_tell_of_the_broker() -> (
    None
):
    bare = Line("gateway-3", 11.0, "warning", "versions of a model have a weight and no worker", "versions='3'")
    assert not found("worker killed", "worker-1", bare)
    cut_off = Line("gateway-3", 11.0, "warning", "the broker is out of reach", "")
    assert found("worker killed", "worker-1", cut_off) == UNEXPLAINED


def test_poisonous_inputs_explain_the_batches_that_they_make_fail_and_no_other() -> None:
    poisoned = Line("worker-2", 40.0, "warning", "batch failed", "error='RuntimeError: a poisonous input' size=3")
    broken = Line("worker-2", 40.0, "warning", "batch failed", "error='RuntimeError: cuda' size=3")
    assert not found("gateway killed", "gateway-1", poisoned)
    assert found("gateway killed", "gateway-1", broken) == UNEXPLAINED


def test_an_event_that_is_not_known_is_found_out_whatever_befell() -> None:
    line = Line("gateway-1", 11.0, "error", "an observer of requests has failed", "requests=1")
    assert found("gateway paused", "gateway-1", line, line) == UNEXPLAINED * 2


def test_a_connection_to_the_ledger_that_was_given_up_explains_its_own_error_and_no_other() -> None:
    event = "Future exception was never retrieved\\nfuture: <Future finished exception={}>"
    line = Line(
        "gateway-1", 11.0, "error", event.format("ConnectionError('PostgreSQL server at \"…\": server sent an error')")
    )
    assert not found("ledger paused", "ledger", line)
    assert found("redis paused", "redis", line) == UNEXPLAINED
    other = Line("gateway-1", 11.0, "error", event.format("KeyError('PostgreSQL')"))
    assert found("ledger paused", "ledger", other) == UNEXPLAINED

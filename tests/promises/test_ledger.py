"""The checker on the ledger: rows that match their clients, and one history for each way in which they don't."""

import pytest

from tests.promises.evidence import Line, Row
from tests.promises.histories import Scribe

ANOTHER = "the ledger tells another outcome than its client got"
MISSING = "an answer without a row in the ledger"
LATE = "0-30 ask b id=two: late"


@pytest.fixture
def it() -> Scribe:
    made = Scribe("1-2 run a; 0-3 ask a id=one: run0.0")
    made.row("one", input="a", output="A|run0.0")
    return made


def test_every_answer_has_its_row_and_every_row_its_client(it: Scribe) -> None:
    it.write("1-2 run b; 1-2 run reject_c; 0-3 ask reject_c id=two: rejected; 0-30 ask d id=three: late")
    it.write("0-1 task b id=four: accepted; 4-5 poll four: run1.0; 0- ask e: left")
    it.history.operations[-1].id = ""  # Its client never got one.
    it.row("two", "REJECTED_BY_MODEL", input="reject c")
    it.row("three", "DEADLINE_EXCEEDED", input="d")
    it.row("four", input="b", output="B|run1.0")
    it.row("five", "CANCELLED", input="e")
    assert not it.broken


@pytest.mark.parametrize("kept", [True, False])
def test_parts_of_a_list_have_rows_under_ids_of_their_own(it: Scribe, kept: bool) -> None:
    it.write("1-2 run b c; 0-3 ask b c id=two: run1.0 run1.1")
    it.row("two", input="b" if kept else None)
    it.row("part", input="c" if kept else None)
    assert not it.broken
    it.row("part 2", input="c" if kept else None)
    assert it.broken == {"rows of nobody"} | ({"more rows than requests, by the input"} if kept else set())


@pytest.mark.parametrize("error", ["", "BACKEND_ERROR"])
def test_a_row_with_another_outcome_than_its_client_got_is_found_out(it: Scribe, error: str) -> None:
    it.write("1-2 run reject_b; 0-3 ask reject_b id=two: rejected")
    it.row("two", error, input="reject b")
    assert it.broken == {ANOTHER}


def test_a_failed_list_is_not_completed_in_the_ledger(it: Scribe) -> None:
    it.write("1-2 run b reject_c; 0-3 ask b reject_c id=two blamed=1: rejected")
    it.row("two", input="b")
    it.row("part", "REJECTED_BY_MODEL", input="reject c")
    assert it.broken == {ANOTHER}


def test_an_answer_whose_row_its_killed_gateway_had_is_lost_whatever_else_its_id_was_told(it: Scribe) -> None:
    it.write("1-2 run b; 0-3 ask b id=two: run1.0; 4-5 ask b id=two: run1.0")
    it.history.operations[-1].gateway = "killed"
    it.row("two", input="b", output="B|run1.0")
    assert it.broken == {MISSING}
    it.write("5.5-6 fault gateway killed of=killed")
    assert not it.broken


def test_a_row_may_be_missing_where_the_ledger_says_that_rows_were_dropped(it: Scribe) -> None:
    it.write(LATE)
    assert it.broken == {MISSING}
    it.history.evidence.dropped = 1
    assert not it.broken


@pytest.mark.parametrize(
    ("faults", "excused"),
    [
        ("28.5-60 fault gateway killed of=gateway", True),
        ("31-60 fault gateway killed of=gateway", True),
        ("40-60 fault gateway killed of=gateway", False),
        ("40-60 fault gateway killed of=gateway; 29-39 fault ledger killed of=ledger", True),
        ("50-60 fault gateway killed of=gateway; 29-39 fault ledger killed of=ledger", False),
    ],
)
def test_a_row_is_lost_with_its_gateway_only_if_there_was_no_time_to_write_it(
    it: Scribe, faults: str, excused: bool
) -> None:
    it.write(f"{LATE}; {faults}")
    assert it.broken == (set() if excused else {MISSING})


def test_a_row_is_lost_with_an_ended_gateway_that_says_so_and_had_no_time_before(it: Scribe) -> None:
    it.write(f"{LATE}; 31-45 fault gateway ended of=gateway; 29-38 fault ledger killed of=ledger")
    assert it.broken == {MISSING}
    for at, wrong in ((37.0, set()), (42.0, {MISSING})):
        it.history.evidence.lines = [
            Line("gateway", at, "warning", "the last records could not be written to the ledger")
        ]
        assert it.broken == wrong


def test_a_task_has_a_row_with_what_its_poll_tells(it: Scribe) -> None:
    it.write("1-2 run b; 0-1 task b id=two: accepted; 4-5 poll two: run1.0")
    assert it.broken == {MISSING}
    it.row("two", "DEADLINE_EXCEEDED", input="b")
    assert it.broken == {"the ledger tells another outcome of a task than its poll"}
    assert it.history.evidence.rows is not None
    it.history.evidence.rows.pop()
    it.write("1.5-9 fault gateway killed of=gateway")
    assert not it.broken


@pytest.mark.parametrize(
    ("id", "text", "promises"),
    [
        ("two", "b", {"a row that nobody asked for, by the input", "rows of nobody"}),
        ("one", "a", {"more rows than requests under an id", "more rows than requests, by the input"}),
    ],
)
def test_a_row_too_many_is_found_out(it: Scribe, id: str, text: str, promises: set[str]) -> None:
    it.row(id, input=text)
    assert it.broken == promises


def test_a_row_with_the_output_of_another_request_is_found_out(it: Scribe) -> None:
    it.write("1-2 run b; 0-3 ask b id=two: run1.0")
    it.row("two", input="b", output="B|run0.0")
    assert it.broken == {"the ledger tells another output"}


def test_refusals_in_sum_are_those_that_clients_were_told(it: Scribe) -> None:
    it.write("4-5 ask b0: limited; 4-5 ask b1: limited; 4-5 ask b2: limited")
    it.row("r", "RATE_LIMITED", requests=3)
    assert not it.broken
    it.row("s", "RATE_LIMITED", requests=2)
    assert it.broken == {"refusals that nobody was told"}


def test_a_run_that_failed_has_a_version_in_the_ledger(it: Scribe) -> None:
    it.weigh(v3=1.0)
    it.history.evidence.rows = []
    it.row("one", input="a", output="A|run0.0", worker="gpu-0", version="")
    assert "a row of a run without its version" in it.broken


def test_a_row_of_tensors_tells_shapes_and_is_known_by_its_id() -> None:
    it = Scribe("1-2 run a b; 0-3 ask a b id=one rows=1: run0.0 run0.1")
    shown = "tensors: `text`, BYTES of shape [2]"
    it.history.evidence.rows = [Row("acme", "one", "completed", input=shown, output=shown)]
    assert not it.broken
    it.row("two", input=shown, output=shown)
    assert it.broken == {"rows of nobody"}

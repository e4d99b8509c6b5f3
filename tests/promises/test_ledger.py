"""The checker on the ledger: rows that fit their clients, and one history of each kind in which they do not."""

import pytest

from tests.promises.checker import check
from tests.promises.evidence import Line, Row
from tests.promises.histories import ACCEPTED, LATE, LEFT, LIMITED, REJECTED, Scribe

ANOTHER = "the ledger tells another outcome than its client got"
MISSING = "an answer without a row in the ledger"


@pytest.fixture
def it() -> Scribe:
    made = Scribe()
    [output] = made.run("a", at=(1.0, 2.0))
    made.ask((0.0, 3.0), "a", "one", output=output)
    made.row("one", input="a", output=output)
    return made


def promises(it: Scribe) -> set[str]:
    return {violation.promise for violation in check(it.history)}


def test_every_answer_has_its_row_and_every_row_its_client(it: Scribe) -> None:
    [b] = it.run("b", at=(1.0, 2.0))
    it.run("reject c", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "reject c", "two", **REJECTED)
    it.row("two", "REJECTED_BY_MODEL", input="reject c")
    it.ask((0.0, 30.0), "d", "three", **LATE)
    it.row("three", "DEADLINE_EXCEEDED", input="d")
    it.task((0.0, 1.0), "b", "four", **ACCEPTED)
    it.poll((4.0, 5.0), "four", output=b)
    it.row("four", input="b", output=b)
    it.ask((0.0, None), "e", **LEFT)
    it.history.operations[-1].id = ""  # Its client never heard of one.
    it.row("five", "CANCELLED", input="e")
    assert not promises(it)


@pytest.mark.parametrize("without_content", [True, False])
def test_parts_of_a_list_have_rows_under_ids_of_their_own(it: Scribe, without_content: bool) -> None:
    b, c = it.run("b", "c", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "b\nc", "two", inputs=("b", "c"), outputs=(b, c), output=f"{b}\n{c}")
    it.row("two", input=None if without_content else "b")
    it.row("part", input=None if without_content else "c")
    assert not promises(it)
    it.row("part 2", input=None if without_content else "c")
    assert promises(it) == {"rows of nobody", *(() if without_content else ("more rows than requests, by the input",))}


@pytest.mark.parametrize("error", ["", "BACKEND_ERROR"])
def test_a_row_with_another_outcome_than_its_client_got_is_found_out(it: Scribe, error: str) -> None:
    it.run("reject b", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "reject b", "two", **REJECTED)
    it.row("two", error, input="reject b")
    assert promises(it) == {ANOTHER}


def test_a_failed_list_is_not_completed_in_the_ledger(it: Scribe) -> None:
    it.run("b", "reject c", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "b\nreject c", "two", inputs=("b", "reject c"), blamed=1, **REJECTED)
    it.row("two", input="b")
    it.row("part", "REJECTED_BY_MODEL", input="reject c")
    assert promises(it) == {ANOTHER}


def test_an_answer_whose_row_its_killed_gateway_had_is_lost_whatever_else_its_id_was_told(it: Scribe) -> None:
    [output] = it.run("b", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "b", "two", output=output)
    it.ask((4.0, 5.0), "b", "two", output=output)
    it.history.operations[-1].gateway = "killed"
    it.row("two", input="b", output=output)
    assert promises(it) == {MISSING}
    it.fault("gateway killed", (5.5, 6.0), "killed")
    assert not promises(it)


def test_an_answer_without_a_row_is_found_out_unless_the_ledger_says_that_rows_were_dropped(it: Scribe) -> None:
    it.ask((0.0, 30.0), "b", "two", **LATE)
    assert promises(it) == {MISSING}
    it.history.evidence.dropped = 1
    assert not promises(it)


@pytest.mark.parametrize(
    ("killed", "ledger", "excused"),
    [
        (28.5, None, True),
        (31.0, None, True),
        (40.0, None, False),
        (40.0, (29.0, 39.0), True),
        (50.0, (29.0, 39.0), False),
    ],
)
def test_a_row_is_lost_with_its_gateway_only_if_there_was_no_time_to_write_it(
    it: Scribe, killed: float, ledger: tuple[float, float] | None, excused: bool
) -> None:
    it.ask((0.0, 30.0), "b", "two", **LATE)
    it.fault("gateway killed", at=(killed, 60.0), whom="gateway")
    if ledger is not None:
        it.fault("ledger killed", at=ledger, whom="ledger")
    assert promises(it) == (set() if excused else {MISSING})


def test_a_row_is_lost_with_an_ended_gateway_that_says_so_and_had_no_time_before(it: Scribe) -> None:
    it.ask((0.0, 30.0), "b", "two", **LATE)
    it.fault("gateway ended", at=(31.0, 45.0), whom="gateway")
    it.fault("ledger killed", at=(29.0, 38.0), whom="ledger")
    assert promises(it) == {MISSING}
    it.history.evidence.lines = [Line("gateway", 37.0, "warning", "the last records do not get into the ledger")]
    assert not promises(it)
    it.history.evidence.lines = [Line("gateway", 42.0, "warning", "the last records do not get into the ledger")]
    assert promises(it) == {MISSING}


def test_a_task_has_a_row_with_what_its_poll_tells(it: Scribe) -> None:
    [b] = it.run("b", at=(1.0, 2.0))
    it.task((0.0, 1.0), "b", "two", **ACCEPTED)
    it.poll((4.0, 5.0), "two", output=b)
    assert promises(it) == {MISSING}
    it.row("two", "DEADLINE_EXCEEDED", input="b")
    assert promises(it) == {"the ledger tells another outcome of a task than its poll"}
    it.history.evidence.rows = it.history.evidence.rows[:-1] if it.history.evidence.rows else None
    it.fault("gateway killed", at=(1.5, 9.0), whom="gateway")
    assert not promises(it)


def test_rows_that_no_request_explains_are_found_out(it: Scribe) -> None:
    it.row("two", input="b")
    assert promises(it) == {"a row that nobody asked for, by the input", "rows of nobody"}


def test_two_rows_of_one_request_are_found_out(it: Scribe) -> None:
    it.row("one", input="a", output="A|run0.0")
    assert promises(it) == {"more rows than requests under an id", "more rows than requests, by the input"}


def test_a_row_with_the_output_of_another_request_is_found_out(it: Scribe) -> None:
    [b] = it.run("b", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "b", "two", output=b)
    it.row("two", input="b", output="B|run0.0")
    assert promises(it) == {"the ledger tells another output"}


def test_refusals_in_sum_are_those_that_clients_were_told(it: Scribe) -> None:
    for number in range(3):
        it.ask((4.0, 5.0), f"b{number}", **LIMITED)
    it.row("r", "RATE_LIMITED", requests=3)
    assert not promises(it)
    it.row("s", "RATE_LIMITED", requests=2)
    assert promises(it) == {"refusals that nobody was told"}


def test_a_run_that_failed_has_a_version_in_the_ledger(it: Scribe) -> None:
    it.weigh(v3=1.0)
    it.history.evidence.rows = []
    it.row("one", input="a", output="A|run0.0", worker="gpu-0", version="")
    assert "a row of a run without its version" in promises(it)


def test_a_row_of_tensors_tells_shapes_and_is_known_by_its_id() -> None:
    it = Scribe()
    a, b = it.run("a", "b", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a\nb", "one", inputs=("a", "b"), outputs=(a, b), output=f"{a}\n{b}", rows=True)
    shown = "tensors: `text`, BYTES of shape [2]"
    it.history.evidence.rows = [Row("acme", "one", "completed", input=shown, output=shown)]
    assert not check(it.history)
    it.history.evidence.rows.append(Row("acme", "two", "completed", input=shown, output=shown))
    assert {violation.promise for violation in check(it.history)} == {"rows of nobody"}

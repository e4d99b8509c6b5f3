"""The checker on dead letters and on warnings: those that match the failures, and histories of each kind that don't."""

import pytest

from tests.promises.checker import check
from tests.promises.evidence import Letter, Line
from tests.promises.histories import Scribe

MISSING = "a failure without a dead letter"


@pytest.fixture
def it() -> Scribe:
    """Three inputs failed alone, one of them in a list. Two have letters; the third was known to fail and left none."""
    made = Scribe("1-2 run a reject_b poison_c; 0-3 ask poison_c id=one: rejected; 4-5 ask poison_c id=three: known")
    made.write("0-3 ask a reject_b id=two blamed=1: rejected")
    made.history.evidence.letters = [Letter("acme", "one", "poison c"), Letter("acme", "part", "reject b")]
    return made


def wrong(it: Scribe, *more: Letter, without: str = "") -> set[str]:
    left = [letter for letter in it.history.evidence.letters or () if letter.id != without]
    it.history.evidence.letters = [*left, *more]
    return it.broken


def test_each_failure_alone_has_its_letter_each_letter_its_failure_and_their_count_is_right(it: Scribe) -> None:
    it.history.evidence.letters_counted = 2
    assert not wrong(it)
    it.history.evidence.letters_counted = 3
    assert wrong(it) == {"the metrics count other dead letters than there are"}


@pytest.mark.parametrize(
    "later", ["ask reject_d id=one: rejected", "task reject_d id=one: accepted", "ask reject_d id=one: left"]
)
def test_a_letter_takes_the_place_of_an_earlier_one_under_its_id_though_no_failure_was_told(
    it: Scribe, later: str
) -> None:
    it.write(f"6-7 run reject_d; 6-8 {later}")
    assert not wrong(it, Letter("acme", "one", "reject d"), without="one")
    assert MISSING in wrong(it, without="one")


def test_a_failure_without_a_letter_is_found_out_unless_data_was_lost_since(it: Scribe) -> None:
    assert wrong(it, without="part") == {MISSING}
    it.write("6-7 fault redis emptied")
    assert not wrong(it)


def test_letters_of_nobody_of_good_inputs_and_doubled_ones_are_found_out(it: Scribe) -> None:
    assert wrong(it, Letter("globex", "x", "poison c")) == {"a dead letter of nobody"}
    it.write("6-7 ask d timeout=1: late")
    assert wrong(it, Letter("acme", "y", "d", attempts=3), without="x") == {"a dead letter of a good input"}
    it.write("6-7 fault gpu killed")
    assert not wrong(it)
    assert wrong(it, Letter("acme", "z", "reject b"), without="y") == {"more dead letters than requests"}
    twice = {"several dead letters of one request"}
    assert wrong(it, Letter("acme", "one", "poison c", attempts=2), without="z") == twice


def test_a_letter_that_is_listed_and_cannot_be_shown_is_found_out(it: Scribe) -> None:
    unread = Letter("acme", "part", None)
    assert wrong(it, unread, without="part") == {"a dead letter that is listed and cannot be shown"}


def test_rows_of_a_tensor_have_one_letter_and_one_of_them_fails(it: Scribe) -> None:
    it.write("6-7 run d reject_e; 6-8 ask d reject_e id=four rows=1: rejected")
    assert wrong(it) == {MISSING}
    assert not wrong(it, Letter("acme", "four", ["d", "reject e"]))
    numbers = [list(text.encode().ljust(9, b"\0")) for text in ("d", "reject e")]
    for codes in ({"codes": numbers, "sum": list(map(sum, numbers))}, numbers):
        assert not wrong(it, Letter("acme", "four", codes), without="four")
    assert wrong(it, Letter("acme", "five", ["d", "f"])) >= {"a dead letter of a good input", "a dead letter of nobody"}


BARE = "versions of a model have a weight but no worker"
CUT_OFF = "the broker is out of reach"
GIVEN_UP = "Future exception was never retrieved\\nfuture: <Future finished exception={}>"
OF_POSTGRES = GIVEN_UP.format("ConnectionError('PostgreSQL server at \"…\": server sent an error')")


@pytest.mark.parametrize(
    ("fault", "line", "explained"),
    [
        # A fault explains what its own process logs around that time, and nothing from other processes.
        ("gpu killed of=worker-1", Line("worker-1", 10.5, "warning", "batch failed", "cause='crashed'"), True),
        ("gpu killed of=worker-1", Line("worker-1", 21.0, "warning", "batch failed", "cause='crashed'"), True),
        ("gpu killed of=worker-1", Line("worker-1", 9.0, "warning", "batch failed", "cause='crashed'"), False),
        ("gpu killed of=worker-1", Line("worker-1", 30.0, "warning", "batch failed", "cause='crashed'"), False),
        ("gpu killed of=worker-1", Line("worker-2", 10.5, "warning", "batch failed", "cause='crashed'"), False),
        # A fault in something shared explains what any process logs about it.
        ("redis paused of=redis", Line("gateway-3", 11.0, "warning", CUT_OFF), True),
        ("ledger paused of=ledger", Line("gateway-3", 11.0, "warning", CUT_OFF), False),
        # A worker's fault explains what gateways log about its version, but not what they log about the broker.
        ("worker killed of=worker-1", Line("gateway-3", 11.0, "warning", BARE, "versions='3'"), True),
        ("worker killed of=worker-1", Line("gateway-3", 11.0, "warning", CUT_OFF), False),
        # Poison inputs explain the batches that they make fail, at any time.
        ("gateway killed of=g", Line("worker-2", 40.0, "warning", "batch failed", "error='a poisonous input'"), True),
        ("gateway killed of=g", Line("worker-2", 40.0, "warning", "batch failed", "error='cuda'"), False),
        # Nothing explains an unknown event.
        ("gateway paused of=g", Line("g", 11.0, "error", "a request observer failed"), False),
        # Giving up a connection to the ledger explains its own error.
        ("ledger paused of=ledger", Line("gateway-1", 11.0, "error", OF_POSTGRES), True),
        ("redis paused of=redis", Line("gateway-1", 11.0, "error", OF_POSTGRES), False),
        ("ledger paused of=ledger", Line("gateway-1", 11.0, "error", GIVEN_UP.format("KeyError('PostgreSQL')")), False),
    ],
)
def test_a_warning_is_explained_by_a_fault_or_found_out(fault: str, line: Line, explained: bool) -> None:
    it = Scribe(f"10-12 fault {fault}")
    it.history.evidence.lines = [line, line]
    told = [violation.promise for violation in check(it.history)]
    assert told == ([] if explained else ["a warning that no fault explains"] * 2)

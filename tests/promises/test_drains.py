"""The checker on drains: of what a drained worker may do, and of what becomes of an order."""

from typing import Any

import pytest

from tests.promises.checker import check
from tests.promises.evidence import Line, Sighting, Slot
from tests.promises.faults import Drained
from tests.promises.histories import ACCEPTED, LATE, LEFT, LIMITED, REJECTED, UNKNOWN, Scribe
from tests.promises.operation import Run

TIMES: dict[str, Any] = {"ended": 11.0, "told": 2.0, "undrained": 10.0, "back": 11.0}
SLOT = Slot("worker-1/gpu-0", "worker-1", 0xA, "", "")


def drained(**told: Any) -> Scribe:
    """History of a drain of a worker host from 1 s on, which tells so at 2 s and is undrained at 10 s."""
    it = Scribe()
    it.history.faults.append(Drained("worker drained", 1.0, whom="worker-1", **TIMES | told))
    return it


def promises(it: Scribe) -> list[str]:
    return [violation.promise for violation in check(it.history)]


@pytest.mark.parametrize(("began", "host", "pid", "broken"), [
    (5.0, "worker-1", 0, True), (1.9, "worker-1", 0, False), (10.1, "worker-1", 0, False), (5.0, "worker-2", 0, False),
    (5.0, "worker-1", 0xA, True), (5.0, "worker-1", 0xB, False),
])  # fmt: skip
def test_what_runs_where_all_is_drained_is_found_out(began: float, host: str, pid: int, broken: bool) -> None:
    it = drained(pid=pid)
    it.ask((0.0, None), "x", **LEFT)
    it.history.runs.append(Run("a.1.0", ["x"], began, began + 0.1, host=host))
    assert promises(it) == (["a drained worker runs something"] if broken else [])


def test_a_worker_that_was_starting_as_it_was_drained_warms_up() -> None:
    it = drained()
    it.history.runs.append(Run("a.1.0", ["warm-up"], 5.0, 5.1, host="worker-1"))
    assert not promises(it)


@pytest.mark.parametrize("at", [5.0, 11.0])
def test_a_drain_that_is_forgotten_is_found_out(at: float) -> None:
    it = drained()
    it.history.evidence.sightings.append(Sighting(at, [SLOT]))
    assert promises(it) == (["a drain that is forgotten"] if at == 5.0 else [])


def test_a_broker_that_loses_its_data_loses_drains() -> None:
    it = drained()
    it.fault("redis killed, memory only", at=(4.0, 4.5))
    it.ask((0.0, None), "x", **LEFT)
    it.history.runs.append(Run("a.1.0", ["x"], 5.0, 5.1, host="worker-1"))
    assert not promises(it)


@pytest.mark.parametrize(("told", "broken"), [
    ({"told": None}, "a drain that is not heard of"), ({"back": None}, "an undrained worker that does not work again"),
])  # fmt: skip
@pytest.mark.parametrize("killed", ["worker-1", "worker-2", "redis"])
def test_an_order_is_carried_out_unless_its_worker_fell(told: dict[str, None], broken: str, killed: str) -> None:
    it = drained(**told)
    it.fault("redis paused" if killed == "redis" else "worker killed", at=(9.0, 10.5), whom=killed)
    assert promises(it) == ([broken] if killed == "worker-2" else [])


def test_a_drain_explains_that_others_have_no_worker_but_no_failure_and_no_second_run() -> None:
    it = drained()
    events = "batch failed", "versions of a model have a weight and no worker"
    it.history.evidence.lines += [Line("worker-1", 5.0, "warning", event) for event in events]
    assert promises(it) == ["a warning that no fault explains"]
    it = drained()
    for began in (3.0, 4.0):
        it.run("x", at=(began, began + 0.1))
    it.ask((2.5, 5.0), "x", status=502, code="BACKEND_ERROR")
    assert promises(it) == ["a good input failed", "second run of a request"]


MISSING = "outcomes that a gateway has not counted"
TOO_OFTEN = "outcomes that a gateway has counted too often"
MORE = "a gateway has counted more requests than came"


@pytest.mark.parametrize(
    ("counted", "wrong"),
    [
        ({"ok": 3, "rejected_by_model": 1, "rate_limited": 1, "deadline_exceeded": 1}, set()),
        ({"ok": 6, "rejected_by_model": 1, "rate_limited": 1, "deadline_exceeded": 1, "not_found": 1}, set()),
        ({"ok": 3, "rejected_by_model": 1, "rate_limited": 1, "deadline_exceeded": 1, "cancelled": 4}, set()),
        ({"ok": 2, "rejected_by_model": 1, "rate_limited": 1, "deadline_exceeded": 1}, {MISSING}),
        ({"ok": 3, "rejected_by_model": 1, "rate_limited": 1}, {MISSING}),
        ({"ok": 9, "rejected_by_model": 1, "rate_limited": 1, "deadline_exceeded": 1}, {TOO_OFTEN, MORE}),
        ({"ok": 3, "rejected_by_model": 4, "rate_limited": 4, "deadline_exceeded": 1}, {MORE}),
    ],
)
def test_a_gateway_counts_what_clients_heard_and_no_more_than_asked(counted: dict[str, int], wrong: set[str]) -> None:
    it = Scribe()
    a, b, c = it.run("a", "b", "c", at=(1.0, 2.0))
    it.run("reject d", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", output=a)
    it.ask((0.0, 3.0), "b\nc", inputs=("b", "c"), outputs=(b, c), output=f"{b}\n{c}")
    it.ask((0.0, 3.0), "e\nreject d", inputs=("e", "reject d"), blamed=1, **REJECTED)  # Nobody knows of e.
    it.ask((0.0, 30.0), "f", **LATE)
    it.ask((0.0, 3.0), "g", **LIMITED)
    it.ask((0.0, 3.0), "h", wanted="9", **UNKNOWN)
    it.ask((0.0, None), "i", **LEFT)
    it.task((0.0, 3.0), "j", "task", **ACCEPTED)
    it.history.evidence.counted["gateway"] = counted
    assert {violation.promise for violation in check(it.history)} == wrong


@pytest.mark.parametrize(("wanted", "wrong"), [("", {MISSING}), ("3", set())])
def test_a_version_that_is_not_known_now_is_refused_before_there_is_a_request(wanted: str, wrong: set[str]) -> None:
    it = Scribe()
    it.ask((0.0, 3.0), "a", wanted=wanted, status=503, code="NO_WORKERS")
    it.history.evidence.counted["gateway"] = {"ok": 0}
    assert {violation.promise for violation in check(it.history)} == wrong


def test_what_other_gateways_were_asked_is_no_matter() -> None:
    it = Scribe()
    [output] = it.run("a", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", output=output)
    it.history.evidence.counted["another"] = {"ok": 0}
    assert not check(it.history)


@pytest.mark.parametrize(("counted", "wrong"), [(1, set()), (2, {TOO_OFTEN, MORE})])
def test_rows_of_a_tensor_are_one_request(counted: int, wrong: set[str]) -> None:
    it = Scribe()
    a, b = it.run("a", "b", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a\nb", inputs=("a", "b"), outputs=(a, b), output=f"{a}\n{b}", rows=True)
    it.history.evidence.counted = {it.history.operations[0].gateway: {"ok": counted}}
    assert {violation.promise for violation in check(it.history)} == wrong

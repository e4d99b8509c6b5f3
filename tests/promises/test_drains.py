"""The checker on drains: of what a drained worker may do, and of what becomes of an order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.promises.checker import check
from tests.promises.evidence import Line, Sighting, Slot
from tests.promises.faults import Drained
from tests.promises.histories import LEFT, Scribe
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
def test_an_order_is_carried_out_unless_something_befell_its_worker(
    told: dict[str, None], broken: str, killed: str
) -> None:
    it = drained(**told)
    it.fault("redis paused" if killed == "redis" else "worker killed", at=(9.0, 10.5), whom=killed)
    assert promises(it) == ([broken] if killed == "worker-2" else [])


def test_a_drain_explains_that_others_have_no_worker_and_no_failure() -> None:
    it = drained()
    events = "batch failed", "versions of a model have a weight and no worker"
    it.history.evidence.lines += [Line("worker-1", 5.0, "warning", event) for event in events]
    assert promises(it) == ["a warning that no fault explains"]


def test_a_drain_excuses_no_second_run_and_no_failure() -> None:
    it = drained()
    for began in (3.0, 4.0):
        it.run("x", at=(began, began + 0.1))
    it.ask((2.5, 5.0), "x", status=502, code="BACKEND_ERROR")
    assert promises(it) == ["a good input failed", "second run of a request"]

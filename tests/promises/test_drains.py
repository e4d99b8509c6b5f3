"""The checker on drains, on gateways' counts, and on healthy slots that run nothing."""

from typing import Any

import pytest

from tests.promises.checker import check
from tests.promises.evidence import Line, Sighting, Slot
from tests.promises.faults import Drained
from tests.promises.histories import Scribe
from tests.promises.operation import History, Run

TIMES: dict[str, Any] = {"ended": 11.0, "told": 2.0, "undrained": 10.0, "back": 11.0}
SLOT = Slot("worker-1/gpu-0", "worker-1", 0xA, "", "")


def drained(story: str = "", **told: Any) -> Scribe:
    """A worker host is drained from 1 s on, reports it at 2 s, and is undrained at 10 s."""
    it = Scribe(story)
    it.history.faults.append(Drained("worker drained", 1.0, whom="worker-1", **TIMES | told))
    return it


def promises(history: History) -> list[str]:
    return [violation.promise for violation in check(history)]


@pytest.mark.parametrize(
    ("text", "began", "host", "pid", "fault", "broken"),
    [
        ("x", 5.0, "worker-1", 0, "", True),
        ("x", 1.9, "worker-1", 0, "", False),
        ("x", 10.1, "worker-1", 0, "", False),
        ("x", 5.0, "worker-2", 0, "", False),
        ("x", 5.0, "worker-1", 0xA, "", True),
        ("x", 5.0, "worker-1", 0xB, "", False),
        ("warm-up", 5.0, "worker-1", 0, "", False),  # It was starting when it was drained.
        ("x", 5.0, "worker-1", 0, "4-4.5 fault redis killed, memory only", False),  # The broker forgot the drain.
    ],
)
def test_what_runs_where_all_is_drained_is_found_out(
    text: str, began: float, host: str, pid: int, fault: str, broken: bool
) -> None:
    it = drained(f"0- ask x: left; {fault}", pid=pid)
    it.history.runs.append(Run("a.1.0", [text], began, began + 0.1, host=host))
    assert promises(it.history) == (["a drained worker runs something"] if broken else [])


@pytest.mark.parametrize("at", [5.0, 11.0])
def test_a_drain_that_is_forgotten_is_found_out(at: float) -> None:
    it = drained()
    it.history.evidence.sightings.append(Sighting(at, [SLOT]))
    assert promises(it.history) == (["a drain that is forgotten"] if at == 5.0 else [])


@pytest.mark.parametrize(
    ("told", "broken"),
    [
        ({"told": None}, "a drain that is not heard of"),
        ({"back": None}, "an undrained worker that does not work again"),
    ],
)
@pytest.mark.parametrize("fault", ["worker killed of=worker-1", "worker killed of=worker-2", "redis paused of=redis"])
def test_an_order_is_carried_out_unless_its_worker_fell(told: dict[str, None], broken: str, fault: str) -> None:
    it = drained(f"9-10.5 fault {fault}", **told)
    assert promises(it.history) == ([broken] if "worker-2" in fault else [])


def test_a_drain_explains_that_others_have_no_worker_but_no_failure_and_no_second_run() -> None:
    it = drained()
    events = "batch failed", "versions of a model have a weight but no worker"
    it.history.evidence.lines += [Line("worker-1", 5.0, "warning", event) for event in events]
    assert promises(it.history) == ["a warning that no fault explains"]
    it = drained("3-3.1 run x; 4-4.1 run x; 2.5-5 ask x: 502 BACKEND_ERROR")
    assert promises(it.history) == ["a good input failed", "second run of a request"]


MISSING = "outcomes that a gateway has not counted"
TOO_OFTEN = "outcomes that a gateway has counted too often"
MORE = "a gateway has counted more requests than came"
ASKED = (
    "1-2 run a b c; 1-2 run reject_d; 0-3 ask a: run0.0; 0-3 ask b c: run0.1 run0.2; 0-3 ask e reject_d blamed=1: rejected;"
    "0-30 ask f: late; 0-3 ask g: limited; 0-3 ask h wanted=9: unknown; 0- ask i: left; 0-3 task j id=task: accepted"
)
"""Requests. The outcomes of e, h, i and j are unknown to the clients."""
COUNTED = {"ok": 3, "rejected_by_model": 1, "rate_limited": 1, "deadline_exceeded": 1}
ROWS = "1-2 run a b; 0-3 ask a b rows=1: run0.0 run0.1"
NO_WORKERS = "0-3 ask a{}: no-workers"


@pytest.mark.parametrize(
    ("story", "counted", "wrong"),
    [
        (ASKED, COUNTED, set()),
        (ASKED, COUNTED | {"ok": 6, "not_found": 1}, set()),
        (ASKED, COUNTED | {"cancelled": 4}, set()),
        (ASKED, COUNTED | {"ok": 2}, {MISSING}),
        (ASKED, COUNTED | {"deadline_exceeded": 0}, {MISSING}),
        (ASKED, COUNTED | {"ok": 9}, {TOO_OFTEN, MORE}),
        (ASKED, COUNTED | {"rejected_by_model": 4, "rate_limited": 4}, {MORE}),
        # An unknown version is refused before there is a request.
        (NO_WORKERS.format(""), {"ok": 0}, {MISSING}),
        (NO_WORKERS.format(" wanted=3"), {"ok": 0}, set()),
        # The rows of a tensor are one request.
        (ROWS, {"ok": 1}, set()),
        (ROWS, {"ok": 2}, {TOO_OFTEN, MORE}),
    ],
)
def test_a_gateway_counts_what_its_clients_heard_and_no_more_than_they_asked(
    story: str, counted: dict[str, int], wrong: set[str]
) -> None:
    it = Scribe(story)
    it.history.evidence.counted["gateway"] = counted
    it.history.evidence.counted["another"] = {"ok": 0}
    assert it.broken == wrong


BUSY, IDLE = Slot("a/gpu-0", "worker-1", 0xA, "", "3"), Slot("b/gpu-0", "worker-2", 0xB, "", "3")
NOTHING = ["a healthy slot that runs nothing under load"]
OF_TWO = [IDLE._replace(place="b", pid=pid, model=model) for pid, model in ((0xB, ""), (0xC, "second"))]
RAISED = [Run(f"a.{number}", ["poison"], 0.1 * number, None, "3") for number in range(20)]
HALF = [Run(f"a.{number}", ["x"], number, number + 0.5, "3") for number in range(20)]
"""Runs in process 0xA. They raised and so keep nothing busy, or they take half of the time."""


@pytest.mark.parametrize(
    ("slots", "runs", "until", "fault", "broken"),
    [
        ([BUSY, IDLE], HALF, 20, "", NOTHING),
        ([BUSY, IDLE], HALF, 12, "", []),
        ([BUSY, IDLE._replace(model="second")], HALF, 20, "", []),
        ([BUSY, IDLE._replace(version="4")], HALF, 20, "", []),
        ([BUSY, IDLE], HALF, 20, "8-9 fault gpu killed of=worker-2", []),
        ([BUSY, IDLE], HALF, 20, "8-9 fault redis paused of=redis", []),
        ([BUSY, IDLE], HALF, 20, "8-9 fault gpu killed of=worker-1", NOTHING),
        # A model may rest while another runs on the GPU.
        ([BUSY, *OF_TWO], [*HALF, Run("c.0", ["x"], 7.0, 8.0, "3", "second")], 20, "", []),
        ([BUSY, *OF_TWO], HALF, 20, "", NOTHING),
    ],
)
def test_a_healthy_slot_may_not_rest_while_others_are_busy(
    slots: list[Slot], runs: list[Run], until: int, fault: str, broken: list[str]
) -> None:
    it = Scribe(fault)
    it.history.runs += runs
    it.history.evidence.sightings = [Sighting(0.5 * step, slots) for step in range(2 * until)]
    assert promises(it.history) == broken


def test_a_run_that_raised_keeps_no_slot_busy() -> None:
    it = Scribe()
    it.history.runs += RAISED
    it.history.evidence.sightings = [Sighting(0.5 * step, (BUSY, IDLE)) for step in range(40)]
    assert NOTHING[0] not in promises(it.history)

"""The checker on slots that are healthy and run nothing: those with a reason, and those without one."""

from typing import Any

import pytest

from tests.promises.checker import check
from tests.promises.evidence import Sighting, Slot
from tests.promises.histories import Scribe
from tests.promises.operation import Run

BUSY, IDLE = Slot("a/gpu-0", "worker-1", 0xA, "", "3"), Slot("b/gpu-0", "worker-2", 0xB, "", "3")


def promises(it: Scribe, *slots: Slot, until: float = 20.0) -> list[str]:
    """Promises that are broken when these slots are healthy for 20 s, and what of pid 0xa is busy for half of the time."""
    it.history.evidence.sightings = [Sighting(0.5 * step, slots) for step in range(int(until / 0.5))]
    it.history.runs += [Run(f"a.{number}", ["x"], number, number + 0.5, "3") for number in range(20)]
    return [violation.promise for violation in check(it.history)]


NOTHING = ["a healthy slot that runs nothing under load"]


def test_a_healthy_slot_that_runs_nothing_is_found_out_but_had_time_and_busy_is_who_succeeds() -> None:
    assert promises(Scribe(), BUSY, IDLE) == NOTHING
    assert not promises(Scribe(), BUSY, IDLE, until=12.0)


def test_a_run_that_raised_keeps_no_slot_busy() -> None:
    it = Scribe()
    it.history.evidence.sightings = [Sighting(0.5 * step, (BUSY, IDLE)) for step in range(40)]
    it.history.runs += [Run(f"a.{number}", ["poison"], 0.1 * number, None, "3") for number in range(20)]
    assert "a healthy slot that runs nothing under load" not in [violation.promise for violation in check(it.history)]


@pytest.mark.parametrize("other", [{"model": "second"}, {"version": "4"}])
def test_a_slot_of_another_model_or_version_may_rest(other: dict[str, Any]) -> None:
    assert not promises(Scribe(), BUSY, IDLE._replace(**other))


@pytest.mark.parametrize(("what", "whom", "excused"), [
    ("gpu killed", "worker-2", True), ("redis paused", "redis", True), ("gpu killed", "worker-1", False),
])  # fmt: skip
def test_trouble_of_its_own_or_of_what_all_share_lets_a_slot_rest(what: str, whom: str, excused: bool) -> None:
    it = Scribe()
    it.fault(what, at=(8.0, 9.0), whom=whom)
    assert promises(it, BUSY, IDLE) == ([] if excused else NOTHING)


def test_a_model_of_a_gpu_may_rest_while_another_runs_there() -> None:
    shared = [IDLE._replace(place="b", pid=pid, model=model) for pid, model in ((0xB, ""), (0xC, "second"))]
    it = Scribe()
    it.history.runs += [Run("c.0", ["x"], 7.0, 8.0, "3", "second")]
    assert not promises(it, BUSY, *shared)
    assert promises(Scribe(), BUSY, *shared) == NOTHING

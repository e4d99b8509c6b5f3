"""The checker on zones and models: runs at home, help with a need, and help without one."""

from __future__ import annotations

import pytest

from tests.promises.checker import check
from tests.promises.histories import Scribe
from tests.promises.operation import Presence, Run

NEEDLESS = {"help from another zone for what had not waited"}


def promises(it: Scribe) -> set[str]:
    """Promises that a history breaks."""
    return {violation.promise for violation in check(it.history)}


@pytest.fixture
def it() -> Scribe:
    """Two zones with a host each, and a gateway in the first; batches take a second."""
    made = Scribe()
    made.history.processes += [
        Presence("gateway", "", 0.0, zone="a"),
        Presence("host a", "", 0.0, zone="a", host=True),
        Presence("host b", "", 0.0, zone="b", host=True),
    ]
    return made


def asked(it: Scribe, host: str, waited: float, at: float = 100.0) -> None:
    """A request that ran on a host after a wait."""
    run = Run(f"run{len(it.history.runs)}", ("x",), at + waited, at + waited + 1.0, host=host)
    it.history.runs.append(run)
    it.ask((at, at + waited + 1.0), "x", output=f"X|{run.name}.0")


@pytest.mark.parametrize(
    ("host", "waited", "fine"), [("host a", 0.1, True), ("host b", 1.1, True), ("host b", 0.1, False)]
)
def test_a_request_runs_in_its_zone_unless_it_has_waited_there(
    it: Scribe, host: str, waited: float, fine: bool
) -> None:
    asked(it, host, waited)
    assert promises(it) == (set() if fine else NEEDLESS)


def test_what_waits_at_home_lets_what_has_just_come_be_helped_with_it(it: Scribe) -> None:
    asked(it, "host b", 0.1)
    it.ask((98.0, 130.0), "waits", status=504, code="DEADLINE_EXCEEDED")
    assert not promises(it)


@pytest.mark.parametrize(
    ("what", "whom"), [("worker killed", "host a"), ("redis paused", "redis"), ("gateway paused", "gateway")]
)
def test_a_zone_without_healthy_workers_is_helped_at_once(it: Scribe, what: str, whom: str) -> None:
    asked(it, "host b", 0.1)
    it.fault(what, at=(98.0, 99.0), whom=whom)
    assert not promises(it)


def test_trouble_of_the_zone_that_helps_is_no_need(it: Scribe) -> None:
    asked(it, "host b", 0.1)
    it.fault("gpu killed", at=(98.0, 99.0), whom="host b")
    assert promises(it) == NEEDLESS


def test_a_gateway_that_has_just_come_does_not_know_its_zone(it: Scribe) -> None:
    it.history.processes[0].up = 98.0
    asked(it, "host b", 0.1)
    assert not promises(it)


@pytest.mark.parametrize("model", ["", "second"])
def test_an_answer_of_another_model_is_found_out(model: str) -> None:
    it = Scribe()
    it.history.runs.append(Run("run0", ("x",), 1.0, 2.0, model="second"))
    it.ask((0.0, 3.0), "x", output="X|run0.0", model=model)
    assert promises(it) == ({"answer of another model"} if not model else set())


@pytest.mark.parametrize("model", ["", "second"])
def test_a_task_for_a_model_that_is_not_there_is_none(model: str) -> None:
    it = Scribe()
    it.task((0.0, 1.0), "x", "id", model=model, status=404, code="NOT_FOUND")
    it.poll((2.0, 3.0), "id", status=404, code="NOT_FOUND")
    assert promises(it) == (set() if model else {"a task that lives is unknown (404)"})

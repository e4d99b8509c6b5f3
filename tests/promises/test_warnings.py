"""The checker on warnings in logs: those that a fault explains, and planted ones that none does."""

from __future__ import annotations

import pytest

from tests.promises.checker import check
from tests.promises.evidence import Line
from tests.promises.histories import Scribe

UNEXPLAINED = ["a warning that no fault explains"]


def found(what: str, whom: str, *lines: Line) -> list[str]:
    """Promises that are broken by lines after a fault from 10 to 12 s."""
    it = Scribe()
    it.fault(what, at=(10.0, 12.0), whom=whom)
    it.history.evidence.lines = list(lines)
    return [violation.promise for violation in check(it.history)]


@pytest.mark.parametrize(("process", "at", "explained"), [
    ("worker-1", 10.5, True), ("worker-1", 21.0, True), ("worker-1", 9.0, False), ("worker-1", 30.0, False), ("worker-2", 10.5, False),
])  # fmt: skip
def test_a_fault_explains_what_its_own_process_tells_meanwhile_and_soon_after(
    process: str, at: float, explained: bool
) -> None:
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

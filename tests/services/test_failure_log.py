"""One bad input is one story in the log."""

from typing import Any

from structlog.testing import capture_logs

from headway.errors import TargetError
from headway.model import BatchFailure, Cause, Entry, Lease, Slot
from headway.worker import failure_log
from headway.worker.failure_log import FailureLog


def lease(*ids: str, reason: str = "early") -> Lease:
    entries = [Entry(id, "m", id, 0, "t", "u", 1.0, 1.0) for id in ids]
    return Lease(1, Slot("gpu-0", "m", 8), entries, reason, 0.0, 1.0, 1.0)


def told(log: FailureLog, *batches: Lease, cause: Cause = Cause.RAISED, trace: str = "Traceback") -> list[Any]:
    with capture_logs() as logs:
        for batch in batches:
            log.failed("gpu-0", batch, BatchFailure(cause, "ValueError: bad", "gpu-0"), trace)
    return [line for line in logs if line["log_level"] == "warning"]


def test_the_search_for_a_culprit_is_two_lines() -> None:
    search = [lease("a", "b", "c", "bad"), lease("c", "bad", reason="retry"), lease("bad", reason="retry")]
    whole, alone = told(FailureLog(3.0), *search, lease("bad", reason="retry"))
    assert (whole["size"], whole["exception"]) == (4, "Traceback")
    assert "request_id" not in whole
    assert (alone["size"], alone["request_id"]) == (1, "req_bad")
    assert "exception" not in alone, "the traceback is told once"


def test_an_input_that_fails_alone_twice_is_one_line_and_others_are_stories_of_their_own() -> None:
    [line] = told(FailureLog(3.0), lease("bad"), lease("bad", reason="retry"))
    assert (line["request_id"], line["exception"], line["error"]) == ("req_bad", "Traceback", "ValueError: bad")
    log = FailureLog(3.0)
    assert len(told(log, lease("bad"), lease("worse"), lease("bad", "worse"))) == 2
    assert len(told(log, lease("bad"), cause=Cause.CRASHED)) == 1


def test_a_batch_beyond_the_deadline_says_how_to_mend_that() -> None:
    log = FailureLog(3.0)
    [many] = told(log, lease("a", "b"), cause=Cause.TIMEOUT, trace="")
    [one] = told(log, lease("c"), cause=Cause.TIMEOUT, trace="")
    assert many["hint"] == "raise --gpu-timeout-ms (3000) if the model needs longer, or lower --max-batch-size"
    assert one["hint"] == "raise --gpu-timeout-ms (3000) if the model needs longer"


def test_what_is_remembered_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(failure_log, "REMEMBERED", 3)
    log = FailureLog(3.0)
    assert len(told(log, *(lease(str(number)) for number in range(10)))) == 10
    assert told(log, lease("9")) == []
    assert len(told(log, lease("0"))) == 1


def test_what_a_target_raises_at_the_start_of_many_workers_is_told_once() -> None:
    log = FailureLog(3.0)
    with capture_logs() as logs:
        for worker in ("gpu-0", "gpu-1", "gpu-0"):
            log.not_started(worker, TargetError("target m:f: importing it raised ValueError", "Traceback of f"))
        log.not_started("gpu-0", TargetError("target m:f: not there"))
        log.not_started("gpu-0", TargetError("target m:f: importing it raised KeyError", "Traceback of another"))
    assert [line["exception"] for line in logs] == ["Traceback of f", "Traceback of another"]
    assert {line["log_level"] for line in logs} == {"error"}

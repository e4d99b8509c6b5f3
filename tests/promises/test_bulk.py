"""The checker on bulk jobs: a correct job, and a broken one of each kind."""

from typing import Any

import pytest

from tests.promises.histories import Scribe
from tests.promises.operation import Job

ONE, TWO = ("1", ("BULK 1|run0.0",)), ("2", ("BULK 2|run0.1", "BULK 2B|run0.2"))
BAD = ("3", "rejected_by_model")
JOB: dict[str, Any] = {
    "lines": {"1": ("bulk 1",), "2": ("bulk 2", "bulk 2b"), "3": ("reject bulk 3",)},
    "status": "completed",
    "counts": {"total": 3, "completed": 2, "failed": 1},
    "answers": [TWO, ONE],
    "errors": [BAD],
}


def history_of(**changes: Any) -> Scribe:
    """A job with three lines: one with two inputs, and one that the model rejects. Another request shares its runs."""
    it = Scribe("1-2 run bulk_1 bulk_2 bulk_2b reject_bulk_3 caller; 0.5-3 ask caller: run0.4")
    it.history.jobs.append(Job("acme", "batch_1", 0.0, **JOB | changes))
    return it


LOST = {"answers": [ONE], "counts": {"total": 3, "completed": 1, "failed": 1}}
REJECTED = ("1", "rejected_by_model")


def test_a_job_has_one_right_record_for_each_line_or_for_a_few_where_its_client_ended_it() -> None:
    assert not history_of().broken
    assert not history_of(status="cancelled", cancelled=True, **LOST).broken


@pytest.mark.parametrize(
    ("changes", "promise"),
    [
        ({"status": "cancelled"}, "a bulk job that is neither completed nor cancelled"),
        ({"status": "in_progress"}, "a bulk job that is neither completed nor cancelled"),
        (LOST, "a line of a completed job without a record"),
        ({"errors": [BAD, ("1", "backend_error")]}, "a record of no line, or the second one of a line"),
        ({"answers": [("2", ONE[1]), ("1", TWO[1])]}, "answer to another line"),
        ({"answers": [("2", TWO[1][::-1]), ONE]}, "answer to another line"),
        ({"answers": [("2", TWO[1][:1]), ONE]}, "answer to another line"),
        ({"answers": [("2", (TWO[1][0], "BULK 2B|other.0")), ONE]}, "output of a line of no run"),
        ({"parameters": {"1": '{"t": 1}'}}, "output of a line of a run with other parameters"),
        ({"answers": [TWO, ONE, ("3", ("REJECT BULK 3|run0.3",))]}, "output of a line that the model rejects"),
        ({"lines": JOB["lines"] | {"4": ("bulk 1",)}, "answers": [TWO, ONE, ("4", ONE[1])]}, "one output of two lines"),
        ({"answers": [TWO], "errors": [BAD, REJECTED]}, "a good line failed (rejected_by_model)"),
        (
            {"errors": [("3", "server_is_overloaded")]},
            "a line failed for another reason than its own (server_is_overloaded)",
        ),
        ({"counts": {"total": 3, "completed": 3, "failed": 0}}, "a bulk job counts other lines than are in its files"),
    ],
)
def test_a_job_that_breaks_a_promise_is_found_out(changes: dict[str, Any], promise: str) -> None:
    assert promise in history_of(**changes).broken

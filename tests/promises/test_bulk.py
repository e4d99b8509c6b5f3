"""The checker on bulk jobs: a job that is as it should be, and one of each kind that is not."""

from collections.abc import Callable

import pytest

from tests.promises.checker import check
from tests.promises.histories import Scribe
from tests.promises.operation import Job


def made() -> tuple[Scribe, Job]:
    """One job of three lines, of which one has two inputs and the model rejects one, and whose runs another request shares."""
    it = Scribe()
    one, two, more, _, beside = it.run("bulk 1", "bulk 2", "bulk 2b", "reject bulk 3", "caller", at=(1.0, 2.0))
    it.ask((0.5, 3.0), "caller", output=beside)
    job = Job(
        "acme", "batch_1", 0.0, {"1": ("bulk 1",), "2": ("bulk 2", "bulk 2b"), "3": ("reject bulk 3",)}, status="completed",
        counts={"total": 3, "completed": 2, "failed": 1}, answers=[("2", (two, more)), ("1", (one,))],
        errors=[("3", "rejected_by_model")],
    )  # fmt: skip
    it.history.jobs.append(job)
    return it, job


def test_a_job_has_one_right_record_for_each_line_or_for_a_few_where_its_client_ended_it() -> None:
    it, _ = made()
    assert not check(it.history)
    it, job = made()
    job.status, job.cancelled, job.answers = "cancelled", True, job.answers[:1]
    job.counts = {"total": 3, "completed": 1, "failed": 1}
    assert not check(it.history)


def cancelled(job: Job) -> None:
    job.status = "cancelled"


def unfinished(job: Job) -> None:
    job.status = "in_progress"


def lost(job: Job) -> None:
    del job.answers[0]
    job.counts = {"total": 3, "completed": 1, "failed": 1}


def twice(job: Job) -> None:
    job.errors.append(("1", "backend_error"))
    job.counts = {"total": 3, "completed": 2, "failed": 2}


def mixed(job: Job) -> None:
    (one, first), (two, second) = job.answers
    job.answers = [(one, second), (two, first)]


def turned(job: Job) -> None:
    custom_id, (first, second) = job.answers[0]
    job.answers[0] = custom_id, (second, first)


def short(job: Job) -> None:
    job.answers[0] = "2", job.answers[0][1][:1]


def invented(job: Job) -> None:
    job.answers[0] = "2", (job.answers[0][1][0], "BULK 2B|other.0")


def other_parameters(job: Job) -> None:
    job.parameters = {"1": '{"t": 1}'}


def accepted(job: Job) -> None:
    job.answers.append(("3", ("REJECT BULK 3|run0.3",)))
    job.errors.clear()
    job.counts = {"total": 3, "completed": 3, "failed": 0}


def rejected(job: Job) -> None:
    job.errors.append(("1", "rejected_by_model"))
    del job.answers[1]
    job.counts = {"total": 3, "completed": 1, "failed": 2}


def refused(job: Job) -> None:
    job.errors[0] = "3", "server_is_overloaded"


def miscounted(job: Job) -> None:
    job.counts = {"total": 3, "completed": 3, "failed": 0}


@pytest.mark.parametrize(
    ("break_it", "promise"),
    [
        (cancelled, "a bulk job that is neither completed nor cancelled"),
        (unfinished, "a bulk job that is neither completed nor cancelled"),
        (lost, "a line of a completed job without a record"),
        (twice, "a record of no line, or the second one of a line"),
        (mixed, "answer to another line"),
        (turned, "answer to another line"),
        (short, "answer to another line"),
        (invented, "output of a line of no run"),
        (other_parameters, "output of a line of a run with other parameters"),
        (accepted, "output of a line that the model rejects"),
        (rejected, "a good line failed (rejected_by_model)"),
        (refused, "a line failed for another reason than its own (server_is_overloaded)"),
        (miscounted, "a bulk job counts other lines than are in its files"),
    ],
)
def test_a_job_that_breaks_a_promise_is_found_out(break_it: Callable[[Job], None], promise: str) -> None:
    it, job = made()
    break_it(job)
    assert promise in {violation.promise for violation in check(it.history)}

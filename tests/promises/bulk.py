"""Bulk jobs: each ends, and each line of a completed job has one record, in the right file.

No client of the crowd sends the inputs of their lines, so the runs of one never explain answers of the other.
"""

from collections import Counter
from collections.abc import Iterator

from tests.promises.operation import BAD, History, Job, Run, Violation, canonical, mark_of, text_of

ENDS = ("completed", "cancelled")
"""Final statuses of a job. `cancelled` is allowed only if its client cancelled it."""


def bulk(history: History) -> Iterator[Violation]:
    runs = {mark: (run, text) for run in history.runs for mark, text in run.marks().items()} if history.jobs else {}
    owners: dict[str, str] = {}
    reruns = any(fault.cost.reruns for fault in history.faults)
    for job in history.jobs:
        story = f"{job.id} of {job.tenant}, {job.status or 'unknown'}"
        if job.status not in ENDS or (job.status == "cancelled" and not job.cancelled):
            yield Violation("a bulk job that is neither completed nor cancelled", story)
        for promise, custom_id in (*_records(job), *_answers(job, runs, owners), *_errors(job, reruns=reruns)):
            yield Violation(promise, f"{story}: line {custom_id} {str(job.lines.get(custom_id))[:80]}")
        counted = {"total": len(job.lines), "completed": len(job.answers), "failed": len(job.errors)}
        if job.status in ENDS and dict(job.counts) != counted:
            yield Violation("a bulk job counts other lines than are in its files", f"{story}: {job.counts}, {counted}")


def _records(job: Job) -> Iterator[tuple[str, str]]:
    """Find lines with no record or several, and records that belong to no line."""
    found = Counter(custom_id for custom_id, _ in (*job.answers, *job.errors))
    for custom_id in found - Counter(job.lines.keys()):
        yield "a record of no line, or the second one of a line", custom_id
    for custom_id in job.lines.keys() - found.keys() if job.status == "completed" else ():
        yield "a line of a completed job without a record", custom_id


def _answers(job: Job, runs: dict[str, tuple[Run, str]], owners: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Find answers that don't come from a run of that line, or that another line has, too."""
    for custom_id, outputs in job.answers:
        texts = job.lines.get(custom_id, ())
        if tuple(map(text_of, outputs)) != tuple(text.upper() for text in texts):
            yield "answer to another line", custom_id
            continue
        for place, (text, output) in enumerate(zip(texts, outputs, strict=True)):
            mark, owner = mark_of(output), f"{job.id} {custom_id} {place}"
            run, ran = runs.get(mark, (None, ""))
            if text.startswith(BAD):
                yield "output of a line that the model rejects", custom_id
            elif run is None or ran != text or run.began < job.called:
                yield "output of a line of no run", custom_id
            elif run.parameters != canonical(job.parameters.get(custom_id, "")):
                yield "output of a line of a run with other parameters", custom_id
            elif owners.setdefault(mark, owner) != owner:
                yield "one output of two lines", custom_id


def _errors(job: Job, *, reruns: bool) -> Iterator[tuple[str, str]]:
    """Find errors of valid lines, unless faults ended each of their batches."""
    for custom_id, code in job.errors:
        is_bad = any(text.startswith(BAD) for text in job.lines.get(custom_id, ()))
        if not is_bad and not (code == "backend_error" and reruns):
            yield f"a good line failed ({code})", custom_id
        elif code not in ("rejected_by_model", "backend_error"):
            yield f"a line failed for another reason than its own ({code})", custom_id

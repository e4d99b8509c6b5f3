"""Bulk jobs: files of lines that run in otherwise empty seats, and their state."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from headway.model.value import Value


class BulkLine(msgspec.Struct, frozen=True, gc=False):
    """One line of a bulk job on its way to a GPU, or a part of a line with several inputs.

    Attributes:
        job: id of the job, `batch_…`.
        tenant: account whose job it is.
        number: number of the line in its file, from 1.
        model: name of the model that must answer.
        version: version of the model; empty: any.
        input: the value for the model.
        parameters: the line's `parameters` as the text of one JSON object; empty for none.
        part: which of the line's inputs it is, from 0.
    """

    job: str
    tenant: str
    number: int
    model: str
    version: str
    input: Value
    parameters: bytes = b""
    part: int = 0


class BulkFile(msgspec.Struct, frozen=True):
    """A file of bulk jobs: lines, or answers.

    Attributes:
        id: `file-…`.
        tenant: account whose file it is.
        name: name given by the client.
        size: its bytes.
        purpose: `batch` for what was sent, `batch_output` for answers and errors.
        created_at: Unix time in seconds.
    """

    id: str
    tenant: str
    name: str
    size: int
    purpose: str
    created_at: float


class Stored(NamedTuple):
    """Files that a tenant has, or may have.

    Attributes:
        size: their bytes together.
        number: how many they are.
    """

    size: int
    number: int


class JobStatus(enum.Enum):
    """Statuses of a bulk job."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """True if the job is over."""
        return self in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED)


OPEN_STATUSES = tuple(status for status in JobStatus if not status.ended)
"""Statuses of jobs that aren't over."""
MOST_ENDED = 10_000
"""Finished jobs of a tenant that are kept; the oldest go first."""


class JobFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a whole job failed, or pauses.

    Attributes:
        code: short name of it.
        message: what is wrong.
        line: line of the input file; None for no particular one.
    """

    code: str
    message: str
    line: int | None = None


class BulkJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One bulk job.

    Attributes:
        id: `batch_…`.
        tenant, user: principal that asked for it.
        key: id of the API key that asked for it; empty: another credential did, or none.
        models: models that it may ask, as its credential may; empty: all.
        endpoint: path of the route whose bodies the lines are, as `/v1/completions`.
        window: time in which it should be done, as the client wrote it.
        metadata: names and texts of the client's own.
        input_file: id of the file of lines.
        created_at, expires_at: Unix times in seconds; lines don't run after the latter.
        status: its status.
        reached: Unix time in seconds at which it reached later statuses, by name.
        cancelling_at: Unix time in seconds at which the client cancelled it; None if it didn't.
        ending: its final status, once decided.
        output_file, error_file: ids of the files of answers and of errors; empty if there is none.
        total, completed, failed: numbers of lines: all, answered, failed.
        faults: why it failed as a whole.
        paused: why nothing of it runs at present; empty while it runs.
        waits: what its lines wait for in the queue; empty while they run.
        waits_until: Unix time in seconds by which that, or the pause, is over; 0 if unknown.
        model: model of its first line.
        owner: name of the process that holds it; empty: none does.
        generation: number of its holders so far; an earlier holder can't change it any more.
    """

    id: str
    tenant: str
    user: str
    endpoint: str
    input_file: str
    created_at: float
    expires_at: float
    key: str = ""
    models: tuple[str, ...] = ()
    window: str = "24h"
    metadata: dict[str, str] | None = None
    status: JobStatus = JobStatus.VALIDATING
    reached: dict[str, float] = {}
    cancelling_at: float | None = None
    ending: JobStatus | None = None
    output_file: str = ""
    error_file: str = ""
    total: int = 0
    completed: int = 0
    failed: int = 0
    faults: tuple[JobFault, ...] = ()
    paused: str = ""
    waits: str = ""
    waits_until: float = 0.0
    model: str = ""
    owner: str = ""
    generation: int = 0

"""Bulk jobs: their files, their state, and their lines, which run in otherwise empty seats."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from headway.model.value import Value


class BulkLine(msgspec.Struct, frozen=True, gc=False):
    """One line of a bulk job to run, or one input of a line that has several."""

    job: str  # Id of the job, `batch_…`.
    tenant: str
    number: int  # Number of the line in its file, from 1.
    model: str
    version: str  # Version of the model, or empty if any will do.
    input: Value
    parameters: bytes = b""  # The line's `parameters` as a JSON object, or empty.
    part: int = 0  # Index of the input in its line.


class BulkFile(msgspec.Struct, frozen=True):
    """A file with the lines of a bulk job, or with its answers."""

    id: str  # `file-…`.
    tenant: str
    name: str  # Name given by the client.
    size: int  # In bytes.
    purpose: str  # `batch` for uploaded lines, `batch_output` for answers and errors.
    created_at: float  # Unix time in seconds.


class Stored(NamedTuple):
    """Bytes and number of the files that a tenant stores, or may store."""

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
        return self in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED)


OPEN_STATUSES = tuple(status for status in JobStatus if not status.ended)
MOST_ENDED = 10_000  # Maximum number of a tenant's finished jobs. The oldest are removed first.


class JobFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a job failed. If a line of the input file is at fault, `line` is its number."""

    code: str
    message: str
    line: int | None = None


class JobDelay(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why none of a job's lines run at present. `paused` and `waits` are empty if they don't apply; at most one is set."""

    paused: str = ""  # Why none of its lines may run.
    waits: str = ""  # What its lines are waiting for in the queue.
    until: float = 0.0  # Unix time in seconds at which this is over, or 0 if unknown.


class BulkJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One bulk job."""

    id: str  # `batch_…`.
    tenant: str
    user: str
    endpoint: str  # Path that its lines are for, such as `/v1/completions`.
    input_file: str  # Id of the file with its lines.
    created_at: float  # Unix time in seconds.
    expires_at: float  # Unix time in seconds, after which none of its lines run.
    key: str = ""  # Id of the API key that created it, or empty.
    models: tuple[str, ...] = ()  # Models that it may use, or empty for all.
    window: str = "24h"  # Time within which it should complete, as given by the client.
    metadata: dict[str, str] | None = None  # Names and values chosen by the client.
    status: JobStatus = JobStatus.VALIDATING
    reached: dict[str, float] = {}  # Unix time in seconds at which it reached each later status, by name.
    cancelling_at: float | None = None  # Unix time in seconds at which the client cancelled it.
    ending: JobStatus | None = None  # Final status, once decided.
    output_file: str = ""  # Id of the file with answers.
    error_file: str = ""  # Id of the file with errors.
    total: int = 0  # Number of lines.
    completed: int = 0  # Number of answered lines.
    failed: int = 0  # Number of failed lines.
    faults: tuple[JobFault, ...] = ()  # Why the job as a whole failed.
    delay: JobDelay = JobDelay()
    model: str = ""  # Model of the first line.
    owner: str = ""  # Name of the process that holds it, or empty.
    generation: int = 0  # Number of holders so far. Previous holders can no longer change the job.

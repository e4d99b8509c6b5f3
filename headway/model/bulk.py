"""Bulk jobs: files of lines that run in otherwise empty seats, and their state."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from headway.model.value import Value


class BulkLine(msgspec.Struct, frozen=True, gc=False):
    """One line of a bulk job on its way to a GPU, or one input of a line with several."""

    job: str  # Id of the job, `batch_…`.
    tenant: str
    number: int  # Number of the line in its file, from 1.
    model: str
    version: str  # Version of the model, or empty for any.
    input: Value
    parameters: bytes = b""  # The line's `parameters` as the text of a JSON object, or empty.
    part: int = 0  # Number of the input in its line, from 0.


class BulkFile(msgspec.Struct, frozen=True):
    """A file of bulk jobs, with lines or with answers."""

    id: str  # As in `file-…`.
    tenant: str
    name: str  # Name given by the client.
    size: int  # In bytes.
    purpose: str  # `batch` for uploaded lines, `batch_output` for answers and errors.
    created_at: float  # Unix time in seconds.


class Stored(NamedTuple):
    """Total bytes and number of the files that a tenant has, or may have."""

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
    """Why a whole job failed or pauses. `line` is the number of a line of the input file that is at fault."""

    code: str
    message: str
    line: int | None = None


class BulkJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One bulk job."""

    id: str  # As in `batch_…`.
    tenant: str
    user: str
    endpoint: str  # Path of the route for its lines, for example `/v1/completions`.
    input_file: str  # Id of the file of lines.
    created_at: float  # Unix time in seconds.
    expires_at: float  # Unix time in seconds after which no line runs.
    key: str = ""  # Id of the API key that created it, or empty.
    models: tuple[str, ...] = ()  # Models that it may ask, or empty for all.
    window: str = "24h"  # Time in which it should be done, as the client wrote it.
    metadata: dict[str, str] | None = None  # Names and texts that the client chose.
    status: JobStatus = JobStatus.VALIDATING
    reached: dict[str, float] = {}  # Unix time in seconds of each later status, by name.
    cancelling_at: float | None = None  # Unix time in seconds at which the client cancelled it, if it did.
    ending: JobStatus | None = None  # Final status, once decided.
    output_file: str = ""  # Id of the file of answers.
    error_file: str = ""  # Id of the file of errors.
    total: int = 0  # Number of all lines.
    completed: int = 0  # Number of answered lines.
    failed: int = 0  # Number of failed lines.
    faults: tuple[JobFault, ...] = ()  # Why it failed as a whole.
    paused: str = ""  # Why none of its lines may run at present, or empty.
    waits: str = ""  # What its lines wait for in the queue, or empty.
    waits_until: float = 0.0  # Unix time in seconds at which the wait or pause is over, or 0 if unknown.
    model: str = ""  # Model of the first line.
    owner: str = ""  # Name of the process that holds it, or empty.
    generation: int = 0  # Number of holders so far. Earlier holders can't change the job any more.

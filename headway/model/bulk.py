"""Bulk jobs: files of lines that run in otherwise empty seats, and their state."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from headway.model.value import Value


class BulkLine(msgspec.Struct, frozen=True, gc=False):
    """One line of a bulk job on its way to a GPU, or one input of a line with several.

    Attributes:
        job: id of the job, `batch_…`.
        number: number of the line in its file, from 1.
        version: version of the model, or empty for any.
        parameters: the line's `parameters` as the text of a JSON object, or empty.
        part: number of the input in its line, from 0.
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
    """A file of bulk jobs, with lines or with answers.

    Attributes:
        id: `file-…`.
        name: name given by the client.
        size: in bytes.
        purpose: `batch` for uploaded lines, `batch_output` for answers and errors.
        created_at: Unix time in seconds.
    """

    id: str
    tenant: str
    name: str
    size: int
    purpose: str
    created_at: float


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
MOST_ENDED = 10_000
"""Maximum number of a tenant's finished jobs. The oldest are removed first."""


class JobFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a whole job failed or pauses. `line` is the number of a line of the input file that is at fault."""

    code: str
    message: str
    line: int | None = None


class BulkJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One bulk job.

    Attributes:
        id: `batch_…`.
        key: id of the API key that created it, or empty.
        models: models that it may ask, or empty for all.
        endpoint: path of the route that takes such bodies, for example `/v1/completions`.
        window: time in which it should be done, as the client wrote it.
        metadata: names and texts of the client's own.
        input_file, output_file, error_file: ids of the files of lines, answers and errors.
        created_at: Unix time in seconds.
        expires_at: Unix time in seconds after which no line runs.
        reached: Unix time in seconds of each later status, by name.
        cancelling_at: Unix time in seconds at which the client cancelled it, if it did.
        ending: final status, once decided.
        total, completed, failed: number of all lines, of answered lines, and of failed lines.
        faults: why it failed as a whole.
        paused: why none of its lines may run at present, or empty.
        waits: what its lines wait for in the queue, or empty.
        waits_until: Unix time in seconds at which the wait or pause is over, or 0 if unknown.
        model: model of the first line.
        owner: name of the process that holds it, or empty.
        generation: number of holders so far. Earlier holders can't change the job any more.
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

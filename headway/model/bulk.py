"""Bulk jobs: files of lines that run in otherwise empty seats, and their state."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from headway.model.value import Value


class BulkLine(msgspec.Struct, frozen=True, gc=False):
    """One line of a bulk job on its way to a GPU, or one of its inputs if it has several.

    Attributes:
        job: id of the job, `batch_…`.
        tenant: account that owns the job.
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
        tenant: account that owns the file.
        name: name given by the client.
        size: its bytes.
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
        """True if the job is over."""
        return self in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED)


OPEN_STATUSES = tuple(status for status in JobStatus if not status.ended)
"""Statuses of jobs that aren't over."""
MOST_ENDED = 10_000
"""Upper bound on a tenant's finished jobs; the oldest are removed first."""


class JobFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a whole job failed or pauses.

    Attributes:
        code: short name of the fault.
        message: what is wrong.
        line: line of the input file, if a particular one is at fault.
    """

    code: str
    message: str
    line: int | None = None


class BulkJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One bulk job.

    Attributes:
        id: `batch_…`.
        tenant, user: principal that created it.
        key: id of the API key that created it; empty if it was another credential, or none.
        models: models that it may ask, as its credential allows; empty: all.
        endpoint: path of the route that takes such bodies, for example `/v1/completions`.
        window: time in which it should be done, as the client wrote it.
        metadata: names and texts of the client's own.
        input_file: id of the file of lines.
        created_at, expires_at: Unix times in seconds; lines don't run after the latter.
        status: its status.
        reached: Unix time in seconds of each later status, by name.
        cancelling_at: Unix time in seconds at which the client cancelled it, if it did.
        ending: its final status, once decided.
        output_file, error_file: ids of the files of answers and errors; empty if there is none.
        total, completed, failed: number of all lines, of answered and of failed ones.
        faults: why it failed as a whole.
        paused: why none of its lines runs at present; empty while any may.
        waits: what its lines wait for in the queue; empty while they run.
        waits_until: Unix time in seconds by which the wait or pause is over; 0 if unknown.
        model: model of its first line.
        owner: name of the process that holds it; empty for none.
        generation: number of its holders so far; earlier holders can't change it any more.
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

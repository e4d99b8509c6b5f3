"""/v1/batches: bulk jobs in OpenAI's form."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from headway.bulk.jobs import BulkJobs
from headway.doors.bodies import decode_problem
from headway.errors import RATE_LIMITED, BadRequest, NotFound, RequestError
from headway.http.openai.bulk_lines import READERS
from headway.http.openai.files import PURPOSE, as_json, listed, not_kept, page, told
from headway.http.requests import Request, RouteAnswer
from headway.http.routing import Authentication, Route
from headway.model.bulk import BulkJob, JobStatus

PATH = "/v1/batches"
MOST_LISTED = 100
LONGEST = 30 * 86_400
"""Most seconds of a completion window."""

_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_UNITS = {"h": 3_600, "d": 86_400}
_MOST_BODY = 1 << 16
_MOST_METADATA = 16
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")


class _Asked(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: msgspec.Raw | None = None


_decode = msgspec.json.Decoder(_Asked).decode


def routes(jobs: BulkJobs, known: Authentication, new_id: Callable[[], str]) -> list[Route]:
    """Routes of batches, for known principals."""
    on = _Batches(jobs, new_id)
    return [
        Route(PATH, known(told(on.collection), counts=True), ("GET", "POST")),
        Route(f"{PATH}/{{id}}", known(told(on.one))),  # What became of a job is polled, as of a task.
        Route(f"{PATH}/{{id}}/cancel", known(told(on.cancel), counts=True), ("POST",)),
    ]


class _Batches:
    def __init__(self, jobs: BulkJobs, new_id: Callable[[], str]) -> None:
        self._jobs, self._new_id = jobs, new_id

    async def collection(self, request: Request) -> RouteAnswer:
        if request.method == "POST":
            return await self._create(request)
        after, limit = page(request, "batch_", 20, MOST_LISTED)
        found = await self._jobs.store.jobs(request.principal.tenant, after, limit + 1)
        return listed([_shown(one, self._jobs.wall()) for one in found], limit)

    async def one(self, request: Request) -> RouteAnswer:
        id = request.params["id"]
        return self._answer(await self._jobs.job(request.principal.tenant, id), id)

    async def cancel(self, request: Request) -> RouteAnswer:
        id = request.params["id"]
        job = await self._jobs.store.cancel(request.principal.tenant, id)
        if job is not None and job.status.ended and job.status is not JobStatus.CANCELLED:
            raise BadRequest(f"the batch has ended already; its status is {job.status.value}")
        self._jobs.feeder.hurry(id)
        return self._answer(job, id)

    async def _create(self, request: Request) -> RouteAnswer:
        asked, principal, wall = await _read(request), request.principal, self._jobs.wall()
        if asked.endpoint not in READERS:
            raise BadRequest(f"expected one of {', '.join(READERS)} - at `$.endpoint`")
        seconds = _seconds(asked.completion_window)
        file = await self._jobs.store.file(principal.tenant, asked.input_file_id)
        if file is None:
            raise NotFound(f"no such file: {asked.input_file_id[:80]} - at `$.input_file_id`")
        if file.purpose != PURPOSE:
            raise BadRequest(f"the file's purpose is {file.purpose}; expected {PURPOSE} - at `$.input_file_id`")
        job = BulkJob(
            id=f"batch_{self._new_id().replace('-', '')}",
            tenant=principal.tenant,
            user=principal.user,
            key=principal.key,
            models=tuple(sorted(principal.models)),
            endpoint=asked.endpoint,
            input_file=file.id,
            window=asked.completion_window,
            metadata=asked.metadata,
            created_at=wall,
            expires_at=wall + seconds,
        )
        most = self._jobs.settings.bulk_max_jobs
        if not await self._jobs.store.add_job(job, most):
            message = f"{most} of your batches have not ended; wait for one, or cancel one (bulk_max_bytes)"
            raise RequestError(message, code=RATE_LIMITED, retry_after=60.0)
        self._jobs.feeder.tell()
        return as_json(_shown(job, wall))

    def _answer(self, job: BulkJob | None, id: str) -> RouteAnswer:
        if job is None:
            raise NotFound(f"no such batch: {id[:80]}")
        return as_json(_shown(job, self._jobs.wall()))


async def _read(request: Request) -> _Asked:
    body = b""
    async for piece in request.pieces():
        body += piece
        if len(body) > _MOST_BODY:
            raise BadRequest(f"the body has more than {_MOST_BODY} bytes")
    try:
        asked = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(decode_problem(exc, body)) from None
    if asked.output_expires_after not in (None, b"null"):
        raise not_kept("output_expires_after")
    if asked.metadata is not None and (
        len(asked.metadata) > _MOST_METADATA
        or any(len(name) > 64 or len(text) > 512 for name, text in asked.metadata.items())
    ):
        reason = f"expected at most {_MOST_METADATA} names of at most 64 characters, with texts of at most 512"
        raise BadRequest(f"{reason} - at `$.metadata`")
    return asked


def _seconds(window: str) -> int:
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found is not None else 0
    if not 0 < seconds <= LONGEST:
        raise BadRequest(
            "expected 24h, or another time from 1h to 30d, in whole hours or days, such as 2h or 7d - at `$.completion_window`"
        )
    return seconds


def _shown(job: BulkJob, now: float) -> dict[str, Any]:
    """A batch at Unix time `now`, in seconds."""
    status = job.status.value
    if job.cancelling_at is not None and not job.status.ended:
        status = "cancelling"
    faults = [{"code": one.code, "message": one.message, "line": one.line, "param": None} for one in job.faults]
    left = math.ceil(job.waits_until - now)
    more = f"; {left} seconds more" if left > 0 else ""
    for code, why in (("paused", job.paused), ("waiting", job.waits)):
        if why and not job.status.ended:
            faults.append({"code": code, "message": why + more, "line": None, "param": None})
    reached = {f"{name}_at": _whole(job.reached.get(name)) for name in _TIMES}
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model or None,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": job.input_file,
        "completion_window": job.window,
        "status": status,
        "output_file_id": job.output_file * job.status.ended or None,
        "error_file_id": job.error_file * job.status.ended or None,
        "created_at": int(job.created_at),
        "expires_at": int(job.expires_at),
        **reached,
        "cancelling_at": _whole(job.cancelling_at),
        "request_counts": {"total": job.total, "completed": job.completed, "failed": job.failed},
        "metadata": job.metadata,
    }


def _whole(at: float | None) -> int | None:
    return None if at is None else int(at)

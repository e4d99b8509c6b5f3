"""OpenAI's API for bulk jobs: /v1/files, with uploads and downloads in pieces, and /v1/batches."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from headway.bulk.folder import why
from headway.bulk.jobs import BulkJobs
from headway.doors.bodies import decode_problem
from headway.errors import (
    NOT_FOUND,
    RATE_LIMITED,
    SERVICE_OVERLOADED,
    AnyError,
    BadRequest,
    FolderUnavailable,
    NotFound,
    RequestError,
    StoreUnavailable,
)
from headway.http.openai.bulk_lines import READERS
from headway.http.problem import Encoded, encode_openai_error
from headway.http.routing import (
    Authentication,
    Handler,
    Request,
    Route,
    RouteAnswer,
    StreamedAnswer,
    as_json,
    refusal,
    without_reason,
)
from headway.model import Failure
from headway.model.bulk import BulkFile, BulkJob, JobStatus
from headway.runtime.logger import get_logger

log = get_logger(__name__)


MOST_PARTS = 32
_MOST_HEAD = 8_190  # Maximum size in bytes of a part's header, and of the text before the first part.
_KIND = re.compile(r'multipart/form-data\s*;.*?\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70})(?=[\s;]|$))', re.IGNORECASE)
_DISPOSITION = re.compile(r"(?:^|\r\n)content-disposition:\s*form-data([^\r\n]*)", re.IGNORECASE)
_PARAMETER = re.compile(r';\s*([a-z]+\*?)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))', re.IGNORECASE)
_ESCAPED = re.compile(r"\\(.)")


class FormPart(NamedTuple):
    """A part of a form. `filename` is None if the part isn't a file. Reading `content` may raise BadRequest."""

    name: str
    filename: str | None
    content: AsyncIterator[bytes]

    async def text(self, limit: int) -> str:
        content = b""
        async for piece in self.content:
            content += piece
            if len(content) > limit:
                raise BadRequest(f"the field {self.name[:60]!r} has more than {limit} bytes")
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"the field {self.name[:60]!r} is not UTF-8") from None


async def parts(headers: Mapping[str, str], pieces: AsyncIterator[bytes]) -> AsyncIterator[FormPart]:
    """Yield the parts of a form. If a part isn't read to its end, the rest is discarded before the next one. Raises BadRequest."""
    kind = headers.get("content-type", "")
    if (match := _KIND.match(kind)) is None:
        raise BadRequest(f"expected a form with a file, multipart/form-data with a boundary; got {kind[:60]!r}")
    delimiter = b"\r\n--" + (match[1] or match[2]).encode()
    body = _Body(pieces)
    await body.until(delimiter)
    for _ in range(MOST_PARTS):
        if (await body.until(b"\r\n", b"--")).startswith(b"--"):
            return
        name, filename = _names(b"\r\n" + await body.until(b"\r\n\r\n"))
        part = FormPart(name, filename, body.before(delimiter))
        yield part
        async for _ in part.content:
            pass
        await asyncio.sleep(
            0
        )  # Let other tasks run: a part's header may take 3 ms, and all parts may have arrived already.
    raise BadRequest(f"the form has more than {MOST_PARTS} parts")


def _names(head: bytes) -> tuple[str, str | None]:
    disposition = _DISPOSITION.search(head.decode("utf-8", "replace"))
    parameters = {
        match[1].lower(): _ESCAPED.sub(r"\1", match[2]) if match[2] is not None else match[3]
        for match in _PARAMETER.finditer(disposition[1] if disposition else "")
    }
    if "name" not in parameters:
        raise BadRequest("the form is malformed: a part has no name")
    filename = parameters.get("filename")
    if (encoded := parameters.get("filename*")) is not None:
        filename = unquote(encoded.rpartition("'")[2])
    return parameters["name"], filename


class _Body:
    """The body of a form. A line break is added in front, so that the first boundary looks like all others."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces, self._buffer = pieces, b"\r\n"

    async def _more(self) -> None:
        piece = await anext(self._pieces, b"")
        if not piece:
            raise BadRequest("the form is malformed: it ends before its last boundary")
        self._buffer += piece

    async def until(self, end: bytes, other: bytes = b"") -> bytes:
        """Return the bytes before `end`, and continue after `end`. If the body continues with `other` instead, return `other`
        and skip nothing. Raises BadRequest if `end` isn't among the next `_MOST_HEAD` bytes."""
        while (at := self._buffer.find(end, 0, _MOST_HEAD)) < 0:
            if other and self._buffer.startswith(other):
                return other
            if len(self._buffer) >= _MOST_HEAD:
                raise BadRequest("the form is malformed: its boundary is missing, or a part's header is too long")
            await self._more()
        head, self._buffer = self._buffer[:at], self._buffer[at + len(end) :]
        return head

    async def before(self, end: bytes) -> AsyncIterator[bytes]:
        while (at := self._buffer.find(end)) < 0:
            safe = max(0, len(self._buffer) - len(end) + 1)  # The bytes after that may be the start of `end`.
            piece, self._buffer = self._buffer[:safe], self._buffer[safe:]
            if piece:
                yield piece
            await self._more()
        piece, self._buffer = self._buffer[:at], self._buffer[at + len(end) :]
        if piece:
            yield piece


FILES, BATCHES = "/v1/files", "/v1/batches"
PURPOSE = "batch"
_KEPT = "expires_after"
_MOST_FILES, _MOST_BATCHES = 10_000, 100
_MOST_FIELD = 1_024
_HEX = re.compile(r"[0-9a-f]{32}")
_WHOLE = re.compile(r"[0-9]{1,9}")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

_LONGEST = 30 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_UNITS = {"h": 3_600, "d": 86_400}
_MOST_BODY = 1 << 16
_MOST_METADATA = 16
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")


class _BatchRequest(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: msgspec.Raw | None = None


_decode = msgspec.json.Decoder(_BatchRequest).decode


def routes(jobs: BulkJobs, known: Authentication, new_id: Callable[[], str]) -> list[Route]:
    """Return the routes for files and batches."""
    files, batches = _Files(jobs, new_id), _Batches(jobs, new_id)

    def route(path: str, handler: Handler, *methods: str, counts: bool = True) -> Route:
        return Route(path, known(_openai_errors(handler), counts=counts), methods)

    return [
        route(FILES, files.list_or_create, "GET", "POST"),
        route(f"{FILES}/{{id}}", files.get_or_delete, "GET", "DELETE"),
        route(f"{FILES}/{{id}}/content", files.download, "GET"),
        route(BATCHES, batches.list_or_create, "GET", "POST"),
        route(f"{BATCHES}/{{id}}", batches.get, "GET", counts=False),  # Clients poll this route.
        route(f"{BATCHES}/{{id}}/cancel", batches.cancel, "POST"),
    ]


def _openai_errors(handler: Handler) -> Handler:
    """Wrap a handler so that it answers errors in OpenAI's format. If storage is unreachable, the details go to the log."""

    async def answer(request: Request) -> RouteAnswer:
        try:
            return await handler(request)
        except RequestError as exc:
            return refusal(request.id, without_reason(exc), _encode_error)
        except StoreUnavailable as exc:
            log.warning("the bulk job storage is unreachable", error=str(exc), request_id=request.id)
            part = "folder" if isinstance(exc, FolderUnavailable) else "database"
            message = f"bulk jobs are not available right now, because their {part} is unreachable; try again"
            return refusal(request.id, Failure(SERVICE_OVERLOADED, message, 1.0, "ledger"), _encode_error)

    return answer


def _encode_error(error: AnyError, shown: str) -> Encoded:
    return encode_openai_error(error, shown, "not_found" if error.code == NOT_FOUND else "")


def _page(request: Request, prefix: str, default: int, maximum: int) -> tuple[str, int]:
    """Return a list request's cursor and page size. The cursor may be the id of a deleted object. Raises BadRequest."""
    if request.param("order") not in (None, "desc"):
        raise BadRequest("`order` must be desc or left out, because lists are always newest first - at `$.order`")
    after = request.param("after") or ""
    if after and not (after.startswith(prefix) and _HEX.fullmatch(after, len(prefix))):
        raise BadRequest(f"expected an id, `{prefix}` and 32 hexadecimal digits - at `$.after`")
    limit = request.param("limit")
    if limit is None:
        return after, default
    if not _WHOLE.fullmatch(limit) or not 1 <= int(limit) <= maximum:
        raise BadRequest(f"expected a number from 1 to {maximum} - at `$.limit`")
    return after, int(limit)


def _not_kept(member: str) -> BadRequest:
    return BadRequest(f"the service determines how long files are kept (keep_days); leave this out - at `$.{member}`")


def _listed(objects: Sequence[dict[str, Any]], limit: int) -> RouteAnswer:
    """Return a page with the first `limit` objects. If there are more `objects`, the page says that another one follows."""
    data = objects[:limit]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    more = {"first_id": ends[0], "last_id": ends[1], "has_more": len(objects) > limit}
    return as_json({"object": "list", "data": data, **more})


class _Files:
    def __init__(self, jobs: BulkJobs, new_id: Callable[[], str]) -> None:
        self._jobs, self._new_id = jobs, new_id

    async def list_or_create(self, request: Request) -> RouteAnswer:
        if request.method == "POST":
            return await self._create(request)
        after, limit = _page(request, "file-", _MOST_FILES, _MOST_FILES)
        purpose = request.param("purpose") or ""
        files = await self._jobs.store.files(request.principal.tenant, after, limit + 1, purpose)
        return _listed([_file_object(file) for file in files], limit)

    async def get_or_delete(self, request: Request) -> RouteAnswer:
        file = await self._file(request)
        if request.method != "DELETE":
            return as_json(_file_object(file))
        if not await self._jobs.store.remove_file(file.tenant, file.id):
            raise BadRequest("a batch that has not ended still uses this file; cancel the batch, or wait until it ends")
        await self._jobs.folder.remove_file(file.id)
        return as_json({"id": file.id, "object": "file", "deleted": True})

    async def download(self, request: Request) -> RouteAnswer:
        file = await self._file(request)
        folder = self._jobs.folder
        size = await folder.size(file.id)

        async def pieces() -> AsyncGenerator[bytes, None]:
            left = size
            try:
                async with aclosing(folder.pieces(folder.file(file.id))) as stored:
                    async for piece in stored:
                        left -= len(piece)
                        yield piece
            except FolderUnavailable as exc:
                log.warning("sending a file failed", file=file.id, error=why(exc), request_id=request.id)
            if left:
                request.cut()

        fields = {"content-length": str(size), "content-disposition": "attachment"}
        ended = self._jobs.begin_transfer(file.tenant)
        return StreamedAnswer(pieces, fields, "application/octet-stream", ended)

    async def _file(self, request: Request) -> BulkFile:
        id = request.params["id"]
        file = await self._jobs.store.file(request.principal.tenant, id)
        if file is None:
            raise NotFound(f"no such file: {id[:80]}")
        return file

    async def _create(self, request: Request) -> RouteAnswer:
        tenant, id = request.principal.tenant, f"file-{self._new_id().replace('-', '')}"
        writer = self._jobs.folder.writer(id)
        name: str | None = None
        purpose = ""
        ended = self._jobs.begin_transfer(tenant)
        try:
            async with self._jobs.upload(tenant) as count:
                async for part in parts(request.headers, request.pieces()):
                    if part.name == "file" and name is None:
                        name = part.filename or "file"
                        async for piece in part.content:
                            count(len(piece))
                            await writer.write((piece,))
                    elif part.name.partition("[")[0] == _KEPT:
                        raise _not_kept(_KEPT)
                    else:
                        text = await part.text(_MOST_FIELD)
                        purpose = text if part.name == "purpose" else purpose
                if purpose != PURPOSE:
                    raise BadRequest(f"expected `{PURPOSE}`, the only supported purpose - at `$.purpose`")
                if name is None or not writer.size:
                    raise BadRequest("the form has no file, or the file is empty - at `$.file`")
                name = _UNSAFE.sub("", name)[:255]
                file = BulkFile(id, tenant, name, writer.size, purpose, self._jobs.wall())
                await writer.commit()
                if not await self._jobs.store.add_file(file, self._jobs.most):
                    await self._jobs.folder.remove_file(file.id)
                    raise self._jobs.too_much()
        finally:
            ended()
            await writer.discard()
        return as_json(_file_object(file))


def _file_object(file: BulkFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created_at),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


class _Batches:
    def __init__(self, jobs: BulkJobs, new_id: Callable[[], str]) -> None:
        self._jobs, self._new_id = jobs, new_id

    async def list_or_create(self, request: Request) -> RouteAnswer:
        if request.method == "POST":
            return await self._create(request)
        after, limit = _page(request, "batch_", 20, _MOST_BATCHES)
        jobs = await self._jobs.store.jobs(request.principal.tenant, after, limit + 1)
        return _listed([_batch_object(job, self._jobs.wall()) for job in jobs], limit)

    async def get(self, request: Request) -> RouteAnswer:
        id = request.params["id"]
        return self._answer(await self._jobs.job(request.principal.tenant, id), id)

    async def cancel(self, request: Request) -> RouteAnswer:
        id = request.params["id"]
        job = await self._jobs.store.cancel(request.principal.tenant, id)
        if job is not None and job.status.ended and job.status is not JobStatus.CANCELLED:
            raise BadRequest(f"the batch has already ended with the status {job.status.value}")
        self._jobs.feeder.hurry(id)
        return self._answer(job, id)

    async def _create(self, request: Request) -> RouteAnswer:
        batch, principal, wall = await _read_batch(request), request.principal, self._jobs.wall()
        if batch.endpoint not in READERS:
            raise BadRequest(f"expected one of {', '.join(READERS)} - at `$.endpoint`")
        seconds = _seconds(batch.completion_window)
        file = await self._jobs.store.file(principal.tenant, batch.input_file_id)
        if file is None:
            raise NotFound(f"no such file: {batch.input_file_id[:80]} - at `$.input_file_id`")
        if file.purpose != PURPOSE:
            raise BadRequest(f"the file's purpose is {file.purpose}; expected {PURPOSE} - at `$.input_file_id`")
        job = BulkJob(
            id=f"batch_{self._new_id().replace('-', '')}",
            tenant=principal.tenant,
            user=principal.user,
            key=principal.key,
            models=tuple(sorted(principal.models)),
            endpoint=batch.endpoint,
            input_file=file.id,
            window=batch.completion_window,
            metadata=batch.metadata,
            created_at=wall,
            expires_at=wall + seconds,
        )
        limit = self._jobs.settings.bulk_max_jobs
        if not await self._jobs.store.add_job(job, limit):
            message = f"{limit} of your batches have not ended (one is allowed for each 100 MiB of bulk_max_bytes); wait for one to end, or cancel one"
            raise RequestError(message, code=RATE_LIMITED, retry_after=60.0)
        self._jobs.feeder.tell()
        return as_json(_batch_object(job, wall))

    def _answer(self, job: BulkJob | None, id: str) -> RouteAnswer:
        if job is None:
            raise NotFound(f"no such batch: {id[:80]}")
        return as_json(_batch_object(job, self._jobs.wall()))


async def _read_batch(request: Request) -> _BatchRequest:
    body = b""
    async for piece in request.pieces():
        body += piece
        if len(body) > _MOST_BODY:
            raise BadRequest(f"the body has more than {_MOST_BODY} bytes")
    try:
        batch = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(decode_problem(exc, body)) from None
    if batch.output_expires_after not in (None, b"null"):
        raise _not_kept("output_expires_after")
    if batch.metadata is not None and (
        len(batch.metadata) > _MOST_METADATA
        or any(len(name) > 64 or len(text) > 512 for name, text in batch.metadata.items())
    ):
        reason = f"expected at most {_MOST_METADATA} names of at most 64 characters, with values of at most 512"
        raise BadRequest(f"{reason} - at `$.metadata`")
    return batch


def _seconds(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _UNITS[match[2]] if match is not None else 0
    if not 0 < seconds <= _LONGEST:
        raise BadRequest(
            "expected 24h, or another time from 1h to 30d in whole hours or days, such as 2h or 7d - at `$.completion_window`"
        )
    return seconds


def _batch_object(job: BulkJob, now: float) -> dict[str, Any]:
    """Convert a job to OpenAI's batch object. `now` is Unix time in seconds."""
    status = job.status.value
    if job.cancelling_at is not None and not job.status.ended:
        status = "cancelling"
    errors = [{"code": fault.code, "message": fault.message, "line": fault.line, "param": None} for fault in job.faults]
    left = math.ceil(job.delay.until - now)
    more = f"; {left} seconds more" if left > 0 else ""
    for code, reason in (("paused", job.delay.paused), ("waiting", job.delay.waits)):
        if reason and not job.status.ended:
            errors.append({"code": code, "message": reason + more, "line": None, "param": None})
    reached = {f"{name}_at": _whole(job.reached.get(name)) for name in _TIMES}
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model or None,
        "errors": {"object": "list", "data": errors} if errors else None,
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

"""/v1/files: files of batches, sent and fetched piece by piece."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from headway.bulk.folder import FileWriter, why
from headway.bulk.jobs import BulkJobs
from headway.errors import NOT_FOUND, AnyError, BadRequest, FolderUnavailable, NotFound, RequestError
from headway.http.form import FormPart, parts
from headway.http.openai.errors import encode_error
from headway.http.problem import Encoded
from headway.http.requests import JSON, Handler, Request, RouteAnswer, StreamedAnswer, refusal, without_reason
from headway.http.routing import Authentication, Route
from headway.model.bulk import BulkFile
from headway.runtime.logger import get_logger

log = get_logger(__name__)

PATH = "/v1/files"
PURPOSE = "batch"
_KEPT = "expires_after"
MOST_LISTED = 10_000
_MOST_FIELD = 1_024
_HEX = re.compile(r"[0-9a-f]{32}")
_WHOLE = re.compile(r"[0-9]{1,9}")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def routes(jobs: BulkJobs, known: Authentication, new_id: Callable[[], str]) -> list[Route]:
    """Routes of files, for known principals."""
    on = _Files(jobs, new_id)
    return [
        Route(PATH, known(told(on.collection), counts=True), ("GET", "POST")),
        Route(f"{PATH}/{{id}}", known(told(on.one), counts=True), ("GET", "DELETE")),
        Route(f"{PATH}/{{id}}/content", known(told(on.content), counts=True)),
    ]


def told(handler: Handler) -> Handler:
    """Handler whose errors are OpenAI's, of what is not found, too."""

    async def answer(request: Request) -> RouteAnswer:
        try:
            return await handler(request)
        except RequestError as exc:
            return refusal(request.id, without_reason(exc), _encode_error)

    return answer


def _encode_error(error: AnyError, shown: str) -> Encoded:
    return encode_error(error, shown, "not_found" if error.code == NOT_FOUND else "")


def as_json(content: Any) -> RouteAnswer:
    """Answer of an object."""
    return RouteAnswer(msgspec.json.encode(content), media_type=JSON)


def page(request: Request, prefix: str, usual: int, most: int) -> tuple[str, int]:
    """Cursor and number of objects that a request for a list asks for. Raises BadRequest.

    The cursor may be of an object that is gone: ids begin with their time, so what is older follows all the same.
    """
    if request.param("order") not in (None, "desc"):
        raise BadRequest("`order` must be desc or left out: lists are always newest first - at `$.order`")
    after = request.param("after") or ""
    if after and not (after.startswith(prefix) and _HEX.fullmatch(after, len(prefix))):
        raise BadRequest(f"expected an id, `{prefix}` and 32 hexadecimal digits - at `$.after`")
    limit = request.param("limit")
    if limit is None:
        return after, usual
    if not _WHOLE.fullmatch(limit) or not 1 <= int(limit) <= most:
        raise BadRequest(f"expected a number from 1 to {most} - at `$.limit`")
    return after, int(limit)


def not_kept(member: str) -> BadRequest:
    """Refusal of a time after which files are to be removed."""
    return BadRequest(f"files are kept for as long as the service says (keep_days); leave it out - at `$.{member}`")


def listed(found: Sequence[dict[str, Any]], limit: int) -> RouteAnswer:
    """Answer of a list, of which one more was asked for than is told."""
    data = found[:limit]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    more = {"first_id": ends[0], "last_id": ends[1], "has_more": len(found) > limit}
    return as_json({"object": "list", "data": data, **more})


class _Files:
    def __init__(self, jobs: BulkJobs, new_id: Callable[[], str]) -> None:
        self._jobs, self._new_id = jobs, new_id

    async def collection(self, request: Request) -> RouteAnswer:
        if request.method == "POST":
            return await self._create(request)
        after, limit = page(request, "file-", MOST_LISTED, MOST_LISTED)
        purpose = request.param("purpose") or ""
        found = await self._jobs.store.files(request.principal.tenant, after, limit + 1, purpose)
        return listed([_shown(one) for one in found], limit)

    async def one(self, request: Request) -> RouteAnswer:
        file = await self._file(request)
        if request.method != "DELETE":
            return as_json(_shown(file))
        if not await self._jobs.store.remove_file(file.tenant, file.id):
            raise BadRequest("a batch that has not ended reads this file; cancel the batch, or wait for its end")
        await self._jobs.folder.remove_file(file.id)
        return as_json({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> RouteAnswer:
        file = await self._file(request)
        folder = self._jobs.folder
        size = await folder.size(file.id)

        async def pieces() -> AsyncGenerator[bytes, None]:
            left = size
            try:
                async with aclosing(folder.pieces(folder.file(file.id))) as found:
                    async for piece in found:
                        left -= len(piece)
                        yield piece
            except FolderUnavailable as exc:
                log.warning("a file cannot be sent to its end", file=file.id, error=why(exc), request_id=request.id)
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
        """Take a file in."""
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
                        await _write(part, writer, count)
                    elif part.name.partition("[")[0] == _KEPT:
                        raise not_kept(_KEPT)
                    else:
                        text = await part.text(_MOST_FIELD)
                        purpose = text if part.name == "purpose" else purpose
                if purpose != PURPOSE:
                    raise BadRequest(f"expected `{PURPOSE}`, the only purpose that is served - at `$.purpose`")
                if name is None or not writer.size:
                    raise BadRequest("the form has no file, or an empty one - at `$.file`")
                file = BulkFile(id, tenant, _UNSAFE.sub("", name)[:255], writer.size, purpose,
                    self._jobs.wall(),
                )  # fmt: skip
                await writer.commit()
                if not await self._jobs.store.add_file(file, self._jobs.most):
                    await self._jobs.folder.remove_file(file.id)
                    raise self._jobs.too_much()
        finally:
            ended()
            await writer.discard()
        return as_json(_shown(file))


async def _write(part: FormPart, writer: FileWriter, count: Callable[[int], None]) -> None:
    async for piece in part.content:
        count(len(piece))
        await writer.write((piece,))


def _shown(file: BulkFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created_at),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }

"""Multipart forms (multipart/form-data), parsed as they arrive: no file is ever whole in memory.

The overhead around the parts is bounded, and no byte is read more than a few times, so a form can't hold up the event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple
from urllib.parse import unquote

from headway.errors import BadRequest

MOST_PARTS = 32
_MOST_HEAD = 8_190
"""Longest header of a part, and longest text before the first part, in bytes."""
_KIND = re.compile(r'multipart/form-data\s*;.*?\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70})(?=[\s;]|$))', re.IGNORECASE)
_DISPOSITION = re.compile(r"(?:^|\r\n)content-disposition:\s*form-data([^\r\n]*)", re.IGNORECASE)
_PARAMETER = re.compile(r';\s*([a-z]+\*?)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))', re.IGNORECASE)
_ESCAPED = re.compile(r"\\(.)")


class FormPart(NamedTuple):
    """One part of a form. `filename` is None if the part isn't a file. Reading `content` may raise BadRequest."""

    name: str
    filename: str | None
    content: AsyncIterator[bytes]

    async def text(self, limit: int) -> str:
        """Read the whole content, at most `limit` bytes. Raises BadRequest."""
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
    """Yield the parts of a form. Each is read to its end before the next. Raises BadRequest."""
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
        await asyncio.sleep(0)  # Let others run: a part's header may take 3 ms, and all may have arrived at once.
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
    """Body of a form, with a line break put in front so that the first boundary looks like the others."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces, self._buffer = pieces, b"\r\n"

    async def _more(self) -> None:
        piece = await anext(self._pieces, b"")
        if not piece:
            raise BadRequest("the form is malformed: it ends before its last boundary")
        self._buffer += piece

    async def until(self, end: bytes, other: bytes = b"") -> bytes:
        """Return the bytes before `end`, at most `_MOST_HEAD`, and drop `end`. Return `other` if the body continues with that."""
        while (at := self._buffer.find(end, 0, _MOST_HEAD)) < 0:
            if other and self._buffer.startswith(other):
                return other
            if len(self._buffer) >= _MOST_HEAD:
                raise BadRequest("the form is malformed: its boundary is missing, or a part's header is too long")
            await self._more()
        head, self._buffer = self._buffer[:at], self._buffer[at + len(end) :]
        return head

    async def before(self, end: bytes) -> AsyncIterator[bytes]:
        """Yield the content before `end` as it arrives, and drop `end`."""
        while (at := self._buffer.find(end)) < 0:
            safe = max(0, len(self._buffer) - len(end) + 1)  # The rest may be the beginning of `end`.
            piece, self._buffer = self._buffer[:safe], self._buffer[safe:]
            if piece:
                yield piece
            await self._more()
        piece, self._buffer = self._buffer[:at], self._buffer[at + len(end) :]
        if piece:
            yield piece

"""Forms with files (multipart/form-data), read as they come: no file is ever whole in memory.

What stands around the parts is bounded, so that no form keeps the event loop from others: `parts` never looks at a byte
more than a few times.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple
from urllib.parse import unquote

from headway.errors import BadRequest

MOST_PARTS = 32
"""Most parts of a form."""
_MOST_HEAD = 8_190
"""Bytes of the longest header of a part, and of what stands before the first part."""
_KIND = re.compile(r'multipart/form-data\s*;.*?\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70})(?=[\s;]|$))', re.IGNORECASE)
_DISPOSITION = re.compile(r"(?:^|\r\n)content-disposition:\s*form-data([^\r\n]*)", re.IGNORECASE)
_PARAMETER = re.compile(r';\s*([a-z]+\*?)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))', re.IGNORECASE)
_ESCAPED = re.compile(r"\\(.)")


class FormPart(NamedTuple):
    """One part of a form.

    Attributes:
        name: name of the field.
        filename: name of the file; None where it is none.
        content: what stands in it, as it comes. Raises BadRequest.
    """

    name: str
    filename: str | None
    content: AsyncIterator[bytes]

    async def text(self, most: int) -> str:
        """Whole content of the part, at most so many bytes. Raises BadRequest."""
        content = b""
        async for piece in self.content:
            content += piece
            if len(content) > most:
                raise BadRequest(f"the field {self.name[:60]!r} has more than {most} bytes")
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"the field {self.name[:60]!r} is not UTF-8") from None


async def parts(headers: Mapping[str, str], pieces: AsyncIterator[bytes]) -> AsyncIterator[FormPart]:
    """Parts of a form, each read to its end before the next one comes. Raises BadRequest.

    Arguments:
        headers: fields of the request's header, by names in lower case.
        pieces: the body, as it comes.
    """
    kind = headers.get("content-type", "")
    if (found := _KIND.match(kind)) is None:
        raise BadRequest(f"expected a form with a file, multipart/form-data with a boundary; got {kind[:60]!r}")
    delimiter = b"\r\n--" + (found[1] or found[2]).encode()
    body = _Body(pieces)
    await body.until(delimiter)
    for _ in range(MOST_PARTS):
        if (await body.until(b"\r\n", b"--")).startswith(b"--"):
            return
        name, filename = _named(b"\r\n" + await body.until(b"\r\n\r\n"))
        part = FormPart(name, filename, body.before(delimiter))
        yield part
        async for _ in part.content:
            pass
        await asyncio.sleep(0)  # The header of one part may take 3 ms, and all may have come at once.
    raise BadRequest(f"the form has more than {MOST_PARTS} parts")


def _named(head: bytes) -> tuple[str, str | None]:
    """Names of a part's field and file, from its header."""
    found = _DISPOSITION.search(head.decode("utf-8", "replace"))
    told = {
        one[1].lower(): _ESCAPED.sub(r"\1", one[2]) if one[2] is not None else one[3]
        for one in _PARAMETER.finditer(found[1] if found else "")
    }
    if "name" not in told:
        raise BadRequest("the form is malformed: a part has no name")
    filename = told.get("filename")
    if (encoded := told.get("filename*")) is not None:
        filename = unquote(encoded.rpartition("'")[2])
    return told["name"], filename


class _Body:
    """Body of a form, which begins as if a line had ended before it."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces, self._buffer = pieces, b"\r\n"

    async def _more(self) -> None:
        piece = await anext(self._pieces, b"")
        if not piece:
            raise BadRequest("the form is malformed: it ends before its last boundary")
        self._buffer += piece

    async def until(self, end: bytes, other: bytes = b"") -> bytes:
        """A few bytes, up to an end, which is dropped; or nothing but `other`, where that stands first."""
        while (at := self._buffer.find(end, 0, _MOST_HEAD)) < 0:
            if other and self._buffer.startswith(other):
                return other
            if len(self._buffer) >= _MOST_HEAD:
                raise BadRequest("the form is malformed: its boundary is missing, or a part's header is too long")
            await self._more()
        found, self._buffer = self._buffer[:at], self._buffer[at + len(end) :]
        return found

    async def before(self, end: bytes) -> AsyncIterator[bytes]:
        """Content before an end, which is dropped, as it comes."""
        while (at := self._buffer.find(end)) < 0:
            sure = max(0, len(self._buffer) - len(end) + 1)
            piece, self._buffer = self._buffer[:sure], self._buffer[sure:]
            if piece:
                yield piece
            await self._more()
        piece, self._buffer = self._buffer[:at], self._buffer[at + len(end) :]
        if piece:
            yield piece

"""Forms with files (multipart/form-data), read as they come: no file is ever whole in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from headway.errors import BadRequest

if TYPE_CHECKING:
    from aiohttp import BodyPartReader, StreamReader

_MOST_LINE = 8_190
"""Bytes of the longest line around the parts, as aiohttp has it."""
_PIECE = 1 << 16
MOST_PARTS = 32
"""Most parts of a form."""


class FormPart(NamedTuple):
    """One part of a form.

    Attributes:
        name: name of the field.
        filename: name of the file; None where it is none.
        reader: reads its content.
    """

    name: str
    filename: str | None
    reader: BodyPartReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """Content of the part, as it comes. Raises BadRequest."""
        while True:
            try:
                piece = await self.reader.read_chunk(_PIECE)
            except (ValueError, AssertionError) as exc:
                raise _malformed(exc) from None
            if piece:
                yield piece
            if self.reader.at_eof():
                return

    async def text(self, most: int) -> str:
        """Whole content of the part, at most so many bytes. Raises BadRequest."""
        content = b""
        async for piece in self.pieces():
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
    from aiohttp import BodyPartReader, MultipartReader  # Imported with the first upload.

    kind = headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise BadRequest(f"expected a form with a file, multipart/form-data; got {kind[:60]!r}")
    count = 0
    try:
        reader = MultipartReader({"Content-Type": kind}, cast("StreamReader", _Body(pieces)))
        while (part := await reader.next()) is not None:
            count += 1
            if not isinstance(part, BodyPartReader) or part.name is None or count > MOST_PARTS:
                raise BadRequest("the form has a part without a name, a form within it, or too many parts")
            yield FormPart(part.name, part.filename, part)
    except BadRequest:
        raise
    except (ValueError, AssertionError, RuntimeError) as exc:
        raise _malformed(exc) from None
    except Exception as exc:
        if type(exc).__module__.startswith("aiohttp"):
            raise _malformed(exc) from None
        raise


def _malformed(exc: Exception) -> BadRequest:
    return BadRequest(f"the form is malformed: {str(exc)[:200] or type(exc).__name__}")


class _Body:
    """Body of a request, as aiohttp's reader of forms asks for it."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._buffer = b""
        self._ended = False

    async def _more(self) -> None:
        try:
            self._buffer += await anext(self._pieces)
        except StopAsyncIteration:
            self._ended = True

    async def read(self, size: int) -> bytes:
        if not self._buffer and not self._ended:
            await self._more()
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0 and not self._ended:
            if len(self._buffer) > _MOST_LINE:
                raise ValueError("a line around its parts is too long, or its boundary is missing")
            await self._more()
        end = end + 1 if end >= 0 else len(self._buffer)
        if end > _MOST_LINE:
            raise ValueError("a line around its parts is too long")
        found, self._buffer = self._buffer[:end], self._buffer[end:]
        return found

    def unread_data(self, data: bytes) -> None:
        self._buffer = data + self._buffer

    def at_eof(self) -> bool:
        return self._ended and not self._buffer

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"aiohttp's reader of forms asks for {name}")

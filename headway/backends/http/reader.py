"""Reader of large answers of a remote API, in a process of its own: decoding them would hold up the event loop.

    python -P -m headway.backends.http.reader EXPECTED < BODY

The process writes its result piece by piece: a word for the whole, empty if all is well, then one item for each input.
Each is msgpack after its length. A reader that is no longer wanted is killed, wherever it is in its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from collections.abc import Iterator
from typing import IO, Any, cast

import msgspec

from headway.backends.http import answer
from headway.backends.http.answer import NoOutputs
from headway.model import ItemResult

APART_FROM = 4 << 20
"""Bytes from which an answer is worth a process. Decoding fewer takes some milliseconds at most."""
_CHUNK = 1 << 18
_LENGTH = struct.Struct(">Q")

_encode = msgspec.msgpack.Encoder().encode
_decode_word: Any = msgspec.msgpack.Decoder(str).decode
_decode_item: Any = msgspec.msgpack.Decoder(tuple[str | None, str | None, bool]).decode


async def read(body: bytearray, expected: int) -> list[ItemResult]:
    """Read one item for each of the `expected` inputs, as `answer.read` finds them, in a process of its own.

    Raises:
        NoOutputs: the body holds another number of outputs.
    """
    if len(body) < APART_FROM:
        return answer.read(body, expected)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", __name__, str(expected)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:  # Short of processes, the answer still counts for more than the time.
        return answer.read(body, expected)
    source, sink = cast(asyncio.StreamReader, process.stdout), cast(asyncio.StreamWriter, process.stdin)
    try:
        await _send(sink, body)
        if word := _decode_word(await _piece(source)):
            raise NoOutputs(word)
        return [ItemResult(*_decode_item(await _piece(source))) for _ in range(expected)]
    except (asyncio.IncompleteReadError, ConnectionError):
        raise NoOutputs("something that could not be read") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _send(pipe: asyncio.StreamWriter, body: bytearray) -> None:
    for start in range(0, len(body), _CHUNK):
        pipe.write(bytes(body[start : start + _CHUNK]))
        await pipe.drain()
    pipe.close()


async def _piece(pipe: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await pipe.readexactly(_LENGTH.size))
    return await pipe.readexactly(length)


def _pieces(body: bytes, expected: int) -> Iterator[bytes]:
    """Pieces that the process writes for a body."""
    try:
        items = answer.read(body, expected)
    except NoOutputs as exc:
        yield _encode(str(exc))
        return
    yield _encode("")
    for item in items:
        yield _encode((item.output, item.error, item.fault))


def main(arguments: list[str], source: IO[bytes], sink: IO[bytes]) -> None:
    """Run as the process that `arguments` describe."""
    for piece in _pieces(source.read(), int(arguments[0])):
        sink.write(_LENGTH.pack(len(piece)))
        sink.write(piece)
    sink.flush()


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin.buffer, sys.stdout.buffer)

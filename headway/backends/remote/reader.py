"""Reads large answers from a remote API in a separate process, because decoding them would block the event loop.

    python -P -m headway.backends.remote.reader DIALECT FIELDS EXPECTED JSON_BYTES [ROWS…] < BODY

DIALECT is a name in the dialect table, and FIELDS is a JSON object with the dialect's fields. The process first writes the error about
the whole answer, or an empty string, and then a result for each input, each as msgpack preceded by its length. It is killed once
it is no longer needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any, cast

import msgspec

from headway.dialects.dialect import Dialect, NoOutputs
from headway.dialects.table import DIALECTS
from headway.model import MOST_OUTPUT, ItemResult, Tensors, TokenCount

APART_FROM = 4 << 20  # Size in bytes from which an answer is read in a process. Smaller ones take only milliseconds.
_CHUNK = 1 << 18
_LENGTH = struct.Struct(">Q")

_encode = msgspec.msgpack.Encoder().encode
_decode_word: Any = msgspec.msgpack.Decoder(str).decode
_decode_item: Any = msgspec.msgpack.Decoder(tuple[Any, str | None, bool, bool, TokenCount | None]).decode


async def read(
    dialect: Dialect, body: bytes | bytearray, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()
) -> list[ItemResult]:
    """Read a result for each of the `expected` inputs, in a separate process if the answer is large. `json_bytes` is the
    length of the JSON if binary data follows it, or else -1. For `rows`, see `Dialect.decode`. Raises NoOutputs if the
    answer is unreadable, or has the wrong number of outputs."""
    if len(body) < APART_FROM or dialect.is_light(json_bytes):
        return _decoded(dialect, body, expected, json_bytes, rows)
    name = next(name for name, kind in DIALECTS.items() if kind is type(dialect))
    arguments = name, msgspec.json.encode(dialect).decode(), *map(str, (expected, json_bytes, *rows))
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", __name__, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:  # No process could be started. Blocking is better than failing.
        return _decoded(dialect, body, expected, json_bytes, rows)
    source, sink = cast(asyncio.StreamReader, process.stdout), cast(asyncio.StreamWriter, process.stdin)
    try:
        await _send(sink, body)
        if error := _decode_word(await _piece(source)):
            raise NoOutputs(error)
        return [_item(await _piece(source)) for _ in range(expected)]
    except (asyncio.IncompleteReadError, ConnectionError):
        raise NoOutputs("something that could not be read") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _send(pipe: asyncio.StreamWriter, body: bytes | bytearray) -> None:
    for start in range(0, len(body), _CHUNK):
        pipe.write(bytes(body[start : start + _CHUNK]))
        await pipe.drain()
    pipe.close()


async def _piece(pipe: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await pipe.readexactly(_LENGTH.size))
    return await pipe.readexactly(length)


def _item(piece: bytes) -> ItemResult:
    output, *rest = _decode_item(piece)
    return ItemResult(Tensors(output[0]) if isinstance(output, list) else output, *rest)


def _decoded(
    dialect: Dialect, body: bytes | bytearray, expected: int, json_bytes: int, rows: Sequence[int]
) -> list[ItemResult]:
    return [_bounded(item) for item in dialect.decode(body, expected, json_bytes, rows)]


def _bounded(item: ItemResult) -> ItemResult:
    size = len(item.output or "")
    if size <= MOST_OUTPUT:
        return item
    unit = "characters" if isinstance(item.output, str) else "bytes"
    return ItemResult(
        None, f"the remote API answered {size} {unit}, but the limit is {MOST_OUTPUT}", True, tokens=item.tokens
    )


def _pieces(body: bytes, arguments: list[str]) -> Iterator[bytes]:
    name, fields, expected, json_bytes, *rows = arguments
    dialect = msgspec.json.decode(fields, type=DIALECTS[name])
    try:
        items = _decoded(dialect, body, int(expected), int(json_bytes), [*map(int, rows)])
    except NoOutputs as exc:
        yield _encode(str(exc))
        return
    yield _encode("")
    for item in items:
        yield _encode((item.output, item.error, item.fault, item.elsewhere, item.tokens))


def main(arguments: list[str], source: IO[bytes], sink: IO[bytes]) -> None:
    """Run as the process that `arguments` describe."""
    for piece in _pieces(source.read(), arguments):
        sink.write(_LENGTH.pack(len(piece)))
        sink.write(piece)
    sink.flush()


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin.buffer, sys.stdout.buffer)

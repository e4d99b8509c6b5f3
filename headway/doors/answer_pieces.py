"""Pieces of large answers. Each piece is quick to make, and an output is freed once its pieces are made."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from headway.core import failures, tensor_json, values
from headway.core.tensors import NoTensors
from headway.errors import RequestError
from headway.model import Tensors, Value
from headway.oip.tensors import head_of

PIECE = 1 << 18
"""Bytes or characters of a large output in one piece."""

HOLE = secrets.token_hex(16)
"""Placeholder for an output that is written piece by piece. Random, so that no output can contain it."""

ELSEWHERE = "the Open Inference Protocol has it (`binary_data`, at /v2/models/MODEL/infer)"
"""Advice for outputs that JSON cannot hold."""

_encode = msgspec.json.Encoder().encode


def released(outputs: Sequence[Value]) -> Iterator[Value]:
    """Yield the outputs in order and keep no reference to them, so that each can be freed as soon as it is written."""
    remaining = list(reversed(outputs))
    del outputs
    while remaining:
        yield remaining.pop()


def cut(content: bytes | memoryview) -> Iterator[bytes]:
    """Cut bytes into pieces."""
    if len(content) <= PIECE:
        yield bytes(content)
        return
    for begin in range(0, len(content), PIECE):
        yield bytes(content[begin : begin + PIECE])


def packed_pieces(elements: Sequence[bytes]) -> Iterator[bytes]:
    """Yield a tensor's elements in the binary form."""
    for element in elements:
        yield head_of(element)
        yield from cut(element)


def is_large(output: Value) -> bool:
    """Return True if an output takes long to write. Tensors count sooner, because their numbers become JSON."""
    return len(output) > (PIECE // 8 if isinstance(output, Tensors) else PIECE)


def json_pieces(output: Value) -> Iterator[bytes]:
    """Yield an output as JSON text.

    Raises:
        UnicodeEncodeError: a text contains a lone surrogate.
        RequestError: JSON cannot hold the tensors.
    """
    if isinstance(output, str):
        if len(output) <= PIECE:
            yield _encode(output)
        else:
            yield from text_pieces(output)
    elif isinstance(output, Tensors):
        yield from tensor_pieces(output)
    else:
        yield from cut(values.as_json(output))


def items_of(outputs: Sequence[Value]) -> Iterator[Iterator[bytes]]:
    """Yield the JSON pieces of each of several outputs; see `json_pieces`. An error says which input it belongs to."""
    if isinstance(outputs[0], Tensors):  # Then all are: a model gives one kind of values.
        return map(_placed, released(outputs), itertools.count(), itertools.repeat(len(outputs)))
    return map(json_pieces, released(outputs))


def _placed(output: Value, position: int, count: int) -> Iterator[bytes]:
    try:
        yield from json_pieces(output)
    except RequestError as exc:
        raise RequestError(failures.at_input(position, count, exc.message), code=exc.code, reason=exc.reason) from None


def tensor_pieces(output: Tensors) -> Iterator[bytes]:
    """Yield tensors as nested JSON arrays. Raises RequestError if JSON cannot hold them."""
    try:
        yield from tensor_json.pieces(output)
    except NoTensors as exc:
        raise failures.no_json(exc, f": {ELSEWHERE}") from None


def text_pieces(text: str) -> Iterator[bytes]:
    """Yield a JSON string. Raises UnicodeEncodeError for a lone surrogate."""
    if len(text) <= PIECE:
        yield _encode(text)
        return
    yield b'"'
    for begin in range(0, len(text), PIECE):
        yield _encode(text[begin : begin + PIECE])[1:-1]
    yield b'"'


def value_within(document: bytes, output: Value) -> Iterator[bytes]:
    """Yield a JSON document with an output in place of HOLE."""
    head, _, tail = document.partition(b'"%b"' % HOLE.encode())
    yield head
    yield from json_pieces(output)
    yield tail


def array_within(document: bytes, name: str, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield a JSON object with one of its members filled in.

    Arguments:
        document: the object, in which the member `name` is an empty array and no earlier member is an object.
        name: name of the member.
        items: JSON pieces of each array element.
    """
    head, member, tail = document.partition(b'"%b":[' % name.encode())
    yield head + member
    separator = b""
    for item in items:
        yield separator
        yield from item
        separator = b","
    yield tail

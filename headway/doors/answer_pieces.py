"""Pieces of answers with several outputs: each is made in a short time, and an output is let go of when it is in them."""

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
"""Bytes or characters of a large output that go into one piece."""

HOLE = secrets.token_hex(16)
"""Text that stands for an output which is written piece by piece; no client and no model knows it."""

ELSEWHERE = "the Open Inference Protocol has it (`binary_data`, at /v2/models/MODEL/infer)"
"""Words on where a client gets what JSON cannot hold."""

_encode = msgspec.json.Encoder().encode


def released(outputs: Sequence[Value]) -> Iterator[Value]:
    """Each of the outputs in order. It is kept no longer than its reader keeps it, where nobody else has the sequence."""
    left = list(reversed(outputs))
    del outputs
    while left:
        yield left.pop()


def cut(content: bytes | memoryview) -> Iterator[bytes]:
    """Pieces of some bytes."""
    if len(content) <= PIECE:
        yield bytes(content)
        return
    for begin in range(0, len(content), PIECE):
        yield bytes(content[begin : begin + PIECE])


def packed_pieces(elements: Sequence[bytes]) -> Iterator[bytes]:
    """Pieces of the binary form of a tensor's elements."""
    for one in elements:
        yield head_of(one)
        yield from cut(one)


def is_large(output: Value) -> bool:
    """Whether an output takes long to write. One of tensors does so sooner, as its numbers become JSON."""
    return len(output) > (PIECE // 8 if isinstance(output, Tensors) else PIECE)


def json_pieces(output: Value) -> Iterator[bytes]:
    """Pieces of the JSON text of an output.

    Raises:
        UnicodeEncodeError: it is a text with a lone surrogate.
        RequestError: it is tensors that JSON cannot hold.
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
    """Pieces of the JSON texts of the outputs of several inputs; see `json_pieces`. An error tells the place of its input."""
    if isinstance(outputs[0], Tensors):  # Then all are: a model gives one kind.
        return map(_placed, released(outputs), itertools.count(), itertools.repeat(len(outputs)))
    return map(json_pieces, released(outputs))


def _placed(output: Value, position: int, count: int) -> Iterator[bytes]:
    try:
        yield from json_pieces(output)
    except RequestError as exc:
        raise RequestError(failures.at_input(position, count, exc.message), code=exc.code, reason=exc.reason) from None


def tensor_pieces(output: Tensors) -> Iterator[bytes]:
    """Pieces of the nested arrays of tensors. Raises RequestError where JSON cannot hold them."""
    try:
        yield from tensor_json.pieces(output)
    except NoTensors as exc:
        raise failures.no_json(exc, f": {ELSEWHERE}") from None


def text_pieces(text: str) -> Iterator[bytes]:
    """Pieces of a JSON string. Raises UnicodeEncodeError for a lone surrogate."""
    if len(text) <= PIECE:
        yield _encode(text)
        return
    yield b'"'
    for begin in range(0, len(text), PIECE):
        yield _encode(text[begin : begin + PIECE])[1:-1]
    yield b'"'


def value_within(document: bytes, output: Value) -> Iterator[bytes]:
    """Pieces of a JSON document in which an output takes the place of the text HOLE."""
    head, _, tail = document.partition(b'"%b"' % HOLE.encode())
    yield head
    yield from json_pieces(output)
    yield tail


def array_within(document: bytes, name: str, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Pieces of a JSON object one member of which is an array.

    Arguments:
        document: JSON text of the object, with an empty array in its place.
        name: name of the member. No member before it is an object.
        items: pieces of each item of the array.
    """
    head, member, tail = document.partition(b'"%b":[' % name.encode())
    yield head + member
    between = b""
    for item in items:
        yield between
        yield from item
        between = b","
    yield tail

"""Pieces of answers with several outputs: each is made in a short time, and an output is let go of when it is in them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from headway.core import values
from headway.model import Value
from headway.oip.tensors import head_of

PIECE = 1 << 18
"""Bytes or characters of a large output that go into one piece."""

HOLE = secrets.token_hex(16)
"""Text that stands for an output which is written piece by piece; no client and no model knows it."""

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


def json_pieces(output: Value) -> Iterator[bytes]:
    """Pieces of the JSON text of an output. Raises UnicodeEncodeError for a text with a lone surrogate."""
    if not isinstance(output, str):
        yield from cut(values.as_json(output))
    else:
        yield from text_pieces(output)


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

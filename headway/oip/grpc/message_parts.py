"""Splits a large ModelInfer message before it is decoded.

Protobuf decodes a message in a single call. For a message of tiny members, that would block the event loop for up to 30 ns per byte. So
the members of a large message are counted first, skipping their contents. There may be at most MOST_MEMBERS, and only data and parameters
may be long. Raw contents are neither decoded nor copied.
"""

from __future__ import annotations

from typing import Any

from headway import protos
from headway.core.tensors import MOST_TENSORS
from headway.errors import BadRequest

_REQUEST = protos.message("inference.ModelInferRequest").DESCRIPTOR
_TENSOR = _REQUEST.fields_by_name["inputs"].message_type
_DATA = _TENSOR.fields_by_name["contents"].message_type


def _tag(kind: Any, name: str) -> int:
    return int(kind.fields_by_name[name].number << 3 | 2)


_PARAMETERS, _INPUTS, RAW = (_tag(_REQUEST, name) for name in ("parameters", "inputs", "raw_input_contents"))
_NAMES = frozenset(_tag(_REQUEST, name) for name in ("model_name", "model_version", "id"))  # Strings: always fast.
_CONTENTS = _tag(_TENSOR, "contents")
_COPIED = frozenset(_tag(_DATA, name) for name in ("fp32_contents", "fp64_contents", "bytes_contents"))
"""Typed data that protobuf copies unchanged, so that their length hardly matters."""
_VALUE = 2 << 3 | 2
_FIXED = {1: 8, 5: 4}  # Size in bytes of members of fixed size, by wire type.

MOST_MEMBERS = 1024  # Maximum members of a large message, with those of its inputs. 64 inputs and outputs have 600.
_MOST_FRONT = 1 << 15  # Maximum size in bytes of a large message, not counting its data and parameters.
MOST_TYPED = 1 << 20  # Maximum size in bytes of `contents` that aren't copied unchanged.

Data = bytes | memoryview
_Member = tuple[int, int, int, int]  # A member: its tag, and the positions of its start, content and end.


def split(body: bytes) -> tuple[bytes, list[Data]]:
    """Return a message without its raw contents, and views of the raw contents. Raises BadRequest if the message would take too
    long to decode."""
    walk = _Walk(body)
    others: list[Data] = []
    raw: list[Data] = []
    typed: list[_Member] = []
    front = 0
    for tag, begin, content, end in walk.members(0, len(body)):
        if tag == RAW:
            raw.append(memoryview(body)[content:end])
            continue
        others.append(memoryview(body)[begin:end])
        if tag == _PARAMETERS:
            for inner, _, value, after in walk.members(content, end):
                if inner == _VALUE:
                    walk.members(value, after)
            continue
        front += end - begin if tag not in _NAMES else 0
        if tag == _INPUTS:
            contents = [member for member in walk.members(content, end) if member[0] == _CONTENTS]
            front -= sum(after - before for _, before, _, after in contents)
            typed += contents
    if front > _MOST_FRONT:
        raise BadRequest(
            f"the names, shapes and parameters of inputs and outputs take {front} bytes; the limit is {_MOST_FRONT}"
        )
    _check_typed(walk, typed)
    return b"".join(others), raw


def front_of(body: bytes) -> bytes:
    """Return a message up to its inputs: names, id, and short parameters. Raises BadRequest if it is malformed."""
    walk, at = _Walk(body), 0
    while at < len(body):
        tag, content = walk.varint(at, len(body))
        if tag & 7 != 2 or tag >= _INPUTS:
            break
        size, content = walk.varint(content, len(body))
        if content + size > len(body) or (tag not in _NAMES and content + size - at > _MOST_FRONT):
            break
        at = content + size
    return body[:at]


def _check_typed(walk: _Walk, typed: list[_Member]) -> None:
    size = sum(end - content for _, _, content, end in typed)
    if size <= MOST_TYPED:
        return
    if any(tag not in _COPIED for _, _, content, end in typed for tag, *_ in walk.members(content, end)):
        raise BadRequest(
            f"`contents` with integers or booleans take {size} bytes; the limit is {MOST_TYPED}; send the data in `raw_input_contents`"
        )


class _Walk:
    def __init__(self, body: bytes) -> None:
        self._body, self._left = body, MOST_MEMBERS

    def members(self, at: int, end: int) -> list[_Member]:
        walked: list[_Member] = []
        body, size = self._body, 0
        limit = self._left
        while at < end:
            if len(walked) == limit:
                raise BadRequest(
                    f"the message has more than {MOST_MEMBERS} members, which would take long to decode; send at most {MOST_TENSORS} inputs and "
                    f"outputs, and put the elements of large ones into `raw_input_contents`"
                )
            tag, content = body[at], at + 1
            if tag > 0x7F:
                tag, content = self.varint(at, end)
            kind = tag & 7
            if kind == 2:
                size, content = self.varint(content, end)
            elif kind in _FIXED:
                size = _FIXED[kind]
            elif kind == 0:
                size = self.varint(content, end)[1] - content
            else:
                raise self._malformed()
            after = content + size
            if after > end:
                raise self._malformed()
            walked.append((tag, at, content, after))
            at = after
        self._left -= len(walked)
        return walked

    def varint(self, at: int, end: int) -> tuple[int, int]:
        number = shift = 0
        while at < end and shift < 64:
            byte = self._body[at]
            number |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return number, at
        raise self._malformed()

    def _malformed(self) -> BadRequest:
        return protos.malformed(len(self._body), _REQUEST.full_name)

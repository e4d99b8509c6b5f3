"""Tensors: named arrays of numbers packed into one value, and checks against a model's specifications.

    length of the header, 4 bytes, little-endian
    header: msgpack of [single, [[name, datatype, shape], …]]
    data of each tensor in turn

Each tensor's data begin at a multiple of ALIGNED bytes. Gaps, and the end after the last data, are filled with zeros. Numbers
are little-endian, in row-major order. Elements of a BYTES tensor are in the binary form of the Open Inference Protocol: each
follows its length, which takes 4 bytes, little-endian. A tensor of JSON contains JSON texts in that form. The first axis of
each shape counts the rows, and has the same length in all tensors of a value. `single` marks a value with one row whose reader
doesn't expect a row axis. In JSON, this axis is left out.

Protocol: https://github.com/kserve/open-inference-protocol, "Tensor Data Types" and "Binary Tensor Data"."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import msgspec

from headway.core.excerpt import excerpt
from headway.model import Octets, Tensors, TensorSpec, Value

# Bytes per element, by datatype; 0 if elements differ. JSON is used only inside Headway. Clients see BYTES.
SIZES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "FP32": 4, "FP64": 8, "BF16": 2, "BYTES": 0, "JSON": 0,
}  # fmt: skip
BYTES, JSON = "BYTES", "JSON"
ALIGNED = 16
LENGTH_BYTES = 4
MOST_TENSORS = 64  # Limit on the number of tensors in a value.
MOST_AXES = 32  # Limit on the axes of a tensor.
MOST_ELEMENTS = 1 << 16  # Limit on the BYTES elements in a request. Even an empty one takes far longer than a number.
_SHORT = 1024  # Headers of up to this many bytes are cached.
_MOST_SHOWN = 8
_NAME = attrgetter("name")
_LARGEST = 1 << 40  # More elements than any value has.
_MOST_EMPTY = 1 << 16  # Limit on the empty arrays in a tensor without elements. They take no bytes in a request.

_encode = msgspec.msgpack.Encoder().encode
_LENGTH = struct.Struct("<I")
_read_length, _write_length = _LENGTH.unpack_from, _LENGTH.pack


# Number of bits of the integers that a datatype can hold without gaps.
_DIGITS = {
    "UINT8": 8, "UINT16": 16, "UINT32": 32, "UINT64": 64, "INT8": 7, "INT16": 15, "INT32": 31, "INT64": 63,
    "BF16": 8, "FP16": 11, "FP32": 24, "FP64": 53,
}  # fmt: skip
_FLOATS = ("BF16", "FP16", "FP32", "FP64")


class NoTensors(ValueError):
    """The tensors are damaged, or a model doesn't take them. The message is a sentence without a full stop."""


class TensorHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Name, datatype and shape of a tensor. The first axis counts the rows."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Header of a value; see the top of this file."""

    single: bool
    heads: tuple[TensorHead, ...]

    @property
    def rows(self) -> int:
        return self.heads[0].shape[0] if self.heads else 0


class Tensor(NamedTuple):
    """Tensor with its data, in the form described at the top of this file."""

    head: TensorHead
    data: bytes | memoryview


_decode = msgspec.msgpack.Decoder(Header).decode
_often_decode = lru_cache(maxsize=256)(_decode)  # Cached, because many requests have the same header.


def count_of(shape: Iterable[int]) -> int:
    """Return the number of elements in a shape."""
    return math.prod(shape)


def pack(tensors: Sequence[Tensor], *, single: bool = False) -> Tensors:
    """Pack tensors with the same number of rows, copying each once. If `single`, readers see one row without a row axis."""
    return Tensors(b"".join(packed(tensors, single=single)))


def packed(tensors: Sequence[Tensor], *, single: bool = False) -> list[bytes | memoryview]:
    """Return packed tensors in pieces; see `pack`."""
    pieces: list[bytes | memoryview] = [opening([tensor.head for tensor in tensors], single=single)]
    for tensor in tensors:
        size = len(tensor.data) if isinstance(tensor.data, bytes) else tensor.data.nbytes
        pieces += (tensor.data, bytes(-size % ALIGNED))
    return pieces


def opening(heads: Sequence[TensorHead], *, single: bool = False) -> bytes:
    """Return what precedes the data in packed tensors; see `pack`."""
    short = sum([len(head.name) for head in heads]) <= _SHORT
    return (_often_opening if short else _opening)(single, tuple(heads))


def header_of(value: Octets) -> Header:
    """Return the header of packed tensors. Raises NoTensors if it is damaged."""
    return _header(value.content)[0]


def opening_of(content: bytes) -> bytes:
    """Return the bytes before the data in packed tensors. They are the same for the same headers. b"" if they are long."""
    end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    return bytes(content[: end + -end % ALIGNED]) if end < _SHORT else b""


def canonical(value: Octets) -> bytes:
    """Return bytes that are the same for tensors that mean the same. A single tensor's name doesn't matter: it isn't checked."""
    header, start = _header(value.content)
    if len(header.heads) != 1:
        return value.content
    [head] = header.heads
    return _opening(header.single, (TensorHead("", head.datatype, head.shape),)) + value.content[start:]


def rows_of(value: Value) -> int:
    """Return the number of rows of a value; 1 for tensors without rows, and for other values."""
    return header_of(value).rows or 1 if isinstance(value, Tensors) else 1


def unpack(value: Octets) -> list[Tensor]:
    """Return the tensors in a value, as views of its bytes. Raises NoTensors if the value is damaged."""
    content = memoryview(value.content)
    header, at = _header(value.content)
    tensors = []
    for head in header.heads:
        size = SIZES.get(head.datatype)
        if size is None or not head.shape or min(head.shape) < 0:
            raise NoTensors(
                f"the tensor {quoted(head.name)} has the datatype {quoted(head.datatype)} and shape {shown_shape(head.shape)}"
            )
        length = size * count_of(head.shape) if size else length_of_elements(content[at:], count_of(head.shape))
        if length < 0 or length > len(content) - at:
            raise NoTensors(f"the data of the tensor {quoted(head.name)} are truncated")
        tensors.append(Tensor(head, content[at : at + length]))
        at += length + -length % ALIGNED
    if at != len(content):
        raise NoTensors("there are data left over after the last tensor")
    return tensors


def length_of_elements(data: bytes | memoryview, count: int) -> int:
    """Return how many bytes the first `count` BYTES elements in some data take, or -1 if there are fewer."""
    at, last = 0, len(data) - LENGTH_BYTES
    for _ in range(count):
        if at > last:
            return -1
        at += LENGTH_BYTES + _read_length(data, at)[0]
    return at if at <= len(data) else -1


def split_elements(data: bytes | memoryview) -> list[bytes]:
    """Return the elements of a BYTES tensor. Raises NoTensors if it is damaged."""
    return [element for page in pages_of_elements(data, len(data)) for element in page]


def pages_of_elements(data: bytes | memoryview, most: int) -> Iterator[list[bytes]]:
    """Yield the elements of a BYTES tensor, up to `most` at a time. Raises NoTensors if it is damaged."""
    page: list[bytes] = []
    at, end, count = 0, len(data), 0
    while at < end:
        body = at + LENGTH_BYTES
        after = body + _read_length(data, at)[0] if body <= end else body
        if after > end:
            raise NoTensors(f"the data end within element {count + len(page)}")
        page.append(bytes(data[body:after]))
        at = after
        if len(page) == most:
            yield page
            count += most
            page = []
    if page:
        yield page


def join_elements(elements: Iterable[bytes]) -> bytes:
    """Return elements as the data of a BYTES tensor."""
    elements = list(elements)
    pieces = [b""] * (2 * len(elements))
    pieces[::2], pieces[1::2] = map(_write_length, map(len, elements)), elements
    return b"".join(pieces)


def specs_of(value: Octets) -> tuple[TensorSpec, ...]:
    """Return specifications that fit a value. Raises NoTensors if it is damaged."""
    return tuple(TensorSpec(head.name, head.datatype, head.shape[1:]) for head in header_of(value).heads)


def check_data(head: TensorHead, size: int) -> None:
    """Check the size in bytes of a tensor's data. BYTES tensors aren't checked. Raises NoTensors."""
    expected = SIZES[head.datatype] * count_of(head.shape)
    if size != expected:
        raise NoTensors(
            f"the input {quoted(head.name)} has {size} bytes; {head.datatype} of shape {shown_shape(head.shape)} takes {expected}"
        )


def _holds(datatype: str, other: str) -> bool:
    if other not in _DIGITS or datatype not in _DIGITS:
        return other == datatype
    if other in _FLOATS:
        return other == datatype or (datatype in _FLOATS and SIZES[datatype] > SIZES[other])
    is_signed = datatype in _FLOATS or datatype[0] == "I" or other[0] == "U"
    return is_signed and _DIGITS[datatype] >= _DIGITS[other]


# Datatypes that are accepted for each datatype: itself, and all whose numbers it can hold.
_TAKEN = {datatype: frozenset(other for other in SIZES if _holds(datatype, other)) for datatype in SIZES}


def _remedy(sent: str, taken: str) -> str:
    """Return a sentence that says what to send instead of numbers that would be rounded or cut off."""
    if sent not in _DIGITS or taken not in _DIGITS:
        return ""
    name = taken.lower().replace("fp", "float")
    return f". Send {taken}" if taken == "BF16" else f". Send {taken}: in numpy use `.astype('{name}')`"


def check_head(head: TensorHead, specs: Sequence[TensorSpec]) -> None:
    """Check one input of a request against a model's specifications, if known. Raises NoTensors if there is no such input, or it has
    another shape or datatype. A narrower datatype is accepted if the model's can hold all its numbers; the worker converts it."""
    name = quoted(head.name)
    if head.datatype not in SIZES or head.datatype == JSON:
        known = ", ".join(datatype for datatype in SIZES if datatype != JSON)
        raise NoTensors(f"the input {name} has the datatype {quoted(head.datatype)}; the datatypes are {known}")
    if len(head.shape) > MOST_AXES:
        raise NoTensors(f"the input {name} has {len(head.shape)} axes; at most {MOST_AXES} are allowed")
    if not head.shape or min(head.shape) < 0 or count_of(head.shape) > _LARGEST:
        raise NoTensors(
            f"the input {name} has the shape {shown_shape(head.shape)}; expected the number of rows, followed by the axes of a row"
        )
    if 0 in head.shape and math.prod(size or 1 for size in head.shape) > _MOST_EMPTY:
        raise NoTensors(
            f"the input {name} has the shape {shown_shape(head.shape)}, which has no elements; leave the input out, or send some"
        )
    if not specs:
        return
    spec = next((spec for spec in specs if spec.name == head.name), None)
    if spec is None and len(specs) == 1:  # A model with one input accepts it under any name.
        spec = specs[0]
    if spec is None:
        raise NoTensors(f"there is no input {name}; the model takes {shown_specs(specs)}")
    is_taken = head.datatype in _TAKEN[spec.datatype]
    if not is_taken or not fits(head.shape[1:], spec.shape):
        mend = "" if is_taken else _remedy(head.datatype, spec.datatype)
        if is_taken and fits(head.shape, spec.shape):
            mend = f". The first axis is the rows: send shape {shown_shape((1, *head.shape))}"
        raise NoTensors(
            f"the input {name} is {head.datatype} of shape {shown_shape(head.shape)}; the model takes {shown_spec(spec)}{mend}"
        )


def fits(row: Sequence[int], shape: Sequence[int]) -> bool:
    """Return True if a row fits a shape, in which -1 allows any size."""
    return len(row) == len(shape) and all(want in (-1, got) for want, got in zip(shape, row, strict=True))


def check_heads(heads: Sequence[TensorHead], specs: Sequence[TensorSpec]) -> tuple[TensorHead, ...]:
    """Check the inputs of a request against a model's specifications, and return them under the names given there. Raises NoTensors
    if one is missing, repeated, unknown or of a wrong datatype or shape, or if the numbers of rows differ."""
    if len(heads) == len(specs) and list(map(_NAME, heads)) == list(map(_NAME, specs)):
        return _often_checked(tuple(heads), tuple(specs))
    return _checked(heads, specs)


def _checked(heads: Sequence[TensorHead], specs: Sequence[TensorSpec]) -> tuple[TensorHead, ...]:
    if not heads or len(heads) > MOST_TENSORS:
        raise NoTensors(f"the request has {len(heads)} inputs; expected 1 to {MOST_TENSORS}")
    for head in heads:
        check_head(head, specs)
    if (elements := sum(count_of(head.shape) for head in heads if head.datatype == BYTES)) > MOST_ELEMENTS:
        raise NoTensors(f"the request has {elements} elements of {BYTES}; at most {MOST_ELEMENTS} are allowed")
    names = [head.name for head in heads]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise NoTensors(f"the input {quoted(twice)} is given {names.count(twice)} times; expected it once")
    if specs:
        if missing := [spec for spec in specs if spec.name not in names] if len(specs) > 1 else []:
            raise NoTensors(f"the input {quoted(missing[0].name)} is missing; the model takes {shown_specs(specs)}")
        if len(heads) > len(specs):
            raise NoTensors(f"the request has {len(heads)} inputs; the model takes {shown_specs(specs)}")
    rows = heads[0].shape[0]
    if other := next((head for head in heads if head.shape[0] != rows), None):
        raise NoTensors(
            f"the input {quoted(heads[0].name)} has {rows} rows and {quoted(other.name)} has {other.shape[0]}; expected the same number"
        )
    if not rows:
        raise NoTensors(f"the input {quoted(heads[0].name)} has no rows; expected at least one")
    return (TensorHead(specs[0].name, heads[0].datatype, heads[0].shape),) if len(specs) == 1 else tuple(heads)


_often_checked = lru_cache(maxsize=256)(_checked)  # Cached, because many requests have inputs of the same shapes.


def shown(value: Octets) -> str:
    """Describe a value for people: its tensors with their shapes, but without numbers."""
    try:
        return f"tensors: {shown_heads(header_of(value).heads)}"
    except NoTensors as exc:
        return str(exc)


def shown_spec(spec: TensorSpec) -> str:
    """Return a specification for messages, including the row axis."""
    return f"{quoted(spec.name)}, {spec.datatype} of shape {shown_shape((-1, *spec.shape))}"


def shown_specs(specs: Sequence[TensorSpec]) -> str:
    """Return specifications for messages."""
    shown = [shown_spec(spec) for spec in specs[:_MOST_SHOWN]]
    return "; ".join(shown if len(specs) <= _MOST_SHOWN else [*shown, "…"])


def shown_heads(heads: Sequence[TensorHead]) -> str:
    """Return tensor heads as a string for a message."""
    return "; ".join(
        f"{quoted(head.name)}, {head.datatype} of shape {shown_shape(head.shape)}" for head in heads[:_MOST_SHOWN]
    )


def shown_shape(shape: Sequence[int]) -> str:
    """Format a shape for use in messages."""
    axes = [str(size) for size in shape[:_MOST_SHOWN]]
    if len(shape) > _MOST_SHOWN:
        axes.append("…")
    return f"[{', '.join(axes)}]"


def quoted(name: str) -> str:
    """Return a tensor's name for messages."""
    return f"`{excerpt(name)}`"


def _opening(single: bool, heads: tuple[TensorHead, ...]) -> bytes:
    header = _encode(Header(single, heads))
    start = LENGTH_BYTES + len(header)
    return b"%b%b%b" % (len(header).to_bytes(LENGTH_BYTES, "little"), header, bytes(-start % ALIGNED))


_often_opening = lru_cache(maxsize=256)(_opening)


def _header(content: bytes) -> tuple[Header, int]:
    end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    start = end + -end % ALIGNED
    if start > len(content):
        raise NoTensors("the tensors have no header")
    try:
        return (_often_decode if end < _SHORT else _decode)(bytes(content[LENGTH_BYTES:end])), start
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise NoTensors(f"the header of the tensors is damaged: {exc}") from None

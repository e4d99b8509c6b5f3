"""Tensors: how named arrays of numbers are packed into one value, and whether they fit a model's specifications.

    length of the header, 4 bytes, little-endian
    header: msgpack of [single, [[name, datatype, shape], …]]
    data of each tensor in turn

The data of each tensor begin at a multiple of ALIGNED bytes, with zeros before them, and there are zeros up to one behind the last. Numbers are little-endian in row-major order. A tensor
of BYTES has its elements in the binary form of the Open Inference Protocol: a length of 4 bytes, little-endian, before each; one
of JSON has JSON texts in that form. The first axis of each shape is that of the rows, and as long in all tensors of a value.
`single` says that the value is one row whose reader knows of no such axis: as JSON it has none.

Protocol: https://github.com/kserve/open-inference-protocol, "Tensor Data Types" and "Binary Tensor Data".
"""

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

SIZES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "FP32": 4, "FP64": 8, "BF16": 2, "BYTES": 0, "JSON": 0,
}  # fmt: skip
"""Bytes of one element of each datatype; 0 where elements differ. JSON is known within Headway alone, and is BYTES to clients."""
BYTES, JSON = "BYTES", "JSON"
ALIGNED = 16
LENGTH_BYTES = 4
MOST_TENSORS = 64
"""Most tensors of one value."""
MOST_AXES = 32
"""Most axes of a tensor."""
MOST_ELEMENTS = 1 << 16
"""Most elements of BYTES in one request. Each takes far longer than its bytes as numbers do, even an empty one."""
_SHORT = 1024
"""Most bytes of a header that is remembered."""
_MOST_SHOWN = 8
_NAME = attrgetter("name")
_LARGEST = 1 << 40
"""More elements than any value can hold."""
_MOST_EMPTY = 1 << 16
"""Most empty arrays that a tensor without elements may stand for, as they take no bytes of a request."""

_encode = msgspec.msgpack.Encoder().encode
_LENGTH = struct.Struct("<I")
_read_length, _write_length = _LENGTH.unpack_from, _LENGTH.pack


_DIGITS = {
    "UINT8": 8, "UINT16": 16, "UINT32": 32, "UINT64": 64, "INT8": 7, "INT16": 15, "INT32": 31, "INT64": 63,
    "BF16": 8, "FP16": 11, "FP32": 24, "FP64": 53,
}  # fmt: skip
"""Binary digits up to which a datatype has every whole number."""
_FLOATS = ("BF16", "FP16", "FP32", "FP64")


class NoTensors(ValueError):
    """The tensors are damaged, or not those that a model takes. The text is a whole sentence without its full stop."""


class TensorHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Name, datatype and shape of a tensor; the first axis of the shape is that of the rows."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Header of a value; see the head of this file."""

    single: bool
    heads: tuple[TensorHead, ...]

    @property
    def rows(self) -> int:
        """Rows of the value."""
        return self.heads[0].shape[0] if self.heads else 0


class Tensor(NamedTuple):
    """Tensor with its data.

    Attributes:
        head: its name, datatype and shape.
        data: its elements, as the head of this file says.
    """

    head: TensorHead
    data: bytes | memoryview


_decode = msgspec.msgpack.Decoder(Header).decode
_often_decode = lru_cache(maxsize=256)(_decode)
"""Header of its bytes, which requests have in common with many others."""


def count_of(shape: Iterable[int]) -> int:
    """Return the elements of a tensor of a shape."""
    return math.prod(shape)


def pack(tensors: Sequence[Tensor], *, single: bool = False) -> Tensors:
    """Pack tensors, each of which is copied once.

    Arguments:
        tensors: tensors, all with the same number of rows.
        single: True if readers should see a single row, without an axis of rows.
    """
    return Tensors(b"".join(packed(tensors, single=single)))


def packed(tensors: Sequence[Tensor], *, single: bool = False) -> list[bytes | memoryview]:
    """Return the pieces of the packed form; see `pack`."""
    pieces: list[bytes | memoryview] = [opening([one.head for one in tensors], single=single)]
    for one in tensors:
        size = len(one.data) if isinstance(one.data, bytes) else one.data.nbytes
        pieces += (one.data, bytes(-size % ALIGNED))
    return pieces


def opening(heads: Sequence[TensorHead], *, single: bool = False) -> bytes:
    """Return the bytes before the data of a value with these tensors; see `pack`."""
    short = sum([len(head.name) for head in heads]) <= _SHORT
    return (_often_opening if short else _opening)(single, tuple(heads))


def header_of(value: Octets) -> Header:
    """Return the header of packed tensors. Raises NoTensors where there is none."""
    return _header(value.content)[0]


def opening_of(content: bytes) -> bytes:
    """Return the bytes before the data of packed tensors, which values with the same header have in common; empty where they are many."""
    end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    return bytes(content[: end + -end % ALIGNED]) if end < _SHORT else b""


def canonical(value: Octets) -> bytes:
    """Return the bytes that are equal for tensors that mean the same. The name of a sole tensor means nothing: a model with one input
    takes it under any name, which is the client's own while nobody knows the model's.
    """
    header, start = _header(value.content)
    if len(header.heads) != 1:
        return value.content
    [head] = header.heads
    return _opening(header.single, (TensorHead("", head.datatype, head.shape),)) + value.content[start:]


def rows_of(value: Value) -> int:
    """Return the rows of a value: those of its tensors, and 1 of any other and of one without rows."""
    return header_of(value).rows or 1 if isinstance(value, Tensors) else 1


def unpack(value: Octets) -> list[Tensor]:
    """Return the tensors of a value, with views of their data.

    Raises:
        NoTensors: the value is damaged.
    """
    content = memoryview(value.content)
    header, at = _header(value.content)
    found = []
    for head in header.heads:
        size = SIZES.get(head.datatype)
        if size is None or not head.shape or min(head.shape) < 0:
            raise NoTensors(
                f"the tensor {quoted(head.name)} has the datatype {quoted(head.datatype)} and shape {shown_shape(head.shape)}"
            )
        length = size * count_of(head.shape) if size else length_of_elements(content[at:], count_of(head.shape))
        if length < 0 or length > len(content) - at:
            raise NoTensors(f"the data of the tensor {quoted(head.name)} end too soon")
        found.append(Tensor(head, content[at : at + length]))
        at += length + -length % ALIGNED
    if at != len(content):
        raise NoTensors("the tensors have data left over")
    return found


def length_of_elements(data: bytes | memoryview, count: int) -> int:
    """Return the bytes that so many elements of BYTES take at the beginning of some data; -1 where there are fewer elements."""
    at, last = 0, len(data) - LENGTH_BYTES
    for _ in range(count):
        if at > last:
            return -1
        at += LENGTH_BYTES + _read_length(data, at)[0]
    return at if at <= len(data) else -1


def split_elements(data: bytes | memoryview) -> list[bytes]:
    """Return the elements of a tensor of BYTES. Raises NoTensors where the data are none."""
    return [one for page in pages_of_elements(data, len(data)) for one in page]


def pages_of_elements(data: bytes | memoryview, most: int) -> Iterator[list[bytes]]:
    """Yield the elements of a tensor of BYTES, at most so many at a time. Raises NoTensors where the data are none."""
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
    """Return the data of a tensor of BYTES with these elements."""
    found = list(elements)
    pieces = [b""] * (2 * len(found))
    pieces[::2], pieces[1::2] = map(_write_length, map(len, found)), found
    return b"".join(pieces)


def specs_of(value: Octets) -> tuple[TensorSpec, ...]:
    """Return the specifications that a value shows. Raises NoTensors where it is damaged."""
    return tuple(TensorSpec(one.name, one.datatype, one.shape[1:]) for one in header_of(value).heads)


def check_data(head: TensorHead, size: int) -> None:
    """Check the number of bytes of a tensor's data, which is not one of BYTES. Raises NoTensors."""
    expected = SIZES[head.datatype] * count_of(head.shape)
    if size != expected:
        raise NoTensors(
            f"the input {quoted(head.name)} has {size} bytes; {head.datatype} of shape {shown_shape(head.shape)} takes {expected}"
        )


def _holds(datatype: str, other: str) -> bool:
    """Return True if a datatype has every number of another one."""
    if other not in _DIGITS or datatype not in _DIGITS:
        return other == datatype
    if other in _FLOATS:
        return other == datatype or (datatype in _FLOATS and SIZES[datatype] > SIZES[other])
    is_signed = datatype in _FLOATS or datatype[0] == "I" or other[0] == "U"
    return is_signed and _DIGITS[datatype] >= _DIGITS[other]


_TAKEN = {datatype: frozenset(other for other in SIZES if _holds(datatype, other)) for datatype in SIZES}
"""Datatypes that are taken for each: itself, and those each number of which it has, too."""


def _remedy(sent: str, taken: str) -> str:
    """Return the sentence on what to send in place of numbers that would be rounded or cut off."""
    if sent not in _DIGITS or taken not in _DIGITS:
        return ""
    name = taken.lower().replace("fp", "float")
    return f". Send {taken}" if taken == "BF16" else f". Send {taken}: in numpy use `.astype('{name}')`"


def check_head(head: TensorHead, specs: Sequence[TensorSpec]) -> None:
    """Check one input of a request against a model's specifications; those that are not known are not looked at.

    A narrower datatype is accepted if the model's can hold all its values. It is sent as it is, and converted in the worker.

    Raises:
        NoTensors: there is no such input, or the model takes another datatype or shape.
    """
    name = quoted(head.name)
    if head.datatype not in SIZES or head.datatype == JSON:
        known = ", ".join(one for one in SIZES if one != JSON)
        raise NoTensors(f"the input {name} has the datatype {quoted(head.datatype)}; the datatypes are {known}")
    if len(head.shape) > MOST_AXES:
        raise NoTensors(f"the input {name} has {len(head.shape)} axes; at most {MOST_AXES} are taken")
    if not head.shape or min(head.shape) < 0 or count_of(head.shape) > _LARGEST:
        raise NoTensors(
            f"the input {name} has the shape {shown_shape(head.shape)}; expected the number of rows, and the axes of a row behind it"
        )
    if 0 in head.shape and math.prod(size or 1 for size in head.shape) > _MOST_EMPTY:
        raise NoTensors(
            f"the input {name} has the shape {shown_shape(head.shape)}, which has no elements; leave it out, or send some"
        )
    if not specs:
        return
    spec = next((one for one in specs if one.name == head.name), None)
    if (
        spec is None and len(specs) == 1
    ):  # A model with one input takes it under any name, as one that takes texts does.
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
    """Return True if a row is of a shape, in which -1 is any size."""
    return len(row) == len(shape) and all(want in (-1, got) for want, got in zip(shape, row, strict=True))


def check_heads(heads: Sequence[TensorHead], specs: Sequence[TensorSpec]) -> tuple[TensorHead, ...]:
    """Check the inputs of a request against a model's specifications.

    Returns:
        The inputs with the names of the specifications.

    Raises:
        NoTensors: an input is missing, there twice, none of the model's or another than it takes, or their rows differ.
    """
    if len(heads) == len(specs) and list(map(_NAME, heads)) == list(map(_NAME, specs)):
        return _often_checked(tuple(heads), tuple(specs))
    return _checked(heads, specs)


def _checked(heads: Sequence[TensorHead], specs: Sequence[TensorSpec]) -> tuple[TensorHead, ...]:
    if not heads or len(heads) > MOST_TENSORS:
        raise NoTensors(f"the request has {len(heads)} inputs; expected 1 to {MOST_TENSORS}")
    for head in heads:
        check_head(head, specs)
    if (elements := sum(count_of(one.shape) for one in heads if one.datatype == BYTES)) > MOST_ELEMENTS:
        raise NoTensors(f"the request has {elements} elements of {BYTES}; at most {MOST_ELEMENTS} are taken")
    names = [one.name for one in heads]
    if twice := next((one for one in names if names.count(one) > 1), None):
        raise NoTensors(f"the input {quoted(twice)} is there {names.count(twice)} times; expected it once")
    if specs:
        if missing := [one for one in specs if one.name not in names] if len(specs) > 1 else []:
            raise NoTensors(f"the input {quoted(missing[0].name)} is missing; the model takes {shown_specs(specs)}")
        if len(heads) > len(specs):
            raise NoTensors(f"the request has {len(heads)} inputs; the model takes {shown_specs(specs)}")
    rows = heads[0].shape[0]
    if other := next((one for one in heads if one.shape[0] != rows), None):
        raise NoTensors(
            f"the input {quoted(heads[0].name)} has {rows} rows and {quoted(other.name)} has {other.shape[0]}; expected as many"
        )
    if not rows:
        raise NoTensors(f"the input {quoted(heads[0].name)} has no rows; expected at least one")
    return (TensorHead(specs[0].name, heads[0].datatype, heads[0].shape),) if len(specs) == 1 else tuple(heads)


_often_checked = lru_cache(maxsize=256)(_checked)
"""Check of inputs by the names of the model, which is the same for requests of one shape."""


def shown(value: Octets) -> str:
    """Return the words on a value, for people to read: its tensors with their shapes, and no numbers."""
    try:
        return f"tensors: {shown_heads(header_of(value).heads)}"
    except NoTensors as exc:
        return str(exc)


def shown_spec(spec: TensorSpec) -> str:
    """Return the words on a specification, with the axis of the rows, for messages."""
    return f"{quoted(spec.name)}, {spec.datatype} of shape {shown_shape((-1, *spec.shape))}"


def shown_specs(specs: Sequence[TensorSpec]) -> str:
    """Return the words on specifications, for messages."""
    shown = [shown_spec(one) for one in specs[:_MOST_SHOWN]]
    return "; ".join(shown if len(specs) <= _MOST_SHOWN else [*shown, "…"])


def shown_heads(heads: Sequence[TensorHead]) -> str:
    """Return the words on tensors, for messages."""
    return "; ".join(
        f"{quoted(one.name)}, {one.datatype} of shape {shown_shape(one.shape)}" for one in heads[:_MOST_SHOWN]
    )


def shown_shape(shape: Sequence[int]) -> str:
    """Return the words on a shape, for messages."""
    axes = [str(one) for one in shape[:_MOST_SHOWN]]
    if len(shape) > _MOST_SHOWN:
        axes.append("…")
    return f"[{', '.join(axes)}]"


def quoted(name: str) -> str:
    """Return the name of a tensor, for messages."""
    return f"`{excerpt(name)}`"


def _opening(single: bool, heads: tuple[TensorHead, ...]) -> bytes:
    """Return the header of a value, with its length and the zeros up to the data."""
    header = _encode(Header(single, heads))
    start = LENGTH_BYTES + len(header)
    return b"%b%b%b" % (len(header).to_bytes(LENGTH_BYTES, "little"), header, bytes(-start % ALIGNED))


_often_opening = lru_cache(maxsize=256)(_opening)


def _header(content: bytes) -> tuple[Header, int]:
    """Return the header of a value, and where its data begin."""
    end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    start = end + -end % ALIGNED
    if start > len(content):
        raise NoTensors("the tensors have no header")
    try:
        return (_often_decode if end < _SHORT else _decode)(bytes(content[LENGTH_BYTES:end])), start
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise NoTensors(f"the header of the tensors is damaged: {exc}") from None

"""BYTES tensors for models that don't take tensors. Each element is an input or an output.

A request has one such tensor, under any name, of shape [n] or [n, 1]. The answer has a tensor of the same shape. In binary form, an
element is its length (4 bytes, little-endian) followed by its data, which depend on the kind of value:

    text    the text, in UTF-8
    bytes   the bytes themselves
    json    the JSON text of the value, in UTF-8

Elements are texts until a worker has reported the kind.
"""

from __future__ import annotations

import binascii
import struct
from base64 import b64decode
from collections.abc import Iterable, Sequence

from headway.core import values
from headway.core.json_pages import SHORT, Steps
from headway.core.tensors import BYTES, quoted, shown_shape
from headway.errors import BadRequest, PayloadTooLarge
from headway.model import Octets, Value, ValueKind

INPUT = "INPUT"  # Name of the input in the metadata. Requests may use any name.
OUTPUT = "OUTPUT"

LENGTH_BYTES = 4
_read_length = struct.Struct("<I").unpack_from

CONTENTS = {  # By datatype: member of gRPC's typed contents, and type code of its numbers. FP16 and BF16 have none.
    "BOOL": ("bool_contents", "B"), "INT8": ("int_contents", "b"), "INT16": ("int_contents", "h"), "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"), "UINT8": ("uint_contents", "B"), "UINT16": ("uint_contents", "H"), "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"), "FP32": ("fp32_contents", "f"), "FP64": ("fp64_contents", "d"), BYTES: ("bytes_contents", ""),
}  # fmt: skip

Element = str | bytes  # An element of an input: a string from JSON, or bytes from the binary form.


class NoElements(BadRequest):
    """The request doesn't have a BYTES tensor of elements. A model that takes tensors may accept it."""


def count_elements(name: str, datatype: str, shape: Sequence[int], limit: int) -> int:
    """Return the number of elements in an input's shape. Raises NoElements unless the datatype is BYTES and the shape [n] or [n, 1],
    and PayloadTooLarge if there are more than `limit` elements."""
    if datatype != BYTES:
        raise NoElements(
            f"input {quoted(name)} has the datatype {quoted(datatype)}; expected {BYTES}, one element for each input"
        )
    if not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)) or shape[0] < 1:
        raise NoElements(
            f"input {quoted(name)} has the shape {shown_shape(shape)}; expected [n] or [n, 1] with n at least 1"
        )
    if shape[0] > limit:
        raise PayloadTooLarge(
            f"input {quoted(name)} has {shape[0]} elements; at most {limit} are allowed in one request"
        )
    return shape[0]


def check_outputs(names: Sequence[str]) -> None:
    """Raise BadRequest if a requested output doesn't exist or is listed twice."""
    for name in names:
        if name != OUTPUT:
            raise BadRequest(f"there is no output {quoted(name)}; the only one is `{OUTPUT}`")
    if len(names) > 1:
        raise BadRequest(f"the output `{OUTPUT}` is requested {len(names)} times; list it only once")


def wrong_number(count: int) -> BadRequest:
    """Return the error for a request that doesn't have exactly one input."""
    if not count:
        return BadRequest(f"the request has no input; expected one of datatype {BYTES}")
    return NoElements(
        f"the request has more than one input; expected one of datatype {BYTES}. Put all texts into that one, with shape [n]"
    )


def unpack(name: str, octets: bytes | memoryview, count: int) -> list[bytes]:
    """Return the elements of an input in binary form. Raises BadRequest unless there are `count` of them."""
    elements, end = split(octets, count)
    left = len(octets) - end
    if len(elements) < count and left < LENGTH_BYTES:
        raise BadRequest(f"the data of input {quoted(name)} end after {len(elements)} elements; its shape says {count}")
    if len(elements) < count:
        length = int.from_bytes(octets[end : end + LENGTH_BYTES], "little")
        raise BadRequest(
            f"element {len(elements)} of input {quoted(name)} has the length {length}, but only {left - LENGTH_BYTES} bytes are left; expected "
            f"the element's length, as {LENGTH_BYTES} bytes in little-endian order, before each element"
        )
    if left:
        raise BadRequest(
            f"{left} bytes of binary data remain after the {count} elements that the shape of input {quoted(name)} requires"
        )
    return elements


def split(octets: bytes | memoryview, limit: int) -> tuple[list[bytes], int]:
    """Return up to `limit` complete elements from the binary form, and the position where they end."""
    elements: list[bytes] = []
    end, size = 0, len(octets)
    while len(elements) < limit and (body := end + LENGTH_BYTES) <= size:
        after = body + _read_length(octets, end)[0]
        if after > size:
            break
        elements.append(bytes(octets[body:after]))
        end = after
    return elements, end


def pack(elements: Iterable[bytes]) -> bytes:
    """Return the binary form of elements."""
    return b"".join([piece for element in elements for piece in (head_of(element), element)])


def packed_size(elements: Sequence[bytes]) -> int:
    """Return the size of the binary form in bytes."""
    return sum(map(len, elements)) + LENGTH_BYTES * len(elements)


def head_of(element: bytes) -> bytes:
    """Return the length prefix of an element."""
    return len(element).to_bytes(LENGTH_BYTES, "little")


def values_of(elements: Sequence[Element], takes: ValueKind | None) -> list[Value]:
    """Convert elements to values of the kind that the model takes. Raises BadRequest; its message says which element is invalid."""
    converted: list[Value] = []
    try:
        for element in elements:
            converted.append(_value_of(element, takes))
    except BadRequest as exc:
        raise BadRequest(f"element {len(converted)} of the input {exc}") from None
    return converted


def values_in_steps(elements: Sequence[Element], takes: ValueKind | None) -> Steps[list[Value]]:
    """Convert long elements in steps; see `values_of`."""
    converted: list[Value] = []
    try:
        for element in elements:
            if takes is ValueKind.JSON and len(element) > SHORT:
                text = element.encode() if isinstance(element, str) else element
                converted.append((yield from _json_in_steps(text)))
            else:
                converted.append(_value_of(element, takes))
            yield 0
    except BadRequest as exc:
        raise BadRequest(f"element {len(converted)} of the input {exc}") from None
    return converted


def element_of(output: Value, gives: ValueKind | None) -> bytes:
    """Return the element for an output of a model that returns `gives`. Raises UnicodeEncodeError for a lone surrogate."""
    if isinstance(output, Octets):
        return output.content
    if gives is ValueKind.JSON:
        return values.as_json(output)
    if gives is ValueKind.BYTES and isinstance(output, str):
        try:
            return b64decode(output, validate=True)
        except (binascii.Error, ValueError):  # During an update, a worker may still return texts.
            pass
    return output.encode() if isinstance(output, str) else output


def _value_of(element: Element, takes: ValueKind | None) -> Value:
    if takes is ValueKind.BYTES:
        return Octets(element.encode() if isinstance(element, str) else element)
    if takes is ValueKind.JSON:
        try:
            return values.read(element.encode() if isinstance(element, str) else element)
        except (ValueError, RecursionError) as exc:
            raise _no_json(exc) from None
    if isinstance(element, bytes):
        try:
            element = element.decode()
        except UnicodeDecodeError as exc:
            raise BadRequest(f"is not UTF-8: {exc.reason} at byte {exc.start}; the model takes texts") from None
    if "\0" in element:
        raise BadRequest("contains U+0000, which not every model accepts; remove it")
    return element


def _json_in_steps(text: bytes) -> Steps[Value]:
    try:
        return (yield from values.read_in_steps(text))
    except (ValueError, RecursionError) as exc:
        raise _no_json(exc) from None


def _no_json(exc: Exception) -> BadRequest:
    if isinstance(exc, values.NoValue):
        return BadRequest(str(exc))
    if isinstance(exc, UnicodeDecodeError):
        return BadRequest(f"is not UTF-8: {exc.reason} at byte {exc.start}; the model takes JSON texts")
    return BadRequest(f"is not JSON text, but the model takes JSON: {exc}")

"""Inputs of models that take tensors: checks, and packing into one value.

All heads are checked before any data are read, and all data before anything is queued, over HTTP and gRPC alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core.json_pages import Steps
from headway.core.tensors import (
    BYTES,
    SIZES,
    NoTensors,
    Tensor,
    TensorHead,
    check_data,
    check_heads,
    count_of,
    join_elements,
    length_of_elements,
    pack,
    quoted,
    shown_spec,
    shown_specs,
)
from headway.errors import BadRequest, PayloadTooLarge
from headway.model import Tensors, TensorSpec
from headway.oip.tensors import unpack

_AT_ONCE = 1 << 12
"""Number of elements to check between two yields."""


def checked_heads(heads: Sequence[TensorHead], specs: Sequence[TensorSpec], max_rows: int) -> tuple[TensorHead, ...]:
    """Check names, datatypes and shapes of a request's inputs, and name them as the model does, in the request's order. `specs`
    is empty while the model's inputs are not known. Raises BadRequest if the model doesn't take these inputs, and PayloadTooLarge
    if they have more than `max_rows` rows."""
    try:
        checked = check_heads(heads, specs)
    except NoTensors as exc:
        raise BadRequest(str(exc)) from None
    if (rows := checked[0].shape[0]) > max_rows:
        raise PayloadTooLarge(
            f"the input {quoted(heads[0].name)} has {rows} rows; at most {max_rows} are allowed in one request (max_batch_size)"
        )
    return checked


def value_of(heads: Sequence[TensorHead], data: Sequence[bytes | memoryview]) -> Tensors:
    """Pack checked inputs into one value, copying their data once. Raises BadRequest if an input's data don't match its shape."""
    tensors = []
    for head, octets in zip(heads, data, strict=True):
        check_size(head, octets)
        tensors.append(Tensor(head, octets))
    return pack(tensors)


def value_in_steps(heads: Sequence[TensorHead], data: Sequence[bytes | memoryview]) -> Steps[Tensors]:
    """Pack inputs that may have many elements of BYTES, in steps; see `value_of`."""
    tensors = []
    for head, octets in zip(heads, data, strict=True):
        if head.datatype == BYTES:
            yield from _check_elements(head, memoryview(octets))
        else:
            check_size(head, octets)
        tensors.append(Tensor(head, octets))
    return pack(tensors)


def _check_elements(head: TensorHead, octets: memoryview) -> Steps[None]:
    """Check that an input of BYTES has as many elements as its shape says, in steps. Raises BadRequest."""
    at, left = 0, count_of(head.shape)
    while left:
        count = min(left, _AT_ONCE)
        length = length_of_elements(octets[at:], count)
        if length < 0:
            unpack(head.name, octets[at:], count)
        at += length
        left -= count
        yield 0
    if at < len(octets):
        raise BadRequest(
            f"{len(octets) - at} bytes of binary data are left after the {count_of(head.shape)} elements that the shape of input {quoted(head.name)} calls for"
        )


def value_of_raw(body: bytes, specs: Sequence[TensorSpec], max_rows: int, *, single: bool = False) -> Tensors:
    """Return the value of a body that is only the data of the only input: numbers, or one BYTES element without its length. With
    `single`, a single row loses its row axis. Raises BadRequest if the size of the data leaves their shape open, and
    PayloadTooLarge if they have more than `max_rows` rows."""
    [head] = checked_heads([head_of_raw(len(body), specs)], specs, max_rows)
    data = join_elements([body]) if head.datatype == BYTES else memoryview(body)  # A large one is a bytearray.
    return pack([Tensor(head, data)], single=single and head.shape[0] == 1)


def check_size(head: TensorHead, octets: bytes | memoryview) -> None:
    """Check that the data of an input match its shape. Raises BadRequest."""
    if head.datatype == BYTES:
        count = count_of(head.shape)
        if length_of_elements(octets, count) != len(octets):
            unpack(head.name, octets, count)
        return
    try:
        check_data(head, len(octets))
    except NoTensors as exc:
        raise BadRequest(str(exc)) from None


def head_of_raw(size: int, specs: Sequence[TensorSpec]) -> TensorHead:
    """Return the head of the only input of a request whose body is `size` bytes of its data: as many rows as they fill, or one
    row if one axis of a row is free. BYTES data are one element. Raises BadRequest if the size leaves their shape open."""
    if len(specs) != 1:
        takes = f"the model takes {shown_specs(specs)}" if specs else "it is not known yet what the model takes"
        raise BadRequest(f"the body is data alone, which is for models with one input; {takes}")
    [spec] = specs
    hint = ""
    known = math.prod(axis for axis in spec.shape if axis != -1)
    free = spec.shape.count(-1)
    if spec.datatype == BYTES:
        if known == 1:
            return TensorHead(spec.name, BYTES, (1, *(abs(axis) for axis in spec.shape)))
    else:
        step = SIZES[spec.datatype] * known
        hint = "" if free or not step else f", of which a row takes {step} bytes, and several rows a multiple of that"
        if free < 2 and step and size and size % step == 0:
            count = size // step
            if not free:
                return TensorHead(spec.name, spec.datatype, (count, *spec.shape))
            return TensorHead(spec.name, spec.datatype, (1, *(count if axis == -1 else axis for axis in spec.shape)))
    raise BadRequest(
        f"the body is {size} bytes of data alone, which do not say which shape they have; the model takes {shown_spec(spec)}{hint}"
    )

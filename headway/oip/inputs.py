"""Inputs of a request for a model that takes tensors: what their heads may say, and the one value that they become.

Over HTTP and gRPC alike the heads of all inputs are checked before any data are read, and all of it before anything is queued.
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
"""Elements that are looked at between two yields."""


def checked_heads(heads: Sequence[TensorHead], specs: Sequence[TensorSpec], most: int) -> tuple[TensorHead, ...]:
    """Check names, datatypes and shapes of the inputs of a request.

    Arguments:
        heads: the inputs, in the request's order.
        specs: specifications of the model's inputs; empty while they are not known.
        most: most rows of one request.

    Returns:
        The inputs with the names of the specifications, in the request's order.

    Raises:
        BadRequest: they are not the inputs that the model takes.
        PayloadTooLarge: they have more rows than `most`.
    """
    try:
        found = check_heads(heads, specs)
    except NoTensors as exc:
        raise BadRequest(str(exc)) from None
    if (rows := found[0].shape[0]) > most:
        raise PayloadTooLarge(
            f"the input {quoted(heads[0].name)} has {rows} rows; at most {most} are taken in one request (max_batch_size)"
        )
    return found


def value_of(heads: Sequence[TensorHead], data: Sequence[bytes | memoryview]) -> Tensors:
    """Pack checked inputs into one value; their data are copied once.

    Arguments:
        heads: the inputs, as `checked_heads` returns them.
        data: data of each in the binary form.

    Raises:
        BadRequest: the data of an input are fewer or more than its shape says.
    """
    found = []
    for head, octets in zip(heads, data, strict=True):
        check_size(head, octets)
        found.append(Tensor(head, octets))
    return pack(found)


def value_in_steps(heads: Sequence[TensorHead], data: Sequence[bytes | memoryview]) -> Steps[Tensors]:
    """The same of many elements of BYTES, some at a time; see `value_of`."""
    found = []
    for head, octets in zip(heads, data, strict=True):
        if head.datatype == BYTES:
            yield from _check_elements(head, memoryview(octets))
        else:
            check_size(head, octets)
        found.append(Tensor(head, octets))
    return pack(found)


def _check_elements(head: TensorHead, octets: memoryview) -> Steps[None]:
    """Check that an input of BYTES has as many elements as its shape says. Raises BadRequest."""
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
            f"{len(octets) - at} bytes of binary data are left after the {count_of(head.shape)} elements that the shape of input {quoted(head.name)} says"
        )


def value_of_raw(body: bytes, specs: Sequence[TensorSpec], most: int, *, single: bool = False) -> Tensors:
    """Value of a body that is the data of the only input; one of BYTES is an element, without its length.

    Arguments:
        body: the data.
        specs: specifications of the model's inputs.
        most: most rows of one request.
        single: whether one row has no axis of rows to its reader.

    Raises:
        BadRequest: the data do not say which shape they have.
        PayloadTooLarge: they have more rows than `most`.
    """
    [head] = checked_heads([head_of_raw(len(body), specs)], specs, most)
    data = join_elements([body]) if head.datatype == BYTES else memoryview(body)  # A large one is a bytearray.
    return pack([Tensor(head, data)], single=single and head.shape[0] == 1)


def check_size(head: TensorHead, octets: bytes | memoryview) -> None:
    """Check that the data of an input are as many as its shape says.

    Raises:
        BadRequest: they are fewer or more.
    """
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
    """Head of the only input of a request whose body is its data alone.

    The data are as many rows as they fill. Where one axis of a row is free they are one row. Of BYTES they are one element.

    Arguments:
        size: bytes of the data.
        specs: specifications of the model's inputs.

    Raises:
        BadRequest: the data do not say which shape they have.
    """
    if len(specs) != 1:
        told = f"the model takes {shown_specs(specs)}" if specs else "it is not known yet what the model takes"
        raise BadRequest(f"the body is data alone, which is for models with one input; {told}")
    [spec] = specs
    mend = ""
    known = math.prod(axis for axis in spec.shape if axis != -1)
    free = spec.shape.count(-1)
    if spec.datatype == BYTES:
        if known == 1:
            return TensorHead(spec.name, BYTES, (1, *(abs(axis) for axis in spec.shape)))
    else:
        step = SIZES[spec.datatype] * known
        mend = "" if free or not step else f", of which a row takes {step} bytes, and several rows a multiple of that"
        if free < 2 and step and size and size % step == 0:
            count = size // step
            if not free:
                return TensorHead(spec.name, spec.datatype, (count, *spec.shape))
            return TensorHead(spec.name, spec.datatype, (1, *(count if axis == -1 else axis for axis in spec.shape)))
    raise BadRequest(
        f"the body is {size} bytes of data alone, which do not say which shape they have; the model takes {shown_spec(spec)}{mend}"
    )

"""Tensors in bodies of the native API: inputs from JSON or octets, and outputs as octets."""

from __future__ import annotations

import msgspec

from headway.core.failures import error_of
from headway.core.json_pages import Steps, finish
from headway.core.tensor_json import tensors_in_steps
from headway.core.tensors import SIZES, NoTensors, Tensor, shown_heads, shown_shape, unpack
from headway.errors import BadRequest
from headway.gateway.served_models import KnownModels
from headway.model import Tensors, Value


def to_tensors(known: KnownModels, model: str, input: Value | list[Value]) -> Value | list[Value]:
    """Convert one JSON value, or each of several, to tensors that the model takes.

    Raises:
        RequestError: the model doesn't take such a value.
    """
    return finish(to_tensors_in_steps(known, model, input))


def to_tensors_in_steps(known: KnownModels, model: str, input: Value | list[Value]) -> Steps[Value | list[Value]]:
    """Convert values that may be long; see `to_tensors`."""
    if not isinstance(input, list):
        return (yield from _converted(known, model, input, ""))
    converted: list[Value] = []
    for position, value in enumerate(input):
        converted.append((yield from _converted(known, model, value, f" - at `$.inputs[{position}]`")))
        yield 0
    return converted


def as_octets(output: Tensors) -> bytes | memoryview | None:
    """Return the data of a single tensor of numbers (little-endian, row-major), or None for any other output."""
    tensors = unpack(output)
    return tensors[0].data if len(tensors) == 1 and SIZES[tensors[0].head.datatype] else None


def octets_of_tensors(output: Tensors) -> bytes:
    """Return an output as octets; see `as_octets`. Raises BadRequest if it has another form."""
    data = as_octets(output)
    if data is None:
        heads = shown_heads([tensor.head for tensor in unpack(output)])
        raise BadRequest(
            f"the output is {heads}; only one tensor of numbers is sent as octets: ask for JSON, or use the Open Inference Protocol (/v2)"
        )
    return bytes(data)


def one_embedding(output: Tensors) -> Tensor:
    """Return the tensor of an output that is one row of numbers. Raises NoTensors for any other output."""
    tensors = unpack(output)
    head = tensors[0].head if tensors else None
    if head is None or len(tensors) != 1:
        raise NoTensors(f"the model's output is {len(tensors)} tensors, and an embedding is one")
    if len(head.shape) != 2 or head.shape[0] != 1 or not head.shape[1] or not SIZES[head.datatype]:
        shape = shown_shape(head.shape[1:] if head.shape[0] == 1 else head.shape)
        raise NoTensors(
            f"the model's output is {head.datatype} of shape {shape}, and an embedding has one axis of numbers"
        )
    return tensors[0]


def _converted(known: KnownModels, model: str, input: Value, place: str) -> Steps[Tensors]:
    try:
        tensors = yield from tensors_in_steps(input, known[model].inputs)
    except NoTensors as exc:
        raise BadRequest(f"{exc}{place}") from None
    if place and (failure := known.check(model, tensors)) is not None:
        raise error_of(msgspec.structs.replace(failure, message=failure.message + place))
    return tensors

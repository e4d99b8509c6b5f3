"""Tensors in bodies of the native API: out of JSON or octets, and outputs as octets."""

from __future__ import annotations

import msgspec

from headway.core.failures import error_of
from headway.core.json_pages import Steps, finish
from headway.core.tensor_json import tensors_in_steps
from headway.core.tensors import (
    SIZES,
    NoTensors,
    Tensor,
    shown_heads,
    shown_shape,
    unpack,
)
from headway.errors import BadRequest
from headway.gateway.served_models import KnownModels
from headway.model import Tensors, Value


def fitting(known: KnownModels, model: str, input: Value | list[Value]) -> Value | list[Value]:
    """Tensors of a JSON value, or of each of several, for a model that takes tensors.

    Raises:
        RequestError: a value is none that the model takes.
    """
    if not isinstance(input, list):
        return _of(known, model, input, "")
    return [_of(known, model, one, f" - at `$.inputs[{place}]`") for place, one in enumerate(input)]


def fitting_in_steps(known: KnownModels, model: str, input: Value | list[Value]) -> Steps[Value | list[Value]]:
    """The same of values that may be long; see `fitting`."""
    if not isinstance(input, list):
        return (yield from _in_steps(known, model, input, ""))
    found: list[Value] = []
    for place, one in enumerate(input):
        found.append((yield from _in_steps(known, model, one, f" - at `$.inputs[{place}]`")))
        yield 0
    return found


def as_octets(output: Tensors) -> bytes | memoryview | None:
    """Numbers of an output that is one tensor of numbers: little-endian, in row-major order. None for any other."""
    found = unpack(output)
    return found[0].data if len(found) == 1 and SIZES[found[0].head.datatype] else None


def octets_of_tensors(output: Tensors) -> bytes:
    """Numbers of an output as octets; see `as_octets`. Raises BadRequest."""
    data = as_octets(output)
    if data is None:
        heads = shown_heads([one.head for one in unpack(output)])
        raise BadRequest(
            f"the output is {heads}; only one tensor of numbers is sent as octets: ask for JSON, or use the Open Inference Protocol (/v2)"
        )
    return bytes(data)


def one_embedding(output: Tensors) -> Tensor:
    """Tensor of an output that is one row of one axis of numbers. Raises NoTensors."""
    found = unpack(output)
    head = found[0].head if found else None
    if head is None or len(found) != 1:
        raise NoTensors(f"the model's output is {len(found)} tensors, and an embedding is one")
    if len(head.shape) != 2 or head.shape[0] != 1 or not head.shape[1] or not SIZES[head.datatype]:
        shape = shown_shape(head.shape[1:] if head.shape[0] == 1 else head.shape)
        raise NoTensors(
            f"the model's output is {head.datatype} of shape {shape}, and an embedding has one axis of numbers"
        )
    return found[0]


def _of(known: KnownModels, model: str, input: Value, place: str) -> Tensors:
    return finish(_in_steps(known, model, input, place))


def _in_steps(known: KnownModels, model: str, input: Value, place: str) -> Steps[Tensors]:
    try:
        tensors = yield from tensors_in_steps(input, known[model].inputs)
    except NoTensors as exc:
        raise BadRequest(f"{exc}{place}") from None
    if place and (failure := known.check(model, tensors)) is not None:
        raise error_of(msgspec.structs.replace(failure, message=failure.message + place))
    return tensors

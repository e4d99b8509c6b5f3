"""Bodies of inference requests for models that take tensors: inputs of any datatype, each in JSON or in binary data.

Binary data follow the JSON object, in the order of the inputs with a `binary_data_size`. All heads are checked before any data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from headway.config import Settings
from headway.core import tensor_json
from headway.core.json_pages import SHORT, Steps
from headway.core.tensors import ALIGNED, BYTES, MOST_TENSORS, SIZES, NoTensors, TensorHead, count_of, opening, quoted
from headway.doors.bodies import ABSENT, decode_problem, members_in_steps
from headway.doors.exchange import Exchange, WriteAnswer
from headway.errors import BadRequest
from headway.gateway.served_model import ServedModel
from headway.model import RequestOptions, Tensors, TensorSpec, ValueKind
from headway.oip.inputs import checked_heads, value_in_steps, value_of, value_of_raw
from headway.oip.outputs import WantedOutput, check_names, names_of
from headway.oip.parameters import NONE, Wishes
from headway.oip.rest.bodies import (
    LENGTH_FIELD,
    AskedInput,
    array_of,
    cut,
    long_inputs_of,
    long_parameters_of,
    members_of,
    parameters_of,
    refuse_shared_memory,
    shape_of,
    take_request,
    wanted_outputs,
)

_SHORT = 1024
"""Longest JSON object to cache, in bytes, if all data follow it. Clients send the same object again and again."""
_MOST_KNOWN = 256
_EMPTY = msgspec.Raw(b"[]")
Specs = tuple[TensorSpec, ...]


class _Request(msgspec.Struct, gc=False):
    inputs: array_of(AskedInput)  # type: ignore[valid-type]
    id: str | None = None
    outputs: msgspec.Raw = ABSENT
    parameters: msgspec.Raw = ABSENT


class _Parsed(msgspec.Struct, frozen=True, gc=False):
    """JSON object of a request: its inputs, their checked heads, and what goes into the TensorsRequest.

    `size` is the number of data bytes that must follow, if the data of all inputs follow and can be packed unchanged, or -1.
    `opening` is the packed value up to those data."""

    id: str | None
    wishes: Wishes
    parameters: bytes
    wanted: tuple[WantedOutput, ...]
    inputs: list[AskedInput]
    heads: tuple[TensorHead, ...]
    size: int
    opening: bytes


class TensorsRequest(msgspec.Struct, gc=False):
    """Inference request for a model that takes tensors, from an HTTP body or a gRPC message. `value` are the packed inputs.

    `id` is the client's, to be echoed; None or empty if there is none. `parameters` are those for the target in JSON, or empty.
    `wanted` are the requested outputs, or empty for all. `shape` is that of the output if the model gives no tensors after all."""

    id: str | None
    value: Tensors
    wishes: Wishes
    parameters: bytes
    wanted: tuple[WantedOutput, ...] = ()
    shape: tuple[int, ...] = (1,)

    def exchange(self, model: str, options: RequestOptions, takes: ValueKind | None, write: WriteAnswer) -> Exchange:
        """Return the exchange of the request, which is one entry; see `InferRequest.exchange`."""
        if self.wishes is not NONE:
            options = self.wishes.applied_to(options)
        return Exchange(model, self.value, self.parameters, options, write, self.id or "", self.wishes.final)


_decode: Callable[[bytes], Any] = msgspec.json.Decoder(_Request).decode


def tensors_reader(settings: Settings) -> Callable[[bytes, int | None, ServedModel], TensorsRequest]:
    """Make a function that reads bodies; see `request_reader`."""
    tiers, most_parameters = len(settings.tier_names), settings.max_parameters

    def parse(text: bytes, specs: Specs, outputs: Specs, max_rows: int) -> _Parsed:
        try:
            if not text.isascii():
                text.decode()
            request = _decode(text)
            wishes, parameters = parameters_of(request.parameters, most_parameters, tiers)
            return _checked(request, members_of(request.inputs), wishes, parameters, specs, outputs, max_rows)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(decode_problem(exc, text)) from None

    cached_parse = lru_cache(maxsize=_MOST_KNOWN)(parse)

    def read(body: bytes, length: int | None, served: ServedModel) -> TensorsRequest:
        specs, max_rows = served.inputs, served.settings.max_batch_size
        if length == 0:
            return TensorsRequest(None, value_of_raw(body, specs, max_rows), Wishes(binary=True), b"")
        text, binary = (body, None) if length is None else cut(body, length)
        short = length is not None and length <= _SHORT
        parsed = (cached_parse if short else parse)(text, specs, served.outputs, max_rows)
        if binary is not None and len(binary) == parsed.size:
            value = packed_in_place(binary, parsed.opening)
        else:
            value = value_of(parsed.heads, _data(parsed.inputs, parsed.heads, binary))
        return TensorsRequest(parsed.id, value, parsed.wishes, parsed.parameters, parsed.wanted)

    return read


def long_tensors_reader(settings: Settings) -> Callable[[bytes, int | None, ServedModel], Steps[TensorsRequest]]:
    """Make a function that reads long bodies, in steps; see `request_reader`."""
    tiers, most_parameters = len(settings.tier_names), settings.max_parameters
    read_short = tensors_reader(settings)

    def parse(text: bytes, served: ServedModel) -> Steps[_Parsed]:
        request = take_request((yield from members_in_steps(text)))
        wishes, parameters = NONE, b""
        if request.parameters is not ABSENT:
            wishes, parameters = yield from long_parameters_of(request.parameters, most_parameters, tiers)
        inputs = yield from long_inputs_of(request.inputs, MOST_TENSORS)
        if inputs is None:
            raise BadRequest(f"the request has more than {MOST_TENSORS} inputs; expected 1 to {MOST_TENSORS}")
        max_rows = served.settings.max_batch_size
        return _checked(request, inputs, wishes, parameters, served.inputs, served.outputs, max_rows)

    def read(body: bytes, length: int | None, served: ServedModel) -> Steps[TensorsRequest]:
        text, binary = (bytes(body), None) if length is None else cut(body, length)
        if len(text) <= SHORT and len(body) - len(text) <= SHORT:
            return read_short(body, length, served)
        parsed = yield from parse(text, served)
        if binary is not None and len(binary) == parsed.size:
            value = packed_in_place(binary, parsed.opening)
        else:
            data = yield from _data_in_steps(parsed.inputs, parsed.heads, binary)
            value = yield from value_in_steps(parsed.heads, data)
        return TensorsRequest(parsed.id, value, parsed.wishes, parsed.parameters, parsed.wanted)

    return read


def _checked(
    sent: Any, inputs: list[AskedInput], wishes: Wishes, parameters: bytes, specs: Specs, outputs: Specs, rows: int
) -> _Parsed:
    """Check the requested outputs and the heads of the inputs, which may have `rows` rows. Raises RequestError."""
    wanted = () if sent.outputs is ABSENT else wanted_outputs(sent.outputs, binary=wishes.binary)
    check_names([output.name for output in wanted], names_of(outputs))
    given = [TensorHead(tensor.name, tensor.datatype, shape_of(tensor, place)) for place, tensor in enumerate(inputs)]
    heads = checked_heads(given, specs, rows)
    total = 0
    for tensor, head in zip(inputs, heads, strict=True):
        asked = tensor.parameters
        if asked is None or head.datatype == BYTES or total % ALIGNED:
            break
        size = SIZES[head.datatype] * count_of(head.shape)
        if asked.binary_data_size != size or asked.shared_memory_region is not ABSENT or tensor.data is not ABSENT:
            break
        total += size
    else:
        return _Parsed(sent.id, wishes, parameters, wanted, inputs, heads, total, opening(heads))
    return _Parsed(sent.id, wishes, parameters, wanted, inputs, heads, -1, b"")


def packed_in_place(data: memoryview, opening: bytes) -> Tensors:
    """Return the packed value of data at the end of a body or message; `opening` is the value up to the data. A large body is
    writable memory of its request, so the opening is written in front of the data. Other data are copied."""
    padding, room = -len(data) % ALIGNED, memoryview(data.obj)
    begin = len(room) - len(data) - len(opening)
    if padding or begin < 0 or room.readonly:
        return Tensors(b"".join((opening, data, bytes(padding))))
    room[begin : begin + len(opening)] = opening
    return Tensors(cast(bytes, room[begin:].toreadonly()))


def _data(
    inputs: Sequence[AskedInput], heads: Sequence[TensorHead], binary: memoryview | None
) -> list[bytes | memoryview]:
    data: list[bytes | memoryview] = []
    end = 0
    for tensor, head in zip(inputs, heads, strict=True):
        size = None if tensor.parameters is None else tensor.parameters.binary_data_size
        if tensor.parameters is not None:
            refuse_shared_memory(tensor.parameters)
        if (size is None) is (tensor.data is ABSENT):
            has = "no data" if size is None else "both `data` and `binary_data_size`"
            raise BadRequest(
                f"the input {quoted(tensor.name)} has {has}; expected `data`, or `binary_data_size` in its parameters"
            )
        if size is None:
            try:
                data.append(tensor_json.read(bytes(tensor.data), head.name, head.datatype, head.shape))
            except NoTensors as exc:
                raise BadRequest(str(exc)) from None
            continue
        if binary is None:
            raise BadRequest(
                f"the input {quoted(tensor.name)} has `binary_data_size`, and the header field {LENGTH_FIELD} is missing; expected "
                "the length of the JSON object in bytes"
            )
        if size > len(binary) - end:
            raise BadRequest(
                f"the `binary_data_size` of the input {quoted(tensor.name)} is {size}, and {len(binary) - end} bytes are left behind "
                "the JSON object and the inputs before"
            )
        data.append(binary[end : end + size])
        end += size
    if binary is not None and end < len(binary):
        raise BadRequest(
            f"{len(binary)} bytes follow the JSON object, and the inputs have a `binary_data_size` of {end} in all"
        )
    return data


def _data_in_steps(
    inputs: Sequence[AskedInput], heads: Sequence[TensorHead], binary: memoryview | None
) -> Steps[list[bytes | memoryview]]:
    """Return the data of inputs whose JSON may be long, in steps; see `_data`."""
    long = [len(bytes(tensor.data)) > SHORT for tensor in inputs]
    data = _data(  # Empty arrays stand for the long ones at first.
        [replace(tensor, data=_EMPTY) if is_long else tensor for tensor, is_long in zip(inputs, long, strict=True)],
        [replace(head, shape=(0,)) if is_long else head for head, is_long in zip(heads, long, strict=True)],
        binary,
    )
    for place, head in enumerate(heads):
        if long[place]:
            text = bytes(inputs[place].data)
            try:
                data[place] = yield from tensor_json.read_in_steps(text, head.name, head.datatype, head.shape)
            except NoTensors as exc:
                raise BadRequest(str(exc)) from None
    return data

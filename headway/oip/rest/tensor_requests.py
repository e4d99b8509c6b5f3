"""Bodies of inference requests for models that take tensors: several inputs of any datatype, each in JSON or in binary data.

The binary data follow the JSON object in the order of the inputs that have a `binary_data_size`. All heads are checked before any
data are read.
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
"""Bytes of a JSON object up to which what was read of it is remembered, where the data are behind it. Clients send the same again and again."""
_MOST_KNOWN = 256
_EMPTY = msgspec.Raw(b"[]")


class _Request(msgspec.Struct, gc=False):
    inputs: array_of(AskedInput)  # type: ignore[valid-type]
    id: str | None = None
    outputs: msgspec.Raw = ABSENT
    parameters: msgspec.Raw = ABSENT


class _Said(msgspec.Struct, frozen=True, gc=False):
    """JSON object of a request, as it was read.

    Attributes:
        id, wishes, parameters, wanted: see TensorsRequest.
        inputs: its inputs.
        heads: their heads, which are checked.
        size: bytes of the data behind it, where the data of all inputs are there, and are packed as they come; else -1.
        opening: bytes of the packed value before these.
    """

    id: str | None
    wishes: Wishes
    parameters: bytes
    wanted: tuple[WantedOutput, ...]
    inputs: list[AskedInput]
    heads: tuple[TensorHead, ...]
    size: int
    opening: bytes


class TensorsRequest(msgspec.Struct, gc=False):
    """Inference request for a model that takes tensors, decoded from a body or from a message of gRPC.

    Attributes:
        id: id that the client gave it, to be echoed; None, or empty over gRPC, for none.
        value: its inputs, packed.
        wishes: wishes among its parameters; whether outputs that it does not name are binary.
        parameters: text of a JSON object with the parameters for the target, or empty.
        wanted: outputs that it asks for; none: all.
        shape: shape of its output where the model, against all that is known, gives none of tensors.
    """

    id: str | None
    value: Tensors
    wishes: Wishes
    parameters: bytes
    wanted: tuple[WantedOutput, ...] = ()
    shape: tuple[int, ...] = (1,)

    def exchange(
        self,
        model: str,
        options: RequestOptions,
        takes: ValueKind | None,
        write: WriteAnswer,
    ) -> Exchange:
        """Exchange of the request, with one entry; see `InferRequest.exchange`."""
        if self.wishes is not NONE:
            options = self.wishes.applied_to(options)
        return Exchange(model, self.value, self.parameters, options, write, self.id or "", self.wishes.final)


_decode: Callable[[bytes], Any] = msgspec.json.Decoder(_Request).decode


def tensors_reader(settings: Settings) -> Callable[[bytes, int | None, ServedModel], TensorsRequest]:
    """Make the function that reads bodies; its arguments are those of `headway.oip.rest.requests.request_reader`'s.

    Arguments:
        settings: bounds of parameters, and tiers.
    """
    tiers, most_parameters = len(settings.tier_names), settings.max_parameters

    def said_of(text: bytes, specs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], most: int) -> _Said:
        try:
            if not text.isascii():
                text.decode()
            asked = _decode(text)
            wishes, parameters = parameters_of(asked.parameters, most_parameters, tiers)
            wanted = () if asked.outputs is ABSENT else wanted_outputs(asked.outputs, binary=wishes.binary)
            check_names([one.name for one in wanted], names_of(outputs))
            inputs: list[AskedInput] = members_of(asked.inputs)
            given = [TensorHead(one.name, one.datatype, shape_of(one, place)) for place, one in enumerate(inputs)]
            heads = checked_heads(given, specs, most)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(decode_problem(exc, text)) from None
        return _Said(asked.id, wishes, parameters, wanted, inputs, heads, *_form_of(inputs, heads))

    often_said = lru_cache(maxsize=_MOST_KNOWN)(said_of)

    def read(body: bytes, length: int | None, served: ServedModel) -> TensorsRequest:
        specs, most = served.inputs, served.settings.max_batch_size
        if length == 0:
            return TensorsRequest(None, value_of_raw(body, specs, most), Wishes(binary=True), b"")
        text, binary = (body, None) if length is None else cut(body, length)
        often = length is not None and length <= _SHORT
        said = (often_said if often else said_of)(text, specs, served.outputs, most)
        if binary is not None and len(binary) == said.size:
            value = packed_in_place(binary, said.opening)
        else:
            value = value_of(said.heads, _data(said.inputs, said.heads, binary))
        return TensorsRequest(said.id, value, said.wishes, said.parameters, said.wanted)

    return read


def long_tensors_reader(
    settings: Settings,
) -> Callable[[bytes, int | None, ServedModel], Steps[TensorsRequest]]:
    """Make the function that reads long bodies, in steps; see `tensors_reader`."""
    tiers, most_parameters = len(settings.tier_names), settings.max_parameters
    read_short = tensors_reader(settings)

    def said_of(text: bytes, served: ServedModel) -> Steps[_Said]:
        asked = take_request((yield from members_in_steps(text)))
        wishes, parameters = NONE, b""
        if asked.parameters is not ABSENT:
            wishes, parameters = yield from long_parameters_of(asked.parameters, most_parameters, tiers)
        wanted = () if asked.outputs is ABSENT else wanted_outputs(asked.outputs, binary=wishes.binary)
        check_names([one.name for one in wanted], names_of(served.outputs))
        inputs = yield from long_inputs_of(asked.inputs, MOST_TENSORS)
        if inputs is None:
            raise BadRequest(f"the request has more than {MOST_TENSORS} inputs; expected 1 to {MOST_TENSORS}")
        given = [TensorHead(one.name, one.datatype, shape_of(one, place)) for place, one in enumerate(inputs)]
        heads = checked_heads(given, served.inputs, served.settings.max_batch_size)
        return _Said(asked.id, wishes, parameters, wanted, inputs, heads, *_form_of(inputs, heads))

    def read(body: bytes, length: int | None, served: ServedModel) -> Steps[TensorsRequest]:
        text, binary = (bytes(body), None) if length is None else cut(body, length)
        if len(text) <= SHORT and len(body) - len(text) <= SHORT:
            return read_short(body, length, served)
        said = yield from said_of(text, served)
        if binary is not None and len(binary) == said.size:
            value = packed_in_place(binary, said.opening)
        else:
            data = yield from _data_in_steps(said.inputs, said.heads, binary)
            value = yield from value_in_steps(said.heads, data)
        return TensorsRequest(said.id, value, said.wishes, said.parameters, said.wanted)

    return read


def _form_of(inputs: Sequence[AskedInput], heads: Sequence[TensorHead]) -> tuple[int, bytes]:
    """Bytes of the data behind a JSON object, and those before them in the packed value; -1 where the data are not packed as they come."""
    if inputs[0].parameters is None:  # They are in JSON.
        return -1, b""
    total = 0
    for one, head in zip(inputs, heads, strict=True):
        size = SIZES[head.datatype] * count_of(head.shape)
        asked = one.parameters
        if asked is None or asked.binary_data_size != size or asked.shared_memory_region is not ABSENT:
            return -1, b""
        if one.data is not ABSENT or head.datatype == BYTES or total % ALIGNED:
            return -1, b""
        total += size
    return total, opening(heads)


def packed_in_place(data: memoryview, opening: bytes) -> Tensors:
    """Packed value of data at the end of a body or of a message, which are copied unless they are in memory that may be written to.

    That is its request's own, as it is of a large one; the header is put before the data there.

    Arguments:
        data: the data.
        opening: bytes of the value before the data.
    """
    padding, room = -len(data) % ALIGNED, memoryview(data.obj)
    begin = len(room) - len(data) - len(opening)
    if padding or begin < 0 or room.readonly:
        return Tensors(b"".join((opening, data, bytes(padding))))
    room[begin : begin + len(opening)] = opening
    return Tensors(cast(bytes, room[begin:].toreadonly()))


def _data(
    inputs: Sequence[AskedInput], heads: Sequence[TensorHead], binary: memoryview | None
) -> list[bytes | memoryview]:
    """Data of each input in the binary form. Raises BadRequest."""
    found: list[bytes | memoryview] = []
    end = 0
    for one, head in zip(inputs, heads, strict=True):
        size = None if one.parameters is None else one.parameters.binary_data_size
        if one.parameters is not None:
            refuse_shared_memory(one.parameters)
        if (size is None) is (one.data is ABSENT):
            has = "no data" if size is None else "both `data` and `binary_data_size`"
            raise BadRequest(
                f"the input {quoted(one.name)} has {has}; expected `data`, or `binary_data_size` in its parameters"
            )
        if size is None:
            found.append(_data_in_json(bytes(one.data), head))
            continue
        if binary is None:
            raise BadRequest(
                f"the input {quoted(one.name)} has `binary_data_size`, and the header field {LENGTH_FIELD} is missing; expected the "
                "length of the JSON object in bytes"
            )
        if size > len(binary) - end:
            raise BadRequest(
                f"the `binary_data_size` of the input {quoted(one.name)} is {size}, and {len(binary) - end} bytes are left behind the "
                "JSON object and the inputs before"
            )
        found.append(binary[end : end + size])
        end += size
    if binary is not None and end < len(binary):
        raise BadRequest(
            f"{len(binary)} bytes follow the JSON object, and the inputs have a `binary_data_size` of {end} in all"
        )
    return found


def _data_in_json(text: bytes, head: TensorHead) -> bytes:
    try:
        return tensor_json.read(text, head.name, head.datatype, head.shape)
    except NoTensors as exc:
        raise BadRequest(str(exc)) from None


def _data_in_steps(
    inputs: Sequence[AskedInput], heads: Sequence[TensorHead], binary: memoryview | None
) -> Steps[list[bytes | memoryview]]:
    """The same of inputs whose JSON may be long, for which empty ones stand at first; see `_data`."""
    long = [len(bytes(one.data)) > SHORT for one in inputs]
    found = _data(
        [replace(one, data=_EMPTY) if is_long else one for one, is_long in zip(inputs, long, strict=True)],
        [replace(head, shape=(0,)) if is_long else head for head, is_long in zip(heads, long, strict=True)],
        binary,
    )
    for place, head in enumerate(heads):
        if long[place]:
            text = bytes(inputs[place].data)
            try:
                found[place] = yield from tensor_json.read_in_steps(text, head.name, head.datatype, head.shape)
            except NoTensors as exc:
                raise BadRequest(str(exc)) from None
    return found

"""Bodies of inference requests: a JSON object, which may be followed by the inputs' binary data.

If binary data follow, the header field Inference-Header-Content-Length has the length of the object; 0 means that the whole body is one
element without a length prefix. `bodies` decodes bodies for models that take tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.config import Settings
from headway.core.failures import error_of
from headway.core.json_pages import SHORT, Steps, split
from headway.doors.bodies import ABSENT, decode_problem, members_in_steps
from headway.doors.exchange import CodecContext, Exchange, Reader, WriteAnswer
from headway.doors.fields import shorten
from headway.errors import BadRequest
from headway.gateway.fan_out import MOST_INPUTS
from headway.gateway.served_model import ServedModel
from headway.gateway.served_models import KnownModels
from headway.http.inference.codecs import Codec
from headway.http.server.head import Head, RequestTarget
from headway.model import RequestOptions, ValueKind
from headway.oip.model_tensors import WantedOutput, check_names, names_of
from headway.oip.parameters import NONE, Wishes
from headway.oip.rest.answers import Answerer, encode_error
from headway.oip.rest.bodies import (
    LENGTH_FIELD,
    AskedInput,
    TensorsRequest,
    cut,
    long_inputs_of,
    long_parameters_of,
    long_tensors_reader,
    parameters_of,
    placed,
    refuse_shared_memory,
    shape_of,
    take_request,
    tensors_reader,
    wanted_outputs,
)
from headway.oip.tensors import (
    Element,
    NoElements,
    check_outputs,
    count_elements,
    unpack,
    values_in_steps,
    values_of,
    wrong_number,
)

_TENSORS = ValueKind.TENSORS


class _Inputs(msgspec.Struct, gc=False, array_like=True):
    first: AskedInput | msgspec.UnsetType = msgspec.UNSET
    second: msgspec.Raw = ABSENT


class _Request(msgspec.Struct, gc=False):
    inputs: _Inputs
    id: str | None = None
    outputs: msgspec.Raw = ABSENT
    parameters: msgspec.Raw = ABSENT


class InferRequest(msgspec.Struct, gc=False):
    """An inference request for a model that doesn't take tensors, from an HTTP body or a gRPC message. The answer repeats `id`, which
    may be None or empty. `parameters` has the target's parameters as JSON, or is empty. `wishes` includes the form of the output.
    `wanted` has the requested tensors; empty means all."""

    id: str | None
    shape: tuple[int, ...]
    elements: list[Element]
    wishes: Wishes
    parameters: bytes
    wanted: tuple[WantedOutput, ...] = ()

    def exchange(self, model: str, options: RequestOptions, takes: ValueKind | None, write: WriteAnswer) -> Exchange:
        """Return the exchange for a model that takes the kind `takes`. Raises RequestError if the input isn't of that kind."""
        values, wishes = values_of(self.elements, takes), self.wishes
        if wishes is not NONE:
            options = wishes.applied_to(options)
        input = values[0] if len(values) == 1 else values
        return Exchange(model, input, self.parameters, options, write, self.id or "", wishes.final)

    def exchange_in_steps(
        self, model: str, options: RequestOptions, takes: ValueKind | None, write: WriteAnswer
    ) -> Steps[Exchange]:
        values = yield from values_in_steps(self.elements, takes)
        options = self.wishes.applied_to(options)
        input = values[0] if len(values) == 1 else values
        return Exchange(model, input, self.parameters, options, write, self.id or "", self.wishes.final)


_decode = msgspec.json.Decoder(_Request).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_nested = msgspec.json.Decoder(list[tuple[str]]).decode


def request_reader(settings: Settings) -> Callable[[bytes, int | None, ServedModel], InferRequest | TensorsRequest]:
    """Return a function that decodes a body, given the length of its JSON object (None for the whole body) and the model."""
    limit, tiers = min(MOST_INPUTS, settings.max_queue), len(settings.tier_names)
    most_parameters = settings.max_parameters
    read_tensors = tensors_reader(settings)

    def read(body: bytes, length: int | None, served: ServedModel) -> InferRequest | TensorsRequest:
        if served.takes is _TENSORS:
            return read_tensors(body, length, served)
        if length == 0:
            return InferRequest(None, (1,), [bytes(body)], Wishes(binary=True), b"")
        binary, text = None, body
        if length is not None:
            text, binary = cut(body, length)
        try:
            if not text.isascii():
                text.decode()
            asked = _decode(text)
            wishes, parameters = parameters_of(asked.parameters, most_parameters, tiers)
            tensor = _only_input(asked.inputs)
            shape = shape_of(tensor)
            count = count_elements(tensor.name, tensor.datatype, shape, limit)
            elements = _elements(tensor, count, binary)
            if asked.outputs is not ABSENT:
                wishes, wanted = _outputs(wishes, asked.outputs, served)
                return InferRequest(asked.id, shape, elements, wishes, parameters, wanted)
        except NoElements:
            if served.takes is None:  # No worker has reported what the model takes, so it may take tensors.
                return read_tensors(body, length, served)
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(decode_problem(exc, text)) from None
        return InferRequest(asked.id, shape, elements, wishes, parameters)

    return read


def long_request_reader(
    settings: Settings,
) -> Callable[[bytes, int | None, ServedModel], Steps[InferRequest | TensorsRequest]]:
    """Return a function that decodes long bodies in steps; see `request_reader`."""
    limit, tiers = min(MOST_INPUTS, settings.max_queue), len(settings.tier_names)
    most_parameters = settings.max_parameters
    read_short, read_tensors = request_reader(settings), long_tensors_reader(settings)

    def read(body: bytes, length: int | None, served: ServedModel) -> Steps[InferRequest | TensorsRequest]:
        if served.takes is _TENSORS and length != 0:
            return (yield from read_tensors(body, length, served))
        text, binary = (bytes(body), None) if length is None else cut(body, length)
        if length == 0 or len(text) <= SHORT:
            return read_short(body, length, served)
        asked = take_request((yield from members_in_steps(text)))
        wishes, parameters = yield from long_parameters_of(asked.parameters, most_parameters, tiers)
        inputs = yield from long_inputs_of(asked.inputs, 1)
        yield 0
        try:
            tensor = _sole(inputs)
            shape = shape_of(tensor)
            count = count_elements(tensor.name, tensor.datatype, shape, limit)
        except NoElements:
            if served.takes is None:  # No worker has reported what the model takes, so it may take tensors.
                return (yield from read_tensors(body, length, served))
            raise
        data = bytes(tensor.data)
        if data[:1] == b"[" and (yield from split(data, MOST_INPUTS)) is None:
            raise BadRequest(f"the input's data have over {MOST_INPUTS} elements, but its shape says {count}")
        yield 0
        elements = _elements(tensor, count, binary)
        yield 0
        wanted: tuple[WantedOutput, ...] = ()
        if asked.outputs is not ABSENT:
            wishes, wanted = _outputs(wishes, asked.outputs, served)
        return InferRequest(asked.id, shape, elements, wishes, parameters, wanted)

    return read


def _sole(inputs: Sequence[AskedInput] | None) -> AskedInput:
    if not inputs:
        raise wrong_number(2 if inputs is None else 0)
    if inputs[0].parameters is not None:
        refuse_shared_memory(inputs[0].parameters)
    return inputs[0]


def _only_input(inputs: _Inputs) -> AskedInput:
    tensor = inputs.first
    if isinstance(tensor, msgspec.UnsetType) or inputs.second is not ABSENT:
        raise wrong_number(0 if isinstance(tensor, msgspec.UnsetType) else 2)
    if tensor.parameters is not None:
        refuse_shared_memory(tensor.parameters)
    return tensor


def _elements(tensor: AskedInput, count: int, binary: memoryview | None) -> list[Element]:
    size = None if tensor.parameters is None else tensor.parameters.binary_data_size
    if size is None:
        if tensor.data is ABSENT:
            raise BadRequest("the input has no data; send `data`, or `binary_data_size` in its parameters")
        if binary:
            raise BadRequest(f"{len(binary)} bytes follow the JSON object, but the input has no `binary_data_size`")
        return _texts(bytes(tensor.data), tensor.name, count)
    if tensor.data is not ABSENT:
        raise BadRequest("the input has both `data` and `binary_data_size`; send only one of them")
    if binary is None:
        raise BadRequest(
            f"the input has `binary_data_size`, but the header field {LENGTH_FIELD} is missing; expected the length of the JSON "
            "object in bytes"
        )
    if size != len(binary):
        raise BadRequest(f"`binary_data_size` is {size}, but {len(binary)} bytes follow the JSON object")
    return [*unpack(tensor.name, binary, count)]


def _texts(text: bytes, name: str, count: int) -> list[Element]:
    """Return the elements given as JSON. Each element may be in an array of its own."""
    nested = text[1:].lstrip(b" \t\r\n")[:1] == b"["
    try:
        texts: list[Any] = [element for (element,) in _decode_nested(text)] if nested else _decode_texts(text)
    except msgspec.MsgspecError as exc:
        raise BadRequest(placed(exc, "$.inputs[0].data")) from None
    if len(texts) != count:
        raise BadRequest(f"the input's data have {len(texts)} elements, but its shape says {count}")
    return texts


def _outputs(wishes: Wishes, raw: msgspec.Raw, served: ServedModel) -> tuple[Wishes, tuple[WantedOutput, ...]]:
    """Return the requested outputs, and the client's wishes including the requested form of a BYTES output."""
    wanted = wanted_outputs(raw, binary=wishes.binary)
    if not wanted:
        return wishes, ()
    names = [output.name for output in wanted]
    if served.gives in (None, _TENSORS):
        check_names(names, names_of(served.outputs))
    else:
        check_outputs(names)
    if wanted[0].binary is not wishes.binary:
        wishes = msgspec.structs.replace(wishes, binary=wanted[0].binary)
    return wishes, wanted


_LENGTH = re.compile(rb"[0-9]{1,19}")


def infer(settings: Settings) -> Codec:
    """Return the codec of the inference routes."""
    read_request = request_reader(settings)
    read_long = long_request_reader(settings)

    def open_head(
        head: Head, target: RequestTarget, options: RequestOptions, context: CodecContext
    ) -> tuple[RequestOptions, Reader]:
        target.refuse_named("name it in the path")
        model, version = target.names.get("model", ""), target.names.get("version")
        check_version(context.known, model, version)
        length = _json_length(head)

        def read(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
            served = known[model]
            try:
                asked = read_request(body, length, served)
            except BadRequest:
                if model in known:
                    raise
                # The gateway refuses this request anyway, because it doesn't know the model.
                return Exchange(model, "", b"", options, Answerer(model).write)
            answerer = Answerer(model, asked.shape, asked.wishes.binary, served.gives, asked.id, asked.wanted)
            return asked.exchange(model, options, served.takes, answerer.write)

        def read_default(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
            nonlocal model
            model = known.default  # The default may have changed since the last request.
            return read(body, options, known)

        def read_in_steps(body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
            name = model if named else known.default
            served = known[name]
            try:
                asked = yield from read_long(body, length, served)
            except BadRequest:
                if name in known:
                    raise
                return Exchange(name, "", b"", options, Answerer(name).write)
            write = Answerer(name, asked.shape, asked.wishes.binary, served.gives, asked.id, asked.wanted).write
            if isinstance(asked, TensorsRequest):
                return asked.exchange(name, options, served.takes, write)
            return (yield from asked.exchange_in_steps(name, options, served.takes, write))

        named = bool(model)
        return with_version(options, version), Reader(read if model else read_default, read_in_steps)

    return Codec(open=open_head, encode_error=encode_error, compressed=True, tasks=False)


def with_version(options: RequestOptions, version: str | None) -> RequestOptions:
    """Return a request's options, including its version if it names one."""
    return replace(options, version=version) if version else options


def check_version(known: KnownModels, model: str, version: str | None) -> None:
    """Raise RequestError if the model lacks this version (None means any), or if its versions are currently unknown."""
    if version is not None and model in known and version not in known[model].reported:
        failure = known.refusal(model, version)
        if failure is not None:
            raise error_of(failure)


def _json_length(head: Head) -> int | None:
    value = head.single.get(LENGTH_FIELD.lower().encode())
    if value is None:
        return None
    if _LENGTH.fullmatch(value) is None:
        raise BadRequest(f"{LENGTH_FIELD} is {shorten(value)}; expected the length of the JSON object in bytes")
    return int(value)

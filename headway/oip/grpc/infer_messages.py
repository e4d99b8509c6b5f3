"""ModelInfer and ModelStreamInfer messages: converts requests to exchanges, and outcomes to answers.

Inputs are in `contents` or `raw_input_contents`, and outputs in `raw_output_contents`. A model that takes text, JSON values or octets has
one input, each element of which becomes an entry. A model that takes tensors may have several inputs, which together form one entry. Raw
data, typed booleans, and typed floats of 32 or 64 bits are already in binary form. Integers are converted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from headway import protos
from headway.config import Settings
from headway.core.excerpt import excerpt
from headway.core.json_pages import SHORT, Steps
from headway.core.tensor_json import PAGE
from headway.core.tensors import (
    BYTES,
    MOST_AXES,
    MOST_TENSORS,
    SIZES,
    Tensor,
    TensorHead,
    count_of,
    header_of,
    join_elements,
    opening_of,
    pack,
    quoted,
    shown_shape,
)
from headway.doors.answer_pieces import PIECE, cut, packed_pieces, released
from headway.doors.exchange import Exchange, Outcome, Reader, Written
from headway.errors import BadRequest, PayloadTooLarge
from headway.gateway.fan_out import MOST_INPUTS
from headway.gateway.served_model import ServedModel
from headway.gateway.served_models import KnownModels
from headway.model import RequestOptions, Tensors, TensorSpec, TokenCount, Value, ValueKind, added_up
from headway.oip import parameters, tensors
from headway.oip.grpc import message_parts
from headway.oip.grpc.message_parts import Data
from headway.oip.model_tensors import (
    OutputTensor,
    WantedOutput,
    answer_tensors,
    are_tensors,
    check_names,
    checked_heads,
    form_of_output,
    names_of,
    value_of,
)
from headway.oip.parameters import Wishes
from headway.oip.rest.bodies import TensorsRequest, packed_in_place
from headway.oip.rest.requests import InferRequest, check_version, with_version
from headway.oip.tensors import OUTPUT, NoElements

_REQUEST = protos.message("inference.ModelInferRequest")
_RESPONSE = protos.message("inference.ModelInferResponse")
_CONTENT = bytes((_RESPONSE.DESCRIPTOR.fields_by_name["raw_output_contents"].number << 3 | 2,))
_MOST_INTEGERS = 1 << 18  # Maximum number in a request's `contents`. Each takes 20 ns. A 224 × 224 RGB image has fewer.
_LONGEST_FRONT = 1024  # Maximum size in bytes of the start of a message that is remembered. Clients often repeat it.
_MOST_FORMS = 256
_MOST_TEXT = 1 << 18  # Maximum number of characters in a request's parameters. Each may take six bytes in JSON.
_MOST_AT_ONCE = 1 << 20  # Maximum size in bytes of an answer with tensors that is joined in one go.
_REGION = "shared_memory_region"  # Parameter of an input or output whose data are in shared memory.
_TENSORS = ValueKind.TENSORS
_AS_THEY_ARE = ("BOOL", "FP32", "FP64")  # Datatypes whose typed data are already in binary form.


def infer_reader(settings: Settings) -> Reader:
    """Return the reader of ModelInfer and ModelStreamInfer messages."""
    limit, tiers = min(MOST_INPUTS, settings.max_queue), len(settings.tier_names)
    forms: dict[int, _Form] = {}

    def read(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        form = forms.get(len(body))
        if form is not None and body[: len(form.front)] == form.front:
            model = form.model or known.default
            served = known[model]
            if form.still_fits(served):
                data = memoryview(body)[len(form.front) :]
                value = packed_in_place(data, form.opening)
                write = _Answerer(model, form.id, (), form.wanted, known).write
                return TensorsRequest(form.id, value, form.wishes, form.text).exchange(model, options, _TENSORS, write)
        message, raw = opened(body)
        model = message.model_name or known.default
        check_version(known, model, message.model_version or None)
        options, served = with_version(options, message.model_version), known[model]
        wanted = _wanted(message.outputs, served) if message.outputs else ()
        wishes, text = parameters.NONE, b""
        if message.parameters:
            given = _parameters_of(message.parameters, settings.max_parameters)
            wishes, own = parameters.read_wishes(given, tiers), parameters.for_target(given)
            text = msgspec.json.encode(own) if own else b""
        takes = served.takes
        request: InferRequest | TensorsRequest
        if takes is _TENSORS:
            request = _tensors_of(message, raw, served, settings.max_body_bytes, wishes, text)
        else:
            try:
                shape, elements = _input_of(message, raw, limit)
                request = InferRequest(message.id, shape, elements, wishes, text)
            except NoElements:
                if takes is not None:
                    raise
                # No worker has reported what the model takes. It may be tensors.
                request = _tensors_of(message, raw, served, settings.max_body_bytes, wishes, text)
        if takes is _TENSORS and isinstance(request, TensorsRequest) and len(raw) == 1 and not message.model_version:
            form = _form_of(body, message.model_name, request, wanted, served)
            if form is not None:
                if len(forms) >= _MOST_FORMS:
                    forms.clear()
                forms[len(body)] = form
        write = _Answerer(model, message.id, request.shape, wanted, known).write
        return request.exchange(model, options, takes, write)

    def read_in_steps(body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
        decoded = len(
            message_parts.split(body)[0]
        )  # Done before `read`, which may overwrite the message with the value.
        exchange = read(body, options, known)
        yield _charged_for(decoded, exchange.input)
        return exchange

    return Reader(read, read_in_steps)


def _charged_for(decoded: int, input: Value | list[Value]) -> int:
    """Return the number of JSON bytes that would cost as much to decode as the input's integers and BYTES elements."""
    if not isinstance(input, Tensors):
        return 0
    heads = header_of(input).heads
    integers = sum(count_of(head.shape) for head in heads if "INT" in head.datatype)
    return min(integers, decoded) + 3 * sum(count_of(head.shape) for head in heads if head.datatype == BYTES)


class _Answerer(msgspec.Struct, frozen=True, gc=False):
    """Writes the answer to one request, without keeping the inputs in memory. `shape` is the shape of an output that isn't tensors.
    `wanted` has the requested outputs; empty means all."""

    model: str
    id: str
    shape: tuple[int, ...]
    wanted: tuple[WantedOutput, ...]
    known: KnownModels

    def write(self, outcome: Outcome) -> Written:
        outputs, used = outcome.outputs, added_up(outcome.tokens)
        first = outputs[0]
        if isinstance(first, Tensors) and are_tensors(outputs):
            if len(outputs) == 1 and used is None and not self.id:
                content = first.content
                known = _known_answer(self.model, outcome.version, self.wanted, opening_of(content))
                if known is not None and known.length == len(content):
                    return b"", b"".join([part for front, place in known.parts for part in (front, content[place])])
            return b"", _with_tensors(
                self._begun(outcome.version, used), answer_tensors(outputs, self.wanted, binary=True)
            )
        answer, gives = self._begun(outcome.version, used), self.known[self.model].gives
        answer.outputs.add(name=OUTPUT, datatype=BYTES, shape=self.shape)
        head = answer.SerializeToString()
        if len(outputs) > 1 or len(first) > PIECE:
            return b"", _pieces(head, (tensors.element_of(output, gives) for output in released(outputs)))
        data = tensors.element_of(first, gives)
        return b"", b"".join((head, _CONTENT, protos.varint(tensors.packed_size((data,))), tensors.head_of(data), data))

    def _begun(self, version: str, used: TokenCount | None) -> Any:
        answer = _RESPONSE(model_name=self.model, model_version=version, id=self.id)
        if used is not None:
            answer.parameters[parameters.TOKENS].int64_param = used.used
        return answer


class _Form(NamedTuple):
    """The form of a request with one tensor: everything except the data at its end. `front` is the message up to the data, and
    `opening` the packed value up to the data. `model` is the model's name in the message, or "". `inputs`, `outputs` and
    `settings` are those that the model had when the message was checked."""

    front: bytes
    model: str
    id: str
    wishes: Wishes
    text: bytes
    wanted: tuple[WantedOutput, ...]
    opening: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    settings: Settings

    def still_fits(self, served: ServedModel) -> bool:
        unchanged = served.inputs is self.inputs and served.outputs is self.outputs and served.settings is self.settings
        return unchanged and served.takes is _TENSORS


def _form_of(
    body: bytes, model: str, request: TensorsRequest, wanted: tuple[WantedOutput, ...], served: ServedModel
) -> _Form | None:
    """Return the form of a message, or None if its front is too long or it doesn't end with raw data of a fixed size."""
    opening = opening_of(request.value.content)
    [head] = header_of(request.value).heads
    if not opening or head.datatype == BYTES:
        return None
    try:
        others, [data] = message_parts.split(body)
    except BadRequest:  # `split` is stricter than the decoder of short messages.
        return None
    front = others + bytes((message_parts.RAW,)) + protos.varint(len(data))
    if len(front) > _LONGEST_FRONT or len(front) + len(data) != len(body) or body[: len(front)] != front:
        return None
    id, checked = request.id or "", (served.inputs, served.outputs, served.settings)
    return _Form(front, model, id, request.wishes, request.parameters, wanted, opening, *checked)


class _KnownAnswer(NamedTuple):
    """The form of an answer. Each of the `parts` is a tensor: the bytes before its data, and where the data are in the output's
    value. `length` is the length of that value."""

    parts: Sequence[tuple[bytes, slice]]
    length: int


@lru_cache(maxsize=256)
def _known_answer(model: str, version: str, wanted: tuple[WantedOutput, ...], opening: bytes) -> _KnownAnswer | None:
    form = form_of_output(opening, wanted, binary=True, max_bytes=PIECE)
    if form is None:
        return None
    answer, parts = _RESPONSE(model_name=model, model_version=version), []
    for tensor in form.tensors:
        answer.outputs.add(name=tensor.head.name, datatype=tensor.head.datatype, shape=tensor.head.shape)
    head = answer.SerializeToString()
    for tensor, place in zip(form.tensors, form.places, strict=True):
        parts.append((head + _CONTENT + protos.varint(tensor.size), place))
        head = b""
    return _KnownAnswer(parts, form.length)


def _pieces(answer: bytes, outputs: Iterable[bytes]) -> Iterator[bytes]:
    packed: list[bytes] = []
    for element in outputs:
        packed.append(element)
        yield b""
    yield answer
    yield _CONTENT + protos.varint(tensors.packed_size(packed))
    yield from packed_pieces(packed)


def _with_tensors(answer: Any, outputs: Sequence[OutputTensor]) -> bytes | Iterator[bytes]:
    for tensor in outputs:
        answer.outputs.add(name=tensor.head.name, datatype=tensor.head.datatype, shape=tensor.head.shape)
    parts: list[Data] = [answer.SerializeToString()]
    for tensor in outputs:
        parts += (_CONTENT + protos.varint(tensor.size), *tensor.parts)
    if sum(map(len, parts)) <= _MOST_AT_ONCE:
        return b"".join(parts)
    return (piece for part in parts for piece in cut(part))


def front_of(body: bytes) -> Any:
    """Return a request's message without its inputs. Raises BadRequest."""
    return protos.read(_REQUEST, message_parts.front_of(body))


def opened(body: bytes) -> tuple[Any, Sequence[Data]]:
    """Return a request's message and its raw contents. If the message is large, it no longer includes the raw contents. Raises
    BadRequest if the bytes aren't such a message, or would take too long to decode."""
    if len(body) <= SHORT:
        message = protos.read(_REQUEST, body)
        return message, message.raw_input_contents
    others, raw = message_parts.split(body)
    return protos.read(_REQUEST, others), raw


def _input_of(message: Any, raw: Sequence[Data], limit: int) -> tuple[tuple[int, ...], list[tensors.Element]]:
    if len(message.inputs) != 1:
        raise tensors.wrong_number(len(message.inputs))
    tensor = message.inputs[0]
    if _REGION in tensor.parameters:
        raise _no_shared_memory()
    shape = _shape_of(tensor)
    count = tensors.count_elements(tensor.name, tensor.datatype, shape, limit)
    if raw:
        if tensor.HasField("contents"):
            raise BadRequest("the input has both `contents` and `raw_input_contents`; send only one of them")
        if len(raw) != 1:
            raise BadRequest(f"`raw_input_contents` has {len(raw)} members for one input; expected one")
        return shape, [*tensors.unpack(tensor.name, raw[0], count)]
    contents = tensor.contents
    for field, _ in contents.ListFields():
        if field.name != "bytes_contents":
            raise BadRequest(
                f"the input has `{field.name}`; expected `bytes_contents`, because its datatype is {BYTES}"
            )
    elements = contents.bytes_contents
    if len(elements) != count:
        raise BadRequest(f"`bytes_contents` has {len(elements)} elements, but the shape says {count}")
    return shape, list(elements)


def _tensors_of(
    message: Any, raw: Sequence[Data], served: ServedModel, limit: int, wishes: Wishes, text: bytes
) -> TensorsRequest:
    """Decode a request for a model that takes tensors, or may take them. Its data may have up to `limit` bytes. `text` has the
    target's parameters as JSON. Raises RequestError if the inputs are too large, or if the model doesn't take them."""
    inputs = message.inputs
    if len(inputs) > MOST_TENSORS:
        raise BadRequest(f"the request has {len(inputs)} inputs; expected 1 to {MOST_TENSORS}")
    if any(_REGION in tensor.parameters for tensor in inputs):
        raise _no_shared_memory()
    given = [TensorHead(tensor.name, tensor.datatype, _shape_of(tensor)) for tensor in inputs]
    heads = checked_heads(given, served.inputs, served.settings.max_batch_size)
    data = data_of(inputs, raw, heads, limit)
    value = value_of(heads, data) if raw else pack(list(map(Tensor, heads, data)))
    return TensorsRequest(message.id, value, wishes, text)


def _shape_of(tensor: Any) -> tuple[int, ...]:
    if len(tensor.shape) > MOST_AXES:
        raise BadRequest(
            f"the input {quoted(tensor.name)} has {len(tensor.shape)} axes; at most {MOST_AXES} are allowed"
        )
    return tuple(tensor.shape)


def _wanted(outputs: Sequence[Any], served: ServedModel) -> tuple[WantedOutput, ...]:
    if len(outputs) > MOST_TENSORS:
        raise BadRequest(f"the request lists {len(outputs)} outputs; at most {MOST_TENSORS} are allowed")
    for output in outputs:
        if _REGION in output.parameters:
            raise _no_shared_memory()
        if "classification" in output.parameters:
            raise BadRequest("classification is not supported; leave the parameter out")
    names = [output.name for output in outputs]
    if served.gives in (None, _TENSORS):
        check_names(names, names_of(served.outputs))
    else:
        tensors.check_outputs(names)
    return tuple(WantedOutput(name, True) for name in names)


def _no_shared_memory() -> BadRequest:
    return BadRequest("shared memory is not supported; send the input's data in the message")


def _parameters_of(given: Any, limit: int) -> dict[str, Any]:
    if len(given) > limit:
        raise BadRequest(f"`parameters` has {len(given)} members; at most {limit} are allowed")
    values: dict[str, Any] = {}
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        value = getattr(parameter, kind) if kind is not None else None
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRequest(f"the parameter `{excerpt(name)}` is not a finite number")
        values[name] = value
    if (size := sum(len(value) for value in values.values() if isinstance(value, str))) > _MOST_TEXT:
        raise BadRequest(f"the strings in `parameters` have {size} characters; at most {_MOST_TEXT} are allowed")
    return values


def data_of(inputs: Sequence[Any], raw: Sequence[Data], heads: Sequence[TensorHead], limit: int) -> list[Data]:
    """Return the data of each input in binary form. `heads` are the checked heads. Typed data may have up to `limit` bytes. Raises
    BadRequest or PayloadTooLarge if data are missing, given in both forms, too large, or don't match their heads."""
    if raw:
        return _raw(inputs, raw)
    size = sum(SIZES[head.datatype] * count_of(head.shape) for head in heads)
    if size > limit:
        raise PayloadTooLarge(f"the inputs have {size} bytes of data; the limit is {limit} (max_body_bytes)")
    integers = sum(count_of(head.shape) for head in heads if "INT" in head.datatype)
    if integers > _MOST_INTEGERS:
        raise BadRequest(
            f"`contents` contains {integers} integers, but at most {_MOST_INTEGERS} are allowed; send the data in `raw_input_contents` instead"
        )
    return [_typed(tensor, head) for tensor, head in zip(inputs, heads, strict=True)]


def _raw(inputs: Sequence[Any], raw: Sequence[Data]) -> list[Data]:
    if len(raw) != len(inputs):
        raise BadRequest(
            f"`raw_input_contents` has {len(raw)} members, but the request has {len(inputs)} inputs; expected one for each input"
        )
    for tensor in inputs:
        if tensor.HasField("contents"):
            raise BadRequest(
                f"the input {quoted(tensor.name)} has `contents`, but the request has `raw_input_contents`; use one of these "
                "forms for all inputs"
            )
    return list(raw)


def _typed(tensor: Any, head: TensorHead) -> Data:
    name, datatype, contents = quoted(tensor.name), head.datatype, tensor.contents
    member, typecode = tensors.CONTENTS.get(datatype, ("", ""))
    if not member:
        raise BadRequest(
            f"the input {name} is {datatype}, for which the protocol does not define `contents`; send its data in `raw_input_contents`"
        )
    for field, _ in contents.ListFields():
        if field.name != member:
            raise BadRequest(
                f"the input {name} has `{field.name}`; expected `{member}`, because its datatype is {datatype}"
            )
    elements, count = getattr(contents, member), count_of(head.shape)
    if len(elements) != count:
        raise BadRequest(
            f"`{member}` of the input {name} has {len(elements)} elements; {datatype} of shape {shown_shape(head.shape)} takes {count}"
        )
    if datatype == BYTES:
        return join_elements(elements)
    if datatype in _AS_THEY_ARE and count:
        contents.DiscardUnknownFields()  # Then the message ends with the elements.
        size = SIZES[datatype] * count
        return memoryview(contents.SerializeToString())[-size:]
    return _numbers(elements, name, datatype, typecode)


def _numbers(elements: Any, name: str, datatype: str, typecode: str) -> bytes:
    """Pack numbers in pages, which is twice as fast as one at a time. Raises BadRequest."""
    pages: list[bytes] = []
    for begin in range(0, len(elements), PAGE):
        page = elements[begin : begin + PAGE]
        try:
            pages.append(struct.pack(f"<{len(page)}{typecode}", *page))
        except struct.error:
            bits = 8 * SIZES[datatype]
            low, high = (0, (1 << bits) - 1) if datatype[0] == "U" else (-(1 << bits - 1), (1 << bits - 1) - 1)
            place, number = next((at, number) for at, number in enumerate(page, begin) if not low <= number <= high)
            raise BadRequest(
                f"element {place} of the input {name} is {number}, which is out of the range of {datatype}"
            ) from None
    return b"".join(pages)

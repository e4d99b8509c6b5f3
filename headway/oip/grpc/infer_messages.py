"""Messages of ModelInfer and ModelStreamInfer: requests to exchanges, and outcomes to answers.

An input comes in `contents` or in `raw_input_contents`; an output leaves in `raw_output_contents`. A model that takes texts, JSON
values or octets has one input, of whose elements each becomes an entry. A model that takes tensors may have several, and all of them
are one entry. Raw data are in the binary form as they come. Of typed ones numbers of 32 and 64 bits with a fraction, and booleans,
lie in the message as they do in the binary form; integers are put into it one by one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

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
from headway.grpc import messages
from headway.model import RequestOptions, Tensors, TensorSpec, TokenCount, Value, ValueKind, added_up
from headway.oip import parameters, tensors
from headway.oip.grpc import message_parts
from headway.oip.grpc.message_parts import Data
from headway.oip.inputs import checked_heads, value_of
from headway.oip.outputs import OutputTensor, WantedOutput, are_tensors, check_names, form_of_output, names_of, told
from headway.oip.parameters import Wishes
from headway.oip.rest.requests import InferRequest, check_version, with_version
from headway.oip.rest.tensor_requests import TensorsRequest, packed_in_place
from headway.oip.tensors import OUTPUT, NoElements

_REQUEST = messages.message("inference.ModelInferRequest")
_RESPONSE = messages.message("inference.ModelInferResponse")
_CONTENT = bytes((_RESPONSE.DESCRIPTOR.fields_by_name["raw_output_contents"].number << 3 | 2,))
"""Byte before the length of the content of a tensor in an answer."""
_MOST_INTEGERS = 1 << 18
"""Most integers of a request in `contents`, as each takes some 20 ns. An image of 224 × 224 pixels in three colours has fewer."""
_LONGEST_FRONT = 1024
"""Most bytes of a message before its data that are remembered. Clients send the same again and again."""
_MOST_FORMS = 256
_MOST_TEXT = 1 << 18
"""Most characters of the texts in the parameters of a request, of which each may take six bytes in JSON."""
_MOST_AT_ONCE = 1 << 20
"""Most bytes of an answer with tensors that is put together at once."""
_REGION = "shared_memory_region"
"""Parameter of an input or output that is not in the message."""
_TENSORS = ValueKind.TENSORS

_FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""Member of `contents` with the elements of each datatype. The protocol has none for FP16 and BF16."""
_AS_THEY_ARE = ("BOOL", "FP32", "FP64")
"""Datatypes whose elements lie in a message as they do in the binary form."""
_TYPECODES = {
    "BOOL": "B", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip


def infer_reader(settings: Settings) -> Reader:
    """Make the reader of the messages of ModelInfer and ModelStreamInfer.

    Arguments:
        settings: bounds of inputs and parameters, tiers, and the default model.
    """
    most, tiers = min(MOST_INPUTS, settings.max_queue), len(settings.tier_names)

    forms: dict[int, _Form] = {}

    def read(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        form = forms.get(len(body))
        if form is not None and body[: len(form.front)] == form.front:
            model = form.model or known.default
            served = known[model]
            if form.judged_by(served):
                data = memoryview(body)[len(form.front) :]
                value = packed_in_place(data, form.opening)
                write = _Answerer(model, form.id, (), form.wanted, known).write
                return TensorsRequest(form.id, value, form.wishes, form.text).exchange(model, options, _TENSORS, write)
        asked, raw = opened(body)
        model = asked.model_name or known.default
        check_version(known, model, asked.model_version or None)
        options, served = with_version(options, asked.model_version), known[model]
        wanted = _wanted(asked.outputs, served) if asked.outputs else ()
        wishes, text = parameters.NONE, b""
        if asked.parameters:
            given = _parameters_of(asked.parameters, settings.max_parameters)
            wishes, rest = parameters.read_wishes(given, tiers), parameters.for_target(given)
            text = msgspec.json.encode(rest) if rest else b""
        takes = served.takes
        request: InferRequest | TensorsRequest
        if takes is _TENSORS:
            request = _tensors_of(asked, raw, served, settings.max_body_bytes, wishes, text)
        else:
            try:
                request = InferRequest(asked.id, *_input_of(asked, raw, most), wishes, text)
            except NoElements:
                if takes is not None:
                    raise
                # It may be what the model takes, of which nothing is known yet.
                request = _tensors_of(asked, raw, served, settings.max_body_bytes, wishes, text)
        if takes is _TENSORS and isinstance(request, TensorsRequest) and len(raw) == 1 and not asked.model_version:
            form = _form_of(body, asked.model_name, request, wanted, served)
            if form is not None:
                if len(forms) >= _MOST_FORMS:
                    forms.clear()
                forms[len(body)] = form
        write = _Answerer(model, asked.id, request.shape, wanted, known).write
        return request.exchange(model, options, takes, write)

    def read_in_steps(body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
        decoded = len(message_parts.split(body)[0])  # The value may be made in place of the message.
        exchange = read(body, options, known)
        yield _charged_for(decoded, exchange.input)
        return exchange

    return Reader(read, read_in_steps)


def _charged_for(decoded: int, input: Value | list[Value]) -> int:
    """Bytes of JSON that take as long as what was read one by one: integers among the bytes that were decoded, and elements of BYTES."""
    if not isinstance(input, Tensors):
        return 0
    heads = header_of(input).heads
    integers = sum(count_of(head.shape) for head in heads if "INT" in head.datatype)
    return min(integers, decoded) + 3 * sum(count_of(head.shape) for head in heads if head.datatype == BYTES)


class _Answerer(msgspec.Struct, frozen=True, gc=False):
    """Writer of the answer to one request, which keeps nothing of its inputs.

    Attributes:
        model: name of the model.
        id: id that the client gave the request; empty for none.
        shape: shape of the output, where it is none of tensors.
        wanted: outputs that it asks for; none: all.
        known: the models.
    """

    model: str
    id: str
    shape: tuple[int, ...]
    wanted: tuple[WantedOutput, ...]
    known: KnownModels

    def write(self, outcome: Outcome) -> Written:
        """Write the answer."""
        outputs, used = outcome.outputs, added_up(outcome.tokens)
        first = outputs[0]
        if isinstance(first, Tensors) and are_tensors(outputs):
            if len(outputs) == 1 and used is None and not self.id:
                content = first.content
                known = _often_answer(self.model, outcome.version, self.wanted, opening_of(content))
                if known is not None and known.length == len(content):
                    return b"", b"".join([part for front, place in known.parts for part in (front, content[place])])
            return b"", _with_tensors(self._begun(outcome.version, used), told(outputs, self.wanted, binary=True))
        answer, gives = self._begun(outcome.version, used), self.known[self.model].gives
        answer.outputs.add(name=OUTPUT, datatype=BYTES, shape=self.shape)
        head = answer.SerializeToString()
        if len(outputs) > 1 or len(first) > PIECE:
            return b"", _pieces(head, (tensors.element_of(one, gives) for one in released(outputs)))
        one = tensors.element_of(first, gives)
        return b"", b"".join((head, _CONTENT, messages.varint(tensors.packed_size((one,))), tensors.head_of(one), one))

    def _begun(self, version: str, used: TokenCount | None) -> Any:
        """Message of the answer without its outputs."""
        answer = _RESPONSE(model_name=self.model, model_version=version, id=self.id)
        if used is not None:
            answer.parameters[parameters.TOKENS].int64_param = used.used
        return answer


class _Form(NamedTuple):
    """Form of a request with one tensor: all of its message but the data, at its end.

    Attributes:
        front: the message before the data.
        model: name that it has for the model; may be empty.
        id, wishes, text: see TensorsRequest.
        wanted: outputs that it asks for.
        opening: bytes of the packed value before the data.
        inputs, outputs, settings: what the model took and gave when it was judged, and its settings.
    """

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

    def judged_by(self, served: ServedModel) -> bool:
        """Whether the model is as it was."""
        as_it_was = served.inputs is self.inputs and served.outputs is self.outputs and served.settings is self.settings
        return as_it_was and served.takes is _TENSORS


def _form_of(
    body: bytes, model: str, request: TensorsRequest, wanted: tuple[WantedOutput, ...], served: ServedModel
) -> _Form | None:
    """Form of a message that was read; None where it is long, or its data do not end it as they are packed."""
    opening = opening_of(request.value.content)
    [head] = header_of(request.value).heads
    if not opening or head.datatype == BYTES:
        return None
    try:
        rest, [data] = message_parts.split(body)
    except BadRequest:  # It was short enough to be decoded whole.
        return None
    front = rest + bytes((message_parts.RAW,)) + messages.varint(len(data))
    if len(front) > _LONGEST_FRONT or len(front) + len(data) != len(body) or body[: len(front)] != front:
        return None
    judged_by = served.inputs, served.outputs, served.settings
    return _Form(front, model, request.id or "", request.wishes, request.parameters, wanted, opening, *judged_by)


class _KnownAnswer(NamedTuple):
    """Form of an answer: bytes before the data of each tensor, where those lie in the value of the output, and its length."""

    parts: Sequence[tuple[bytes, slice]]
    length: int


def _answer_form(model: str, version: str, wanted: tuple[WantedOutput, ...], opening: bytes) -> _KnownAnswer | None:
    """Form of answers with one output that begins so; None where it is made another way. Raises RequestError."""
    form = form_of_output(opening, wanted, binary=True, most=PIECE)
    if form is None:
        return None
    answer, parts = _RESPONSE(model_name=model, model_version=version), []
    for one in form.tensors:
        answer.outputs.add(name=one.head.name, datatype=one.head.datatype, shape=one.head.shape)
    head = answer.SerializeToString()
    for one, place in zip(form.tensors, form.places, strict=True):
        parts.append((head + _CONTENT + messages.varint(one.size), place))
        head = b""
    return _KnownAnswer(parts, form.length)


_often_answer = lru_cache(maxsize=256)(_answer_form)


def _pieces(answer: bytes, outputs: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces of the message of an answer, of which `answer` is all but the content of its tensor."""
    packed: list[bytes] = []
    for one in outputs:
        packed.append(one)
        yield b""
    yield answer
    yield _CONTENT + messages.varint(tensors.packed_size(packed))
    yield from packed_pieces(packed)


def _with_tensors(answer: Any, found: Sequence[OutputTensor]) -> bytes | Iterator[bytes]:
    """Message of an answer with these tensors, or pieces of it where it is large; `answer` has none yet."""
    for one in found:
        answer.outputs.add(name=one.head.name, datatype=one.head.datatype, shape=one.head.shape)
    parts: list[Data] = [answer.SerializeToString()]
    for one in found:
        parts += (_CONTENT + messages.varint(one.size), *one.parts)
    if sum(map(len, parts)) <= _MOST_AT_ONCE:
        return b"".join(parts)
    return (piece for part in parts for piece in cut(part))


def front_of(body: bytes) -> Any:
    """Return the message of a request without its inputs, however long these are. Raises BadRequest."""
    return messages.read(_REQUEST, message_parts.front_of(body))


def opened(body: bytes) -> tuple[Any, Sequence[Data]]:
    """Return the message of a request, and its raw contents, which that of a large one is without.

    Raises:
        BadRequest: the bytes are no such message, or one that takes long to decode.
    """
    if len(body) <= SHORT:
        asked = messages.read(_REQUEST, body)
        return asked, asked.raw_input_contents
    rest, raw = message_parts.split(body)
    return messages.read(_REQUEST, rest), raw


def _input_of(asked: Any, raw: Sequence[Data], most: int) -> tuple[tuple[int, ...], list[tensors.Element]]:
    """Shape and elements of the only input of a request. Raises BadRequest."""
    if len(asked.inputs) != 1:
        raise tensors.wrong_number(len(asked.inputs))
    tensor = asked.inputs[0]
    if _REGION in tensor.parameters:
        raise _no_shared_memory()
    shape = _shape_of(tensor)
    count = tensors.count_elements(tensor.name, tensor.datatype, shape, most)
    if raw:
        if tensor.HasField("contents"):
            raise BadRequest("the input has both `contents` and `raw_input_contents`; expected one of them")
        if len(raw) != 1:
            raise BadRequest(f"`raw_input_contents` has {len(raw)} members for one input; expected one")
        return shape, [*tensors.unpack(tensor.name, raw[0], count)]
    contents = tensor.contents
    for field, _ in contents.ListFields():
        if field.name != "bytes_contents":
            raise BadRequest(f"the input has `{field.name}`; expected `bytes_contents`, as its datatype is {BYTES}")
    found = contents.bytes_contents
    if len(found) != count:
        raise BadRequest(f"`bytes_contents` has {len(found)} elements, and the shape says {count}")
    return shape, list(found)


def _tensors_of(
    asked: Any, raw: Sequence[Data], served: ServedModel, most: int, wishes: Wishes, text: bytes
) -> TensorsRequest:
    """Request for a model that takes tensors, or of which that is not known.

    Arguments:
        asked: message of the request.
        raw: its raw contents.
        served: the model.
        most: most bytes of the data of all inputs.
        wishes: wishes among its parameters.
        text: text of the parameters for the target.

    Raises:
        RequestError: the inputs are not those that the model takes, or too large.
    """
    inputs = asked.inputs
    if len(inputs) > MOST_TENSORS:
        raise BadRequest(f"the request has {len(inputs)} inputs; expected 1 to {MOST_TENSORS}")
    if any(_REGION in one.parameters for one in inputs):
        raise _no_shared_memory()
    given = [TensorHead(one.name, one.datatype, _shape_of(one)) for one in inputs]
    heads = checked_heads(given, served.inputs, served.settings.max_batch_size)
    data = data_of(inputs, raw, heads, most)
    value = value_of(heads, data) if raw else pack([Tensor(*pair) for pair in zip(heads, data, strict=True)])
    return TensorsRequest(asked.id, value, wishes, text)


def _shape_of(tensor: Any) -> tuple[int, ...]:
    """Shape of an input. Raises BadRequest."""
    if len(tensor.shape) > MOST_AXES:
        raise BadRequest(f"the input {quoted(tensor.name)} has {len(tensor.shape)} axes; at most {MOST_AXES} are taken")
    return tuple(tensor.shape)


def _wanted(outputs: Sequence[Any], served: ServedModel) -> tuple[WantedOutput, ...]:
    """Outputs that a request asks for. Raises BadRequest."""
    if len(outputs) > MOST_TENSORS:
        raise BadRequest(f"the request asks for {len(outputs)} outputs; at most {MOST_TENSORS} are told")
    for one in outputs:
        if _REGION in one.parameters:
            raise _no_shared_memory()
        if "classification" in one.parameters:
            raise BadRequest("classification is not served here; leave the parameter out")
    names = [one.name for one in outputs]
    if served.gives in (None, _TENSORS):
        check_names(names, names_of(served.outputs))
    else:
        tensors.check_outputs(names)
    return tuple(WantedOutput(name, True) for name in names)


def _no_shared_memory() -> BadRequest:
    return BadRequest("shared memory is not served here; send the data of the input in the message")


def _parameters_of(given: Any, most: int) -> dict[str, Any]:
    """Parameters of a request as Python values. Raises BadRequest."""
    if len(given) > most:
        raise BadRequest(f"`parameters` has {len(given)} members; at most {most} are taken")
    found: dict[str, Any] = {}
    for name, one in given.items():
        kind = one.WhichOneof("parameter_choice")
        value = getattr(one, kind) if kind is not None else None
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRequest(f"the parameter `{excerpt(name)}` is no finite number")
        found[name] = value
    if (size := sum(len(value) for value in found.values() if isinstance(value, str))) > _MOST_TEXT:
        raise BadRequest(f"the texts in `parameters` have {size} characters; at most {_MOST_TEXT} are taken")
    return found


def data_of(inputs: Sequence[Any], raw: Sequence[Data], heads: Sequence[TensorHead], most: int) -> list[Data]:
    """Data of each input in the binary form.

    Arguments:
        inputs: inputs of the message.
        raw: its `raw_input_contents`.
        heads: heads of the inputs, which are checked.
        most: most bytes of the data of all inputs together. Raw data were bounded with their message.

    Raises:
        BadRequest: an input has no data, data in both forms, or other data than its datatype and shape say. Of raw data the
            size is not looked at.
        PayloadTooLarge: typed data would have more bytes than `most`.
    """
    if raw:
        return _raw(inputs, raw)
    size = sum(SIZES[head.datatype] * count_of(head.shape) for head in heads)
    if size > most:
        raise PayloadTooLarge(f"the data of the inputs take {size} bytes; at most {most} are taken (max_body_bytes)")
    integers = sum(count_of(head.shape) for head in heads if "INT" in head.datatype)
    if integers > _MOST_INTEGERS:
        raise BadRequest(
            f"`contents` have {integers} integers; at most {_MOST_INTEGERS} are taken: send the data in `raw_input_contents`"
        )
    return [_typed(one, head) for one, head in zip(inputs, heads, strict=True)]


def _raw(inputs: Sequence[Any], raw: Sequence[Data]) -> list[Data]:
    if len(raw) != len(inputs):
        raise BadRequest(
            f"`raw_input_contents` has {len(raw)} members, and the request has {len(inputs)} inputs; expected one for each input"
        )
    for one in inputs:
        if one.HasField("contents"):
            raise BadRequest(
                f"the input {quoted(one.name)} has `contents`, and the request has `raw_input_contents`; expected one of these forms "
                "for all inputs"
            )
    return list(raw)


def _typed(given: Any, head: TensorHead) -> Data:
    """Data of an input with `contents`. Raises BadRequest."""
    name, datatype, contents = quoted(given.name), head.datatype, given.contents
    member = _FIELDS.get(datatype)
    if member is None:
        raise BadRequest(
            f"the input {name} is {datatype}, for which the protocol has no `contents`; send its data in `raw_input_contents`"
        )
    for field, _ in contents.ListFields():
        if field.name != member:
            raise BadRequest(f"the input {name} has `{field.name}`; expected `{member}`, as its datatype is {datatype}")
    found, count = getattr(contents, member), count_of(head.shape)
    if len(found) != count:
        raise BadRequest(
            f"`{member}` of the input {name} has {len(found)} elements; {datatype} of shape {shown_shape(head.shape)} takes {count}"
        )
    if datatype == BYTES:
        return join_elements(found)
    if datatype in _AS_THEY_ARE and count:
        contents.DiscardUnknownFields()  # They may be written first.
        size = SIZES[datatype] * count
        return memoryview(contents.SerializeToString())[-size:]
    return _numbers(found, name, datatype)


def _numbers(found: Any, name: str, datatype: str) -> bytes:
    """Data of numbers, a page of which is looked at at a time: so it takes half as long as one by one. Raises BadRequest."""
    code, pages = _TYPECODES[datatype], list[bytes]()
    for begin in range(0, len(found), PAGE):
        page = found[begin : begin + PAGE]
        try:
            pages.append(struct.pack(f"<{len(page)}{code}", *page))
        except struct.error:
            bits = 8 * SIZES[datatype]
            least, most = (0, (1 << bits) - 1) if datatype[0] == "U" else (-(1 << bits - 1), (1 << bits - 1) - 1)
            place, wrong = next((at, one) for at, one in enumerate(page, begin) if not least <= one <= most)
            raise BadRequest(
                f"element {place} of the input {name} is {wrong}, which is out of the range of {datatype}"
            ) from None
    return b"".join(pages)

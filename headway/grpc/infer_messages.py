"""Messages of ModelInfer and ModelStreamInfer: requests to exchanges, and outcomes to answers.

An input comes in `contents` or in `raw_input_contents`; an output leaves in `raw_output_contents`. A model that takes texts, JSON
values or octets has one input, of whose elements each becomes an entry. A model that takes tensors may have several, and all of them
are one entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from headway.config import Settings
from headway.core.excerpt import excerpt
from headway.core.tensors import MOST_TENSORS, TensorHead
from headway.errors import BadRequest
from headway.gateway.fan_out import MOST_INPUTS
from headway.gateway.served_model import ServedModel
from headway.gateway.served_models import KnownModels
from headway.grpc import messages
from headway.grpc.tensor_contents import Data, data_of
from headway.http.inference.answer_pieces import PIECE, cut, packed_pieces, released
from headway.http.inference.bodies import value_checker
from headway.http.inference.exchange import Exchange, Outcome, ReadRequest, Written
from headway.http.oip.infer import check_version, with_version
from headway.http.oip.requests import InferRequest
from headway.http.oip.tensor_requests import TensorsRequest
from headway.model import RequestOptions, Tensors, ValueKind, added_up
from headway.oip import elements, parameters, tensors
from headway.oip.inputs import checked_heads, value_of
from headway.oip.outputs import OutputTensor, WantedOutput, are_tensors, check_names, names_of, told
from headway.oip.parameters import Wishes
from headway.oip.tensors import BYTES, OUTPUT, NoElements

_REQUEST = messages.message("inference.ModelInferRequest")
_RESPONSE = messages.message("inference.ModelInferResponse")
_CONTENT = bytes((_RESPONSE.DESCRIPTOR.fields_by_name["raw_output_contents"].number << 3 | 2,))
"""Byte before the length of the content of a tensor in an answer."""
_RAW = _REQUEST.DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | 2
"""Byte before the length of the content of a tensor in a request."""
_LARGE = 1 << 14
"""Bytes of a request from which its raw contents are not copied out of it."""
_MOST_MEMBERS = 4 * MOST_TENSORS
"""Most members of such a request that are looked for."""
_MOST_AT_ONCE = 1 << 20
"""Most bytes of an answer with tensors that is put together at once."""
_REGION = "shared_memory_region"
"""Parameter of an input or output that is not in the message."""
_TENSORS = ValueKind.TENSORS


def infer_reader(settings: Settings) -> ReadRequest:
    """Make the reader of the messages of ModelInfer and ModelStreamInfer.

    Arguments:
        settings: bounds of inputs and parameters, tiers, and the default model.
    """
    most, tiers, check = min(MOST_INPUTS, settings.max_queue), len(settings.tier_names), value_checker(settings)

    def read(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        if len(body) < _LARGE:
            asked = messages.read(_REQUEST, body)
            raw: Sequence[Data] = asked.raw_input_contents
        else:
            asked, raw = _read_large(body)
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
        id, shape = asked.id, request.shape
        del asked, raw  # The answer's writer keeps nothing of the inputs.

        def write(outcome: Outcome) -> Written:
            answer, outputs = _RESPONSE(model_name=model, model_version=outcome.version, id=id), outcome.outputs
            if (used := added_up(outcome.tokens)) is not None:
                answer.parameters[parameters.TOKENS].int64_param = used.used
            if isinstance(outputs[0], Tensors) and are_tensors(outputs):
                return b"", _with_tensors(answer, told(outputs, wanted, binary=True))
            gives = known[model].gives
            answer.outputs.add(name=OUTPUT, datatype=BYTES, shape=shape)
            head = answer.SerializeToString()
            if len(outputs) > 1 or len(outputs[0]) > PIECE:
                return b"", _pieces(head, (elements.element_of(one, gives) for one in released(outputs)))
            one = elements.element_of(outputs[0], gives)
            return b"", b"".join(
                (head, _CONTENT, messages.varint(tensors.packed_size((one,))), tensors.head_of(one), one)
            )

        return request.exchange(model, options, takes, check, write)

    return read


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


def _read_large(body: bytes) -> tuple[Any, Sequence[Data]]:
    """Message of a request, and its raw contents, which the message may be without.

    Raises:
        BadRequest: the bytes are no such message.
    """
    found = _without_raw(body)
    if found is None:
        asked = messages.read(_REQUEST, body)
        return asked, asked.raw_input_contents
    rest, raw = found
    return messages.read(_REQUEST, rest), raw


def _without_raw(body: bytes) -> tuple[bytes, list[Data]] | None:
    """Bytes of a message without its raw contents, and views of these.

    None: what a decoder does with it is not to be told here, as it has very many members or others than a request has.
    """
    whole, at, end = memoryview(body), 0, len(body)
    rest: list[Data] = []
    raw: list[Data] = []
    for _ in range(_MOST_MEMBERS):
        if at == end:
            return b"".join(rest), raw
        begin, tag, at = at, body[at], at + 1
        if tag & 7 != 2 or tag > 0x7F:
            return None
        size = shift = 0
        while True:
            if at == end or shift > 28:
                return None
            byte = body[at]
            size |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
        if size > end - at:
            return None
        if tag == _RAW:
            raw.append(whole[at : at + size])
        else:
            rest.append(whole[begin : at + size])
        at += size
    return None


def _input_of(asked: Any, raw: Sequence[Data], most: int) -> tuple[tuple[int, ...], list[elements.Element]]:
    """Shape and elements of the only input of a request. Raises BadRequest."""
    if len(asked.inputs) != 1:
        raise tensors.wrong_number(len(asked.inputs))
    tensor = asked.inputs[0]
    if _REGION in tensor.parameters:
        raise _no_shared_memory()
    shape = tuple(tensor.shape)
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
    given = [TensorHead(one.name, one.datatype, tuple(one.shape)) for one in inputs]
    heads = checked_heads(given, served.inputs, served.settings.max_batch_size)
    value = value_of(heads, data_of(inputs, raw, heads, most))
    return TensorsRequest(asked.id, value, wishes, text)


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
    return found

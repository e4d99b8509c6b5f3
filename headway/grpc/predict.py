"""Headway's own service: `headway.v1.Inference/Predict`, one input and one output.

    the model takes or gives    the input, or the output
    texts                       the text, in UTF-8
    octets                      the octets; a model may give them as a text in base64
    tensors                     JSON text: nested arrays of one row or several, or an object of such arrays by name

An output that is a JSON value is sent as its JSON text.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from functools import partial

from headway.core import tensor_json, values
from headway.core.failures import no_json
from headway.core.json_pages import SHORT, Steps, finish
from headway.core.tensors import NoTensors
from headway.doors.answer_pieces import is_large
from headway.doors.bodies import read_text, to_tensors_in_steps
from headway.doors.exchange import Exchange, Outcome, Reader, Written
from headway.errors import BadRequest
from headway.gateway.served_models import KnownModels
from headway.grpc import messages
from headway.model import Octets, RequestOptions, Tensors, Value, ValueKind, added_up

_REQUEST = messages.message("headway.v1.PredictRequest")
_RESPONSE = messages.message("headway.v1.PredictResponse")
_OUTPUT = bytes((_RESPONSE.DESCRIPTOR.fields_by_name["output"].number << 3 | 2,))
"""Tag before the length of the output in an answer."""
_TENSORS = ValueKind.TENSORS


def _read(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
    request = messages.read(_REQUEST, body)
    model = request.model_id or known.default
    takes = known[model].takes
    input: Value | list[Value]
    if takes is _TENSORS:
        input = finish(_tensors(known, model, request.input_data))
    else:
        input = Octets(request.input_data) if takes is ValueKind.BYTES else read_text(request.input_data)
    return Exchange(model, input, b"", options, partial(_write, known, model))


def _read_in_steps(body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
    request = messages.read(_REQUEST, body)
    model = request.model_id or known.default
    takes = known[model].takes
    input: Value | list[Value]
    if takes is _TENSORS:
        input = yield from _tensors(known, model, request.input_data)
    else:
        input = Octets(request.input_data) if takes is ValueKind.BYTES else read_text(request.input_data)
    return Exchange(model, input, b"", options, partial(_write, known, model))


PREDICT_READER = Reader(_read, _read_in_steps)


def _tensors(known: KnownModels, model: str, text: bytes) -> Steps[Value | list[Value]]:
    try:
        value = values.read(text) if len(text) <= SHORT else (yield from values.read_in_steps(text))
    except values.NoValue as exc:
        raise BadRequest(f"the input {exc}") from None
    except (ValueError, RecursionError) as exc:
        raise BadRequest(
            f"the input is not JSON text: {exc}; the model takes tensors, as nested arrays in JSON, and ModelInfer of the Open Inference "
            "Protocol takes them as they are"
        ) from None
    return (yield from to_tensors_in_steps(known, model, value))


def _write(known: KnownModels, model: str, outcome: Outcome) -> Written:
    [output] = outcome.outputs
    answer = _RESPONSE(request_id=outcome.id, latency_ms=outcome.milliseconds)
    if (used := added_up(outcome.tokens)) is not None:
        answer.tokens_used = used.used
    if isinstance(output, str):
        answer.output = b64decode(output) if known[model].gives is ValueKind.BYTES else output.encode()
    elif isinstance(output, Tensors):
        pieces = _with_tensors(answer.SerializeToString(), output)
        return b"", pieces if is_large(output) else b"".join(pieces)
    else:
        answer.output = output.content if isinstance(output, Octets) else output
    return b"", answer.SerializeToString()


def _with_tensors(answer: bytes, output: Tensors) -> Iterator[bytes]:
    """Yield an answer in pieces, given the answer without its output, and the output. Raises RequestError."""
    text: list[bytes] = []
    try:
        for piece in tensor_json.pieces(output):
            text.append(piece)
            yield b""
    except NoTensors as exc:
        raise no_json(exc, ", by ModelInfer of the Open Inference Protocol") from None
    yield answer + _OUTPUT + messages.varint(sum(map(len, text)))
    yield from text

"""Headway's own service: `headway.v1.Inference/Predict`, one input and one output."""

from __future__ import annotations

from base64 import b64decode

from headway.config import Settings
from headway.core import values
from headway.gateway.served_models import KnownModels
from headway.grpc import messages
from headway.http.inference.bodies import text_reader
from headway.http.inference.exchange import Exchange, Outcome, ReadRequest, Written
from headway.model import Octets, RequestOptions, Value, ValueKind, added_up

_REQUEST = messages.message("headway.v1.PredictRequest")
_RESPONSE = messages.message("headway.v1.PredictResponse")


def predict_reader(settings: Settings) -> ReadRequest:
    """Make the reader of the method's messages.

    Arguments:
        settings: bounds of inputs, and the default model.
    """
    text = text_reader(settings)

    def read(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        asked = messages.read(_REQUEST, body)
        model = asked.model_id or known.default
        octets = known[model].takes is ValueKind.BYTES
        input: Value = Octets(asked.input_data) if octets else text(asked.input_data)

        def write(outcome: Outcome) -> Written:
            output = octets_of(outcome.outputs[0], known[model].gives is ValueKind.BYTES)
            answer = _RESPONSE(request_id=outcome.id, output=output, latency_ms=outcome.milliseconds)
            if (used := added_up(outcome.tokens)) is not None:
                answer.tokens_used = used.used
            return b"", answer.SerializeToString()

        return Exchange(model, input, b"", options, write)

    return read


def octets_of(output: Value, encoded: bool) -> bytes:
    """Output as octets: those that it stands for where the model gives octets, else its text or its JSON text.

    Raises:
        UnicodeEncodeError: the output holds a lone surrogate.
    """
    if isinstance(output, Octets):
        return output.content
    if isinstance(output, str):
        return b64decode(output) if encoded else output.encode()
    return values.as_json(output)

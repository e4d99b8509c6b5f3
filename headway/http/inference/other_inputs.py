"""Inputs that are not one text in JSON: other values, several inputs, and octets. The fast path leaves them to this."""

from __future__ import annotations

from base64 import b64encode

from headway.core.values import name_of
from headway.errors import BadRequest
from headway.gateway.model_kinds import ModelKinds
from headway.http.inference.bodies import Asked, OtherInput
from headway.http.inference.codecs import Codec
from headway.model import ValueKind


def read_other(codec: Codec, body: bytes, wrong: OtherInput, kinds: ModelKinds, model: str) -> Asked:
    """Read a body that is no request with one text.

    Arguments:
        codec: codec of its route.
        body: the body.
        wrong: error of the body if its model takes texts only.
        kinds: what the models take.
        model: model that is meant where the body names none.

    Raises:
        RequestError: it is wrong for any model, or for this one.
    """
    asked = codec.read_value(body)
    named, input, _ = asked
    takes = kinds.takes(named or model)
    if takes is ValueKind.TEXT:
        if not isinstance(input, list):
            raise wrong
        for position, value in enumerate(input):
            if not isinstance(value, str):
                raise BadRequest(f"Expected `str`, got `{name_of(value)}` - at `$.inputs[{position}]`")
    elif takes is ValueKind.BYTES and isinstance(input, list):
        for position, value in enumerate(input):
            if (failure := kinds.check(named or model, value)) is not None:
                raise BadRequest(f"{failure.message} - at `$.inputs[{position}]`")
    return asked


def read_octets(codec: Codec, body: bytes, kinds: ModelKinds, model: str) -> str:
    """Input in a body that is the input itself: text, or octets for a model that takes them. Raises RequestError."""
    return b64encode(body).decode() if kinds.takes(model) is ValueKind.BYTES else codec.text(body)

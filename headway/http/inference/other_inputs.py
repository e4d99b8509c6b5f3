"""Inputs of native routes that are not one text: other values, and several inputs. The fast path leaves them to this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.values import name_of
from headway.errors import BadRequest
from headway.http.inference.bodies import OtherInput
from headway.http.inference.exchange import CodecContext, Exchange
from headway.model import RequestOptions, ValueKind

if TYPE_CHECKING:
    from headway.http.inference.codecs import Codec


def read_other(
    codec: Codec, body: bytes, wrong: OtherInput, options: RequestOptions, context: CodecContext
) -> Exchange:
    """Read a body that is no request with one text.

    Arguments:
        codec: codec of its route.
        body: the body.
        wrong: error of the body if its model takes texts only.
        options: options of the request.
        context: what the models take.

    Raises:
        RequestError: it is wrong for any model, or for this one.
    """
    named, input, parameters = codec.read_value(body)
    kinds = context.kinds
    model = named or kinds.default
    takes = kinds.takes(model)
    if takes is ValueKind.TEXT:
        if not isinstance(input, list):
            raise wrong
        for position, value in enumerate(input):
            if not isinstance(value, str):
                raise BadRequest(f"Expected `str`, got `{name_of(value)}` - at `$.inputs[{position}]`")
    elif takes is ValueKind.BYTES and isinstance(input, list):
        for position, value in enumerate(input):
            if (failure := kinds.check(model, value)) is not None:
                raise BadRequest(f"{failure.message} - at `$.inputs[{position}]`")
    write = codec.write_all if isinstance(input, list) else codec.write_one
    return Exchange(named, input, parameters, options, write)

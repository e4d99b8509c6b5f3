"""Requests of native routes that ask more than one text of any version: other values, several inputs, a version.

The fast path leaves them to this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

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
    named, input, parameters, version = codec.read_value(body)
    if version:
        options = replace(options, version=version)
    known = context.known
    model = named or known.default
    takes = known[model].takes
    if takes is ValueKind.TEXT:
        if not isinstance(input, list | str):
            raise wrong
        for position, value in enumerate(input if isinstance(input, list) else ()):
            if not isinstance(value, str):
                raise BadRequest(f"Expected `str`, got `{name_of(value)}` - at `$.inputs[{position}]`")
    elif takes is ValueKind.BYTES and isinstance(input, list):
        for position, value in enumerate(input):
            if (failure := known.check(model, value)) is not None:
                raise BadRequest(f"{failure.message} - at `$.inputs[{position}]`")
    write = codec.write_all if isinstance(input, list) else codec.write_one
    return Exchange(named, input, parameters, options, write)

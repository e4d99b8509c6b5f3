"""The inference routes, `/v2/models/{model}/infer`, also with a version, and `/v2/infer` of the default model: their codec."""

from __future__ import annotations

import re

from msgspec.structs import replace

from headway.config import Settings
from headway.core.failures import error_of
from headway.core.json_pages import Steps
from headway.doors.exchange import CodecContext, Exchange, Reader
from headway.doors.fields import shorten
from headway.errors import BadRequest
from headway.gateway.served_models import KnownModels
from headway.http.inference.codecs import Codec
from headway.http.inference.target import RequestTarget
from headway.http.server.head import Head
from headway.model import RequestOptions
from headway.oip.rest.answers import Answerer, encode_error
from headway.oip.rest.bodies import LENGTH_FIELD
from headway.oip.rest.requests import long_request_reader, request_reader
from headway.oip.rest.tensor_requests import TensorsRequest

_LENGTH = re.compile(rb"[0-9]{1,19}")


def infer(settings: Settings) -> Codec:
    """Make the codec of the inference routes."""
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
                # The gateway refuses it for its model, before it reads on.
                return Exchange(model, "", b"", options, Answerer(model).write)
            answerer = Answerer(model, asked.shape, asked.wishes.binary, served.gives, asked.id, asked.wanted)
            return asked.exchange(model, options, served.takes, answerer.write)

        def read_default(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
            nonlocal model
            model = known.default  # It may be another than at the request before.
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
    """Options of a request that names a version, or none."""
    return replace(options, version=version) if version else options


def check_version(known: KnownModels, model: str, version: str | None) -> None:
    """Check that a version of a model is one that is served; None: any. A model that is not known is not looked at.

    Raises:
        RequestError: it is not, or that is not known now.
    """
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

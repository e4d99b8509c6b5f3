"""Heads of OpenAI's requests: options by the fields that its clients send, and no tasks."""

from __future__ import annotations

import re

import msgspec

from headway.errors import BadRequest
from headway.gateway.served_models import KnownModels
from headway.http.inference.codecs import Codec
from headway.http.inference.exchange import CodecContext, Exchange, OpenHead, ReadRequest, RequestTarget
from headway.http.openai.errors import encode_error
from headway.http.rate_limit_headers import RateLimitHeaders
from headway.http.server.head import Head
from headway.model import RequestOptions

_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_RETRIES = re.compile(rb"0*[1-9][0-9]*")


def openai_codec(read: ReadRequest) -> Codec:
    """Make the codec of one route."""
    return Codec(open=_opener(read), encode_error=encode_error, limit_lines=RateLimitHeaders.lines_and_counts)


def _opener(read: ReadRequest) -> OpenHead:
    def open_head(
        head: Head, target: RequestTarget, options: RequestOptions, context: CodecContext
    ) -> tuple[RequestOptions, ReadRequest]:
        target.refuse_named("name the model in the body, and ask /v1/inference for a version")
        if options.task:
            raise BadRequest(
                "Prefer is respond-async, and this API has no answer for it; ask /v1/inference for a task, or leave it out"
            )
        fields = dict(head.fields)
        options = _shortened(options, fields.get(b"x-stainless-read-timeout", b""))
        if not _RETRIES.fullmatch(fields.get(b"x-stainless-retry-count", b"")):
            return options, read

        def count(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
            context.counters.client_retries += 1
            return read(body, options, known)

        return options, count

    return open_head


def _shortened(options: RequestOptions, value: bytes) -> RequestOptions:
    """Options whose deadline is not behind the one at which the client gives up, by its own header field in seconds."""
    seconds = float(value) if _SECONDS.fullmatch(value) else 0.0
    return msgspec.structs.replace(options, timeout=seconds) if 0.0 < seconds < options.timeout else options

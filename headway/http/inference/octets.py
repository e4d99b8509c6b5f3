"""Bodies that are the input itself: `application/octet-stream`, with the model in the query."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from urllib.parse import parse_qs

from headway.errors import BadRequest
from headway.http.inference.exchange import CodecContext, Exchange, OpenHead, ReadExchange, RequestTarget, WriteOutputs
from headway.http.server.head import Head
from headway.model import RequestOptions, Value, ValueKind


def open_octets(text: Callable[[bytes], str], write: WriteOutputs) -> OpenHead:
    """Make what opens the heads of a route that also takes octets.

    Arguments:
        text: body to the input, where the model takes no octets.
        write: writer of the answer.
    """

    def open_head(
        head: Head, target: RequestTarget, options: RequestOptions, context: CodecContext
    ) -> ReadExchange | None:
        kind = head.single.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
        if kind != b"application/octet-stream":
            return None
        model = _model(target.query)

        def read(body: bytes) -> Exchange:
            octets = context.kinds.takes(model) is ValueKind.BYTES
            input: Value = b64encode(body).decode() if octets else text(body)
            return Exchange(model, input, b"", options, write)

        return read

    return open_head


def _model(query: bytes) -> str:
    try:
        named = parse_qs(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100)
    except ValueError:
        raise BadRequest("the query is malformed; expected ?model_id=NAME") from None
    values = named.get("model_id", [])
    if len(values) != 1 or not values[0]:
        raise BadRequest("the query must name one model, ?model_id=NAME, as the body is application/octet-stream")
    return values[0]

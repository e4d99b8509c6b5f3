"""Raw octets: bodies that are the input itself, with the model in the query, and answers that are the output itself.

The answer is the output itself if `Accept` asks for octets, or if body and output are octets and `Accept` doesn't ask for JSON.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import parse_qs

from msgspec.structs import replace

from headway.core import values
from headway.core.json_pages import Steps
from headway.doors.answer_pieces import PIECE, as_octets, cut, octets_of_tensors
from headway.doors.exchange import (
    CodecContext,
    Exchange,
    Outcome,
    Reader,
    ReadInSteps,
    ReadRequest,
    WriteAnswer,
    Written,
)
from headway.errors import BadRequest
from headway.gateway.served_models import KnownModels
from headway.http.server.head import Head, OpenHead, RequestTarget, too_many_members
from headway.model import Octets, RequestOptions, Tensors, Value, ValueKind
from headway.oip.inputs import value_of_raw

OCTETS = b"application/octet-stream"
_CONTENT_TYPE = b"content-type: %b\r\n" % OCTETS
_RANGES = {
    OCTETS: (b"*/*", b"application/*", OCTETS),
    b"application/json": (b"*/*", b"application/*", b"application/json"),
}
"""Media ranges of `Accept` that match a type, from the least to the most specific."""


class Form(enum.Enum):
    """Forms of an answer that a client may ask for."""

    JSON = "json"
    OCTETS = "octets"
    AS_OUTPUT = "as output"
    """Octets if the output is octets, otherwise JSON."""


def read_accept(fields: Sequence[tuple[bytes, bytes]], otherwise: Form) -> Form:
    """Return the form that `Accept` among the header fields prefers; `otherwise` if it has no preference."""
    accept = b",".join(value for name, value in fields if name == b"accept")
    if not accept:
        return otherwise
    ranges: dict[bytes, float] = {}
    for part in accept.lower().split(b","):
        kind, *parameters = (word.strip() for word in part.split(b";"))
        ranges[kind] = next((_quality(word) for word in parameters if word.startswith(b"q=")), 1.0)
    if OCTETS not in ranges and b"application/json" not in ranges:
        return otherwise
    quality = {
        kind: next((ranges[media_range] for media_range in reversed(matching) if media_range in ranges), 0.0)
        for kind, matching in _RANGES.items()
    }
    if quality[OCTETS] == quality[b"application/json"]:
        return otherwise
    return Form.OCTETS if quality[OCTETS] > quality[b"application/json"] else Form.JSON


def _quality(word: bytes) -> float:
    try:
        return float(word[2:])
    except ValueError:
        return 1.0


def octets_of(output: Value) -> bytes:
    """Return an output as octets: a text in UTF-8, another JSON value as JSON, a single tensor of numbers as its data. Raises
    UnicodeEncodeError if a text contains a lone surrogate, and BadRequest for any other tensors."""
    if isinstance(output, Tensors):
        return octets_of_tensors(output)
    return output.encode() if isinstance(output, str) else values.octets(output)


def octet_pieces(output: Value) -> Iterator[bytes]:
    """Yield an output as octets, piece by piece; see `octets_of`."""
    if not isinstance(output, str):
        yield from cut(octets_of(output))
        return
    for begin in range(0, len(output), PIECE):
        yield output[begin : begin + PIECE].encode()


def open_octets(
    text: Callable[[bytes], str], read_json: ReadRequest, read_long: ReadInSteps, write: WriteAnswer
) -> OpenHead:
    """Make `Codec.open` for a route that also takes octets, and answers with them. `text` reads a body of octets for a model that
    takes texts. `read_json`, `read_long` and `write` read and write JSON."""

    def write_octets(outcome: Outcome) -> Written:
        [output] = outcome.outputs
        return _CONTENT_TYPE, octets_of(output) if len(output) <= PIECE else octet_pieces(output)

    def write_as_output(outcome: Outcome) -> Written:
        [output] = outcome.outputs
        if isinstance(output, Tensors):
            return write(outcome) if as_octets(output) is None else write_octets(outcome)
        return write_octets(outcome) if isinstance(output, Octets) else write(outcome)

    def read_any(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        exchange = read_json(body, options, known)
        exchange.write, exchange.usual = write_octets, None
        return exchange

    def read_any_in_steps(body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
        exchange = yield from read_long(body, options, known)
        exchange.write = write_octets
        return exchange

    writers = {Form.JSON: write, Form.OCTETS: write_octets, Form.AS_OUTPUT: write_as_output}

    def open_head(
        head: Head, target: RequestTarget, options: RequestOptions, context: CodecContext
    ) -> tuple[RequestOptions, Reader | None]:
        kind = head.single.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
        if kind != OCTETS:
            target.refuse_named("name it in the body")
            if read_accept(head.fields, Form.JSON) is not Form.OCTETS:
                return options, None
            return options, Reader(read_any, read_any_in_steps)
        model, version = _model_and_version(target.query)
        writer = writers[read_accept(head.fields, Form.AS_OUTPUT)]

        def read(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
            served = known[model]
            input: Value
            if served.takes is ValueKind.TENSORS:
                input = value_of_raw(body, served.inputs, served.settings.max_batch_size, single=True)
            else:
                input = Octets(body) if served.takes is ValueKind.BYTES else text(body)
            return Exchange(model, input, b"", options, writer)

        return replace(options, version=version) if version else options, Reader(read)

    return open_head


def _model_and_version(query: bytes) -> tuple[str, str]:
    """Return the model and the version that a query names; the version may be empty. Raises BadRequest."""
    if (error := too_many_members(query)) is not None:
        raise error
    try:
        members = parse_qs(query.decode("ascii"), keep_blank_values=True, errors="strict")
    except ValueError:
        raise BadRequest("the query is malformed; expected ?model_id=NAME") from None
    models, versions = members.get("model_id", []), members.get("version", [""])
    if len(models) != 1 or not models[0]:
        raise BadRequest("the query must name one model, ?model_id=NAME, as the body is application/octet-stream")
    if len(versions) != 1:
        raise BadRequest("the query names several versions; expected one, or none")
    return models[0], versions[0]

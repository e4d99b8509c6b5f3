"""Codecs of inference routes: the format of an API's requests, answers and errors. The three native ones are in this module.

A codec decodes each body into an exchange (`doors/exchange.py`), and encodes answers and errors. Most native requests are a single text
and are answered with a single JSON object. For these, `read` and `write` are a fast path that doesn't create an exchange.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn
from urllib.parse import parse_qs

import msgspec
from msgspec.structs import replace

from headway.config import Settings
from headway.core import values
from headway.core.json_pages import Steps
from headway.doors.answer_pieces import (
    HOLE,
    PIECE,
    array_within,
    as_octets,
    cut,
    is_large,
    items_of,
    octets_of_tensors,
    tensor_pieces,
    value_within,
)
from headway.doors.bodies import (
    ABSENT,
    OtherInput,
    ParsedBody,
    body_reader,
    long_value_reader,
    read_text,
    to_tensors,
    to_tensors_in_steps,
    value_reader,
)
from headway.doors.entrance import RateLimitHeaders
from headway.doors.exchange import (
    JSON,
    CodecContext,
    Exchange,
    Outcome,
    Reader,
    ReadInSteps,
    ReadRequest,
    ReadText,
    Usual,
    WriteAnswer,
    WriteText,
    Written,
)
from headway.errors import BadRequest
from headway.gateway.client_quotas import UNHELD
from headway.gateway.served_models import KnownModels
from headway.http.problem import EncodeError, encode_problem
from headway.http.server.head import Head, OpenHead, RequestTarget, too_many_members
from headway.model import Limit, Octets, RequestOptions, Tensors, TokenCount, Value, ValueKind, added_up
from headway.oip.model_tensors import value_of_raw

OCTETS = b"application/octet-stream"
_CONTENT_TYPE = b"content-type: %b\r\n" % OCTETS
_RANGES = {  # For each type, the media ranges in `Accept` that match it, from the least to the most specific.
    OCTETS: (b"*/*", b"application/*", OCTETS),
    b"application/json": (b"*/*", b"application/*", b"application/json"),
}


class Form(enum.Enum):
    """The forms of an answer that a client may request."""

    JSON = "json"
    OCTETS = "octets"
    AS_OUTPUT = "as output"  # Octets if the output is octets, otherwise JSON.


def read_accept(fields: Sequence[tuple[bytes, bytes]], otherwise: Form) -> Form:
    """Return the form preferred by the field `Accept`, or `otherwise` if there is no preference."""
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
    """Return an output as octets: text as UTF-8, other JSON values as JSON, a single tensor of numbers as its data. Raises
    UnicodeEncodeError if a text contains a lone surrogate, and BadRequest for other tensors."""
    if isinstance(output, Tensors):
        return octets_of_tensors(output)
    return output.encode() if isinstance(output, str) else values.octets(output)


def octet_pieces(output: Value) -> Iterator[bytes]:
    """Yield an output as octets, in pieces; see `octets_of`."""
    if not isinstance(output, str):
        yield from cut(octets_of(output))
        return
    for begin in range(0, len(output), PIECE):
        yield output[begin : begin + PIECE].encode()


def open_octets(
    text: Callable[[bytes], str], read_json: ReadRequest, read_long: ReadInSteps, write: WriteAnswer
) -> OpenHead:
    """Return the function `Codec.open` of a route that accepts octets as well as JSON, and can answer with either. If the body
    is octets, the query names the model.

    The answer is the output itself if `Accept` asks for octets, or if both body and output are octets and `Accept` doesn't ask for
    JSON. `text` decodes octets for a model that takes text. `read_json` and `read_long` decode JSON bodies, and `write` encodes
    JSON answers."""

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
    """Return the model and the version (or "") named by a query. Raises BadRequest."""
    if (error := too_many_members(query)) is not None:
        raise error
    try:
        members = parse_qs(query.decode("ascii"), keep_blank_values=True, errors="strict")
    except ValueError:
        raise BadRequest("the query is malformed; expected ?model_id=NAME") from None
    models, versions = members.get("model_id", []), members.get("version", [""])
    if len(models) != 1 or not models[0]:
        raise BadRequest("the query must name one model, ?model_id=NAME, because the body is application/octet-stream")
    if len(versions) != 1:
        raise BadRequest("the query names several versions; expected at most one")
    return models[0], versions[0]


SHORT_ANSWER = UNHELD // 4  # Maximum total characters of outputs written in one go. Such short answers need no quota.

_NONE = msgspec.Raw(b"[]")


def _never(*arguments: object) -> NoReturn:
    raise NotImplementedError("the route has no such requests")


class Codec(msgspec.Struct, frozen=True):
    """The codec of one inference route.

    `open` chooses how to read a body based on its head; the default is `read_json`. `read` decodes a body with a single text
    into (model or None, input, parameters as a JSON object or empty). For any other body, it raises OtherInput if `read_value`
    may accept the body, or else RequestError. `read_value` and `read_long` decode a body with any JSON value, several inputs,
    or a version. `write` encodes one output; `write_many` encodes the array `outputs`. `limit_lines` returns the header lines
    about rate limits. If `compressed`, bodies may be compressed. If `tasks`, requests may become tasks; otherwise `Prefer` is
    ignored. `way` is the route's method and path. `input` is the name of the member that has the input."""

    open: OpenHead | None = None
    read: ReadText = _never
    write: WriteText = _never
    read_value: Callable[[bytes], ParsedBody] = _never
    write_many: WriteText = _never
    read_long: Callable[[bytes], Steps[ParsedBody]] = _never
    encode_error: EncodeError = encode_problem
    limit_lines: Callable[[RateLimitHeaders, tuple[Limit, ...]], bytes] = RateLimitHeaders.lines
    compressed: bool = False
    tasks: bool = True
    way: str = ""
    input: str = "input"
    usual: Usual | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "usual", Usual(self.read, self.write, JSON, self.write_one))

    def read_json(self, body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        """Decode a native JSON body; see `headway.doors.exchange.ReadRequest`."""
        try:
            return Exchange(*self.read(body), options, self.write_one, usual=self.usual)
        except OtherInput as exc:
            named, input, parameters, version = self.read_value(body)
            input = _fitting(known, named or known.default, input, exc)
        write = self.write_all if isinstance(input, list) else self.write_one
        return Exchange(named, input, parameters, replace(options, version=version) if version else options, write)

    def read_json_in_steps(self, body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
        named, input, parameters, version = yield from self.read_long(body)
        model = named or known.default
        if known[model].takes is ValueKind.TENSORS:
            input = yield from to_tensors_in_steps(known, model, input)
        elif not isinstance(input, str):
            kind = "list" if isinstance(input, list) else values.name_of(input)
            input = _fitting(known, model, input, OtherInput(f"Expected `str`, got `{kind}` - at `$.{self.input}`"))
        write = self.write_all if isinstance(input, list) else self.write_one
        return Exchange(named, input, parameters, replace(options, version=version) if version else options, write)

    def write_one(self, outcome: Outcome) -> Written:
        [output] = outcome.outputs
        if is_large(output):
            return JSON, value_within(self._write_body(self.write, outcome, HOLE), output)
        if isinstance(output, Tensors):
            return JSON, self._write_body(self.write, outcome, msgspec.Raw(b"".join(tensor_pieces(output))))
        return JSON, self._write_body(self.write, outcome, values.embedded(output))

    def write_all(self, outcome: Outcome) -> Written:
        outputs = outcome.outputs
        if set(map(type, outputs)) == {str} and sum(map(len, outputs)) <= SHORT_ANSWER:
            return JSON, self._write_body(self.write_many, outcome, outputs)
        answer = self._write_body(self.write_many, outcome, _NONE)
        return JSON, array_within(answer, "outputs", items_of(outputs))

    def _write_body(self, write: WriteText, outcome: Outcome, output: Any) -> bytes:
        return write(outcome.id, output, outcome.milliseconds, outcome.version, added_up(outcome.tokens))


NO_ROUTE = Codec()  # The codec of a connection before its first inference request.


def _fitting(known: KnownModels, model: str, input: Value | list[Value], wrong: OtherInput) -> Value | list[Value]:
    """Convert one or more inputs to the kind that the model takes. Raises `wrong` if the model takes only text."""
    takes = known[model].takes
    if takes is ValueKind.TEXT:
        if not isinstance(input, list | str):
            raise wrong
        for position, value in enumerate(input if isinstance(input, list) else ()):
            if not isinstance(value, str):
                raise BadRequest(f"Expected `str`, got `{values.name_of(value)}` - at `$.inputs[{position}]`")
    elif takes is not None:
        if takes is ValueKind.TENSORS:
            return to_tensors(known, model, input)
        if takes is ValueKind.BYTES and isinstance(input, list):
            for position, value in enumerate(input):
                if (failure := known.check(model, value)) is not None:
                    raise BadRequest(f"{failure.message} - at `$.inputs[{position}]`")
    return input


class _Inference(msgspec.Struct, gc=False):
    input: str
    model: str | None = None
    parameters: msgspec.Raw = ABSENT
    client_id: str | None = None
    inputs: msgspec.UnsetType = msgspec.UNSET
    version: msgspec.UnsetType = msgspec.UNSET
    model_version: msgspec.UnsetType = msgspec.UNSET


class _Plain(msgspec.Struct, gc=False):
    input: str
    model: ClassVar[None] = None
    parameters: msgspec.Raw = ABSENT


class _Predict(msgspec.Struct, gc=False):
    model: str = msgspec.field(name="model_id")
    input: str = msgspec.field(name="input_data")
    parameters: msgspec.Raw = ABSENT
    version: msgspec.UnsetType = msgspec.UNSET
    model_version: msgspec.UnsetType = msgspec.UNSET


class _AnyInference(msgspec.Struct, gc=False):
    input: msgspec.Raw = ABSENT
    inputs: msgspec.Raw = ABSENT
    model: str | None = None
    parameters: msgspec.Raw = ABSENT
    client_id: str | None = None
    version: str | None = None
    model_version: str | None = None


class _AnyPlain(msgspec.Struct, gc=False):
    input: msgspec.Raw
    inputs: ClassVar[msgspec.Raw] = ABSENT
    model: ClassVar[None] = None
    parameters: msgspec.Raw = ABSENT
    version: ClassVar[None] = None
    model_version: ClassVar[None] = None


class _AnyPredict(msgspec.Struct, gc=False):
    model: str = msgspec.field(name="model_id")
    input: msgspec.Raw = msgspec.field(name="input_data")
    inputs: ClassVar[msgspec.Raw] = ABSENT
    parameters: msgspec.Raw = ABSENT
    version: str | None = None
    model_version: str | None = None


class _Metadata(msgspec.Struct, gc=False):
    tokens_used: int | None
    latency_ms: float
    model_version: str


class _InferenceAnswer(msgspec.Struct, gc=False):
    request_id: str
    output: str | msgspec.Raw
    metadata: _Metadata


class _ManyAnswer(msgspec.Struct, gc=False):
    request_id: str
    outputs: Sequence[Value] | msgspec.Raw
    metadata: _Metadata


class _PlainAnswer(msgspec.Struct, gc=False):
    output: str | msgspec.Raw
    request_id: str
    latency_ms: float


class _PredictAnswer(msgspec.Struct, gc=False):
    request_id: str
    output: str | msgspec.Raw
    latency_ms: float


_encode = msgspec.json.Encoder().encode


def inference(settings: Settings) -> Codec:
    """Return the codec of `/v1/inference`."""
    return _native(_Inference, _AnyInference, _write_inference, settings, write_many=_write_many)


def plain(settings: Settings) -> Codec:
    """Return the codec of `/api/inference`."""
    return _native(_Plain, _AnyPlain, _write_plain, settings)


def predict(settings: Settings) -> Codec:
    """Return the codec of `/v1/predict`."""
    texts = _native(_Predict, _AnyPredict, _write_predict, settings, input="input_data")
    return replace(texts, open=open_octets(read_text, texts.read_json, texts.read_json_in_steps, texts.write_one))


def _native(kind: type[Any], any_kind: type[Any], write: WriteText, settings: Settings, **more: Any) -> Codec:
    read, read_value = body_reader(kind, settings), value_reader(any_kind, settings)
    read_long = long_value_reader(any_kind, settings)
    return Codec(read=read, write=write, read_value=read_value, read_long=read_long, **more)


def _write_inference(
    shown: str, output: str | msgspec.Raw, milliseconds: float, version: str, tokens: TokenCount | None
) -> bytes:
    return _encode(
        _InferenceAnswer(shown, output, _Metadata(None if tokens is None else tokens.used, milliseconds, version))
    )


def _write_many(
    shown: str, outputs: Sequence[Value] | msgspec.Raw, milliseconds: float, version: str, tokens: TokenCount | None
) -> bytes:
    return _encode(
        _ManyAnswer(shown, outputs, _Metadata(None if tokens is None else tokens.used, milliseconds, version))
    )


def _write_plain(
    shown: str, output: str | msgspec.Raw, milliseconds: float, version: str, tokens: TokenCount | None
) -> bytes:
    return _encode(_PlainAnswer(output, shown, milliseconds))


def _write_predict(
    shown: str, output: str | msgspec.Raw, milliseconds: float, version: str, tokens: TokenCount | None
) -> bytes:
    return _encode(_PredictAnswer(shown, output, milliseconds))

"""Codecs of inference routes: the form of an API's requests, answers and errors. This module has the three native ones.

A codec decodes each body into an exchange (`doors/exchange.py`), and encodes answers and errors. Most requests to native
routes are one text, answered with one JSON object. `read` and `write` are their fast path, which makes no exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import msgspec
from msgspec.structs import replace

from headway.config import Settings
from headway.core import values
from headway.core.json_pages import Steps
from headway.doors.answer_pieces import HOLE, array_within, is_large, items_of, tensor_pieces, value_within
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
from headway.doors.exchange import JSON, Exchange, Outcome, ReadText, Usual, WriteText, Written
from headway.doors.rate_limit_headers import RateLimitHeaders
from headway.errors import BadRequest
from headway.gateway.client_quotas import UNHELD
from headway.gateway.served_models import KnownModels
from headway.http.inference.octets import open_octets
from headway.http.problem import EncodeError, encode_problem
from headway.http.server.head import OpenHead
from headway.model import Limit, RequestOptions, Tensors, TokenCount, Value, ValueKind, added_up

SHORT_ANSWER = UNHELD // 4
"""Maximum number of characters of several outputs to write at once. Quotas ignore so few."""

_NONE = msgspec.Raw(b"[]")


def _never(*arguments: object) -> NoReturn:
    raise NotImplementedError("the route has no such requests")


class Codec(msgspec.Struct, frozen=True):
    """Codec of one inference route.

    `open` chooses the reader of a body from its head; without it, all bodies are for `read_json`. `read` reads a body with one
    text into (model or None, input, parameters as a JSON object or empty). It raises RequestError, and OtherInput if `read_value`
    may accept the input. `read_value` and `read_long` read a body whose input is any JSON value, or a list of several, and its
    version. `write` writes the answer with one output, and `write_many` the answer with the array `outputs`. `limit_lines` writes
    the header fields about rate limits. If `compressed`, bodies may be. Unless requests may become `tasks`, `Prefer` is ignored.
    `way` is the method and path of the route, and `input` the member that has the input."""

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
        """Read a JSON body of the native API; see `headway.doors.exchange.ReadRequest`."""
        try:
            return Exchange(*self.read(body), options, self.write_one, usual=self.usual)
        except OtherInput as exc:
            named, input, parameters, version = self.read_value(body)
            input = _fitting(known, named or known.default, input, exc)
        write = self.write_all if isinstance(input, list) else self.write_one
        return Exchange(named, input, parameters, replace(options, version=version) if version else options, write)

    def read_json_in_steps(self, body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
        """Read a long JSON body in steps; see `read_json`."""
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


NO_ROUTE = Codec()
"""Codec of a connection that has had no request to an inference route."""


def _fitting(known: KnownModels, model: str, input: Value | list[Value], wrong: OtherInput) -> Value | list[Value]:
    """Convert an input other than a text, or several inputs, to what the model takes. Raises `wrong` if it takes only texts."""
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
    """Make the codec of `/v1/inference`."""
    return _native(_Inference, _AnyInference, _write_inference, settings, write_many=_write_many)


def plain(settings: Settings) -> Codec:
    """Make the codec of `/api/inference`."""
    return _native(_Plain, _AnyPlain, _write_plain, settings)


def predict(settings: Settings) -> Codec:
    """Make the codec of `/v1/predict`."""
    texts = _native(_Predict, _AnyPredict, _write_predict, settings, input="input_data")
    return replace(texts, open=open_octets(read_text, texts.read_json, texts.read_json_in_steps, texts.write_one))


def _native(kind: type[Any], any_kind: type[Any], write: WriteText, settings: Settings, **more: Any) -> Codec:
    """Make a codec whose bodies with one text are of `kind`, and all others of `any_kind`."""
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

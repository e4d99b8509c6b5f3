"""Members of OpenAI's request bodies, and header fields that OpenAI's clients send.

Members that the API defines are decoded individually. All others become parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from headway.config import Settings
from headway.core.json_pages import SHORT, Pages, Steps, split
from headway.doors.bodies import checked_parameters, decode_problem, members_in_steps, parameters_in_steps
from headway.doors.entrance import RateLimitHeaders
from headway.doors.exchange import UNUSUAL, CodecContext, Exchange, Reader, ReadInSteps, ReadRequest
from headway.errors import BadRequest, PayloadTooLarge
from headway.gateway.served_model import ServedModel
from headway.gateway.served_models import KnownModels
from headway.http.inference.codecs import Codec
from headway.http.problem import encode_openai_error
from headway.http.server.head import Head, OpenHead, RequestTarget
from headway.model import RequestOptions

MOST_TEXTS = 2048  # Maximum texts in a request, as in OpenAI's API. Some clients send lists of exactly this length.

MOST_MESSAGES = 4096
MOST_VALUES = 1 << 15  # Maximum JSON values in a request's messages: two per message, and two per part of a message.

Members = dict[str, msgspec.Raw]
Converse = Callable[[Members, KnownModels], Steps[tuple[str, msgspec.Raw]]]
"""Returns a conversation rendered as one text, and its messages as a parameter. Changes no member. Raises RequestError."""

_MOST_READ = {"metadata": SHORT, "stream_options": SHORT, "text": 1 << 16, "response_format": 1 << 16}
"""Maximum size in bytes of long members that the API decodes."""
_STANDS_FOR = {b"[": msgspec.Raw(b"[0]"), b"{": msgspec.Raw(b'{"":0}')}
_ONE_MESSAGE = msgspec.Raw(b'[{"role":"user","content":""}]')

_read = msgspec.json.Decoder(Members).decode
_TOKENS = re.compile(rb"\s*\[\s*(?:\[\s*)?-?[0-9]")
_NOTHING = frozenset((b"null", b"false", b"[]", b"{}", b'"none"', b'"auto"', b'["text"]'))
"""Values of unsupported members that are accepted because they request nothing. `logprobs: 0` does request something."""

Unserved = Mapping[str, str]  # Unsupported members, which would change the format of the answer, each with advice.

_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_RETRIES = re.compile(rb"0*[1-9][0-9]*")


def read_members(body: Any) -> Members:
    """Return the members of a JSON object. If a member is repeated, the last one counts. Members that are already in a dict are
    returned unchanged. Raises BadRequest."""
    try:
        if not body.isascii():
            body.decode()
        return _read(body)
    except AttributeError:  # Members of a long body, from `long_reader`.
        return cast(Members, body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(decode_problem(exc, body)) from None


class Plain(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A body that has only a model, `stream`, and an input. Subclasses add the member for the input."""

    model: str | None = None
    stream: bool | None = None


def read_plain(decode: Callable[[bytes], Any], stream: bool, body: bytes) -> Any:
    """Decode a Plain body with this value of `stream`. Raises UNUSUAL for any other body."""
    try:
        if not body.isascii():
            body.decode()
        request = decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UNUSUAL from None
    if bool(request.stream) is not stream:
        raise UNUSUAL
    return request


def member(kind: Any) -> Callable[[Members, str], Any]:
    """Return a function that removes and returns a member of type `kind`, or None if it is missing or null."""
    decode = msgspec.json.Decoder(kind | None).decode

    def take(members: Members, name: str) -> Any:
        raw = members.pop(name, None)
        if raw is None:
            return None
        try:
            return decode(raw)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise BadRequest(_at(name, exc, bytes(raw))) from None

    return take


take_text = member(str)
take_flag = member(bool)
_take_figure = member(int | float)
_take_texts = member(str | list[str])
_decode_text = msgspec.json.Decoder(str).decode


def take_number(members: Members, name: str) -> int | None:
    """Remove and return a whole number, such as 3 or 3.0, or None if it is missing or null. Raises BadRequest."""
    figure = _take_figure(members, name)
    if figure is None or isinstance(figure, int):
        return figure
    if not figure.is_integer():
        raise BadRequest(f"Expected `int | null`, got `float` - at `$.{name}`")
    return int(figure)


def take_inputs(members: Members, name: str, limit: int, check: Callable[[str], str]) -> list[str]:
    """Remove a text or a list of 1 to `limit` texts. Return the results of `check` for the texts. Raises RequestError."""
    raw = members.get(name)
    written = b"" if raw is None else bytes(raw)
    if written[:1] == b'"':
        del members[name]
        try:
            text = _decode_text(written)
        except msgspec.MsgspecError as exc:
            raise BadRequest(_at(name, exc, written)) from None
        return [check(text)]
    if _TOKENS.match(written):
        raise BadRequest(
            f"token arrays are not supported, because the model has its own tokenizer; send text (in LangChain: "
            f"check_embedding_ctx_length=False) - at `$.{name}`"
        )
    texts = _take_texts(members, name)
    if texts is None:
        raise BadRequest(
            f"Object missing required field `{name}`; expected a string, or a list of strings - at `$.{name}`"
        )
    if isinstance(texts, str):
        return [check(texts)]
    if not texts:
        raise BadRequest(f"Expected at least one text - at `$.{name}`")
    if len(texts) > limit:
        raise PayloadTooLarge(f"{len(texts)} texts; at most {limit} are allowed in one request - at `$.{name}`")
    return [check(text) for text in texts]


def refuse(members: Members, unserved: Unserved) -> None:
    """Remove unsupported members. Raises BadRequest if one of them has a value that requests something."""
    for name in members.keys() & unserved.keys():
        value = bytes(members.pop(name)).translate(None, b" \t\r\n")
        if value not in _NOTHING and (name, value) != ("top_logprobs", b"0"):
            raise BadRequest(f"{unserved[name]} - at `$.{name}`")


class Format(msgspec.Struct, gc=False):
    """The requested format of the answer."""

    type: str


def check_format(format: Format | None, model: ServedModel, name: str, place: str) -> None:
    """Raise BadRequest for a format other than text if the model's target doesn't receive the parameter `name`."""
    if format is not None and format.type != "text" and not model.sees(name):
        reason = f"does not list {name} in its attribute together" if model.seen else "takes no parameters"
        raise BadRequest(
            f"the model cannot answer in the format {format.type[:40]!r}, as its target {reason} and so never receives it; ask for "
            f"JSON in a message, and leave this out - at `{place}`"
        )


def drop_user(members: Members, model: ServedModel) -> None:
    """Drop `user` if the target doesn't receive it, so that identical requests from different users share an answer."""
    if not model.sees("user"):
        members.pop("user", None)


def parameters_reader(settings: Settings) -> Callable[[Members], bytes]:
    """Return a function that joins the remaining members into parameters (a JSON object or b"")."""
    limit = settings.max_parameters

    def parameters(members: Members) -> bytes:
        if not members:
            return b""
        if len(members) > limit:
            raise BadRequest(
                f"{len(members)} members are passed to the model as parameters; at most {limit} are allowed"
            )
        text = _object(members)
        try:
            return checked_parameters(msgspec.Raw(text), limit)
        except BadRequest as exc:
            raise BadRequest(exc.message.replace("`$.parameters`", "the object of the model's parameters")) from None
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise BadRequest(decode_problem(exc, text)) from None

    return parameters


def _object(members: Members) -> bytes:
    return b"{" + b",".join([msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in members.items()]) + b"}"


def long_reader(make: ReadRequest, settings: Settings, name: str, converse: Converse | None = None) -> ReadInSteps:
    """Return a reader of long bodies. It calls `make`, the reader of short bodies, with placeholders in place of long members.
    The texts or messages are in the member `name`. `converse` renders messages."""
    limit, max_texts = settings.max_parameters, min(MOST_TEXTS, settings.max_queue)

    def read(body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
        texts = yield from members_in_steps(body)
        members = {member: msgspec.Raw(text) for member, text in texts.items()}
        conversation = None
        if converse is not None:
            conversation = yield from converse(members, known)
        elif (yield from _count(texts.get(name, b""), max_texts)) > max_texts:
            raise PayloadTooLarge(f"more than {max_texts} texts, the limit for one request - at `$.{name}`")
        long = {member: raw for member, raw in members.items() if member != name and len(texts[member]) > SHORT}
        for member in long:
            size = len(texts[member])
            if member not in _MOST_READ:
                members[member] = _STANDS_FOR.get(texts[member][:1], members[member])
            elif size > _MOST_READ[member]:
                raise PayloadTooLarge(f"{size} bytes; at most {_MOST_READ[member]} are allowed - at `$.{member}`")
        if conversation is not None:
            members[name] = _ONE_MESSAGE
        yield 0
        exchange = make(cast(Any, members), options, known)  # After this, only parameters are left in `members`.
        parameters = {member: long.get(member, raw) for member, raw in members.items()}
        if conversation is not None:
            text, parameters["messages"] = conversation
            exchange.input = [text] * len(exchange.input) if isinstance(exchange.input, list) else text
        if parameters:
            exchange.parameters = yield from _joined(parameters, limit)
        return exchange

    return read


def _count(text: bytes, limit: int) -> Steps[int]:
    """Return the number of elements of a long array (at most `limit` + 1), or 1 for any other value."""
    if text[:1] != b"[" or _TOKENS.match(text):  # `take_inputs` refuses token arrays.
        return 1
    elements = yield from split(text, limit)
    return limit + 1 if elements is None else len(elements)


def _joined(members: Members, limit: int) -> Steps[bytes]:
    if len(members) > limit:
        raise BadRequest(f"{len(members)} members are passed to the model as parameters; at most {limit} are allowed")
    text = _object(members)
    yield 0
    try:
        yield from parameters_in_steps(text, limit)
    except BadRequest as exc:
        raise BadRequest(exc.message.replace("`$.parameters`", "the object of the model's parameters")) from None
    return text


def check_messages(text: bytes, name: str) -> Steps[None]:
    """Raise PayloadTooLarge if a long array contains too many messages."""
    if text[:1] != b"[":
        return
    if (yield from split(text, MOST_MESSAGES)) is None:
        raise PayloadTooLarge(
            f"more than {MOST_MESSAGES} messages, the limit for one request; join some of them - at `$.{name}`"
        )
    pages = Pages(text, known=True)
    for _ in pages:
        yield 0
        if pages.commas > MOST_VALUES:
            raise PayloadTooLarge(
                f"the messages contain more than {MOST_VALUES} values, the limit for one request; join their parts - at `$.{name}`"
            )


def _at(name: str, exc: Exception, raw: bytes) -> str:
    message = decode_problem(exc, raw)
    if not isinstance(exc, msgspec.ValidationError):
        return f"{message} - at `$.{name}`"
    text, separator, path = message.partition(" - at `$")
    return f"{text} - at `$.{name}{path}" if separator else f"{text} - at `$.{name}`"


def openai_codec(read: Reader) -> Codec:
    """Return the codec of a route, given the reader of its bodies."""
    return Codec(open=_opener(read), encode_error=encode_openai_error, limit_lines=RateLimitHeaders.lines_and_counts)


def _opener(read: Reader) -> OpenHead:
    def open_head(
        head: Head, target: RequestTarget, options: RequestOptions, context: CodecContext
    ) -> tuple[RequestOptions, Reader]:
        target.refuse_named("name the model in the body; to choose a version, use /v1/inference")
        if options.task:
            raise BadRequest("this API does not support `Prefer: respond-async`; use /v1/inference for tasks")
        fields = dict(head.fields)
        options = _shortened(options, fields.get(b"x-stainless-read-timeout", b""))
        if not _RETRIES.fullmatch(fields.get(b"x-stainless-retry-count", b"")):
            return options, read

        def count(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
            context.counters.client_retries += 1
            exchange = read.at_once(body, options, known)
            exchange.usual = None  # The fast path wouldn't count the next request.
            return exchange

        return options, Reader(count, read.in_steps)

    return open_head


def _shortened(options: RequestOptions, value: bytes) -> RequestOptions:
    """Limit the timeout to `value`, the seconds after which the client gives up."""
    seconds = float(value) if _SECONDS.fullmatch(value) else 0.0
    return msgspec.structs.replace(options, timeout=seconds) if 0.0 < seconds < options.timeout else options

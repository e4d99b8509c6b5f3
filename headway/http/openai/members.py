"""Heads and members of OpenAI's requests: the fields that its clients send, and of a body those that the API has, each decoded by itself, and the others, which become the target's parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from headway.config import Settings
from headway.core.json_pages import SHORT, Pages, Steps, split
from headway.doors.bodies import checked_parameters, decode_problem, members_in_steps, parameters_in_steps
from headway.doors.exchange import UNUSUAL, CodecContext, Exchange, Reader, ReadInSteps, ReadRequest
from headway.doors.rate_limit_headers import RateLimitHeaders
from headway.errors import BadRequest, PayloadTooLarge
from headway.gateway.served_model import ServedModel
from headway.gateway.served_models import KnownModels
from headway.http.inference.codecs import Codec
from headway.http.openai.errors import encode_error
from headway.http.server.head import Head, OpenHead, RequestTarget
from headway.model import RequestOptions

MOST_TEXTS = 2048
"""Most texts of one request, as in OpenAI's own API, whose clients make lists of that length by themselves."""

MOST_MESSAGES = 4096
"""Most messages of one conversation."""
MOST_VALUES = 1 << 15
"""Most values in these. Each message has two, and each of its parts two more."""

T = TypeVar("T")
Members = dict[str, msgspec.Raw]
Converse = Callable[[Members, KnownModels], Steps[tuple[str, msgspec.Raw]]]
"""Function from members, which it leaves as they are, to the text of their messages and these as a parameter. Raises RequestError."""

_MOST_READ = {"metadata": SHORT, "stream_options": SHORT, "text": 1 << 16, "response_format": 1 << 16}
"""Most bytes of members that the API reads."""
_STANDS_FOR = {b"[": msgspec.Raw(b"[0]"), b"{": msgspec.Raw(b'{"":0}')}
_ONE_MESSAGE = msgspec.Raw(b'[{"role":"user","content":""}]')

_read = msgspec.json.Decoder(Members).decode
_TOKENS = re.compile(rb"\s*\[\s*(?:\[\s*)?-?[0-9]")
_NOTHING = frozenset((b"null", b"false", b"[]", b"{}", b'"none"', b'"auto"', b'["text"]'))
"""Values of a member that ask for nothing. `logprobs` of 0 asks for those of the text's own tokens."""

Unserved = Mapping[str, str]
"""Members that would change the answer's form and are not served, each with what to do instead."""

_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_RETRIES = re.compile(rb"0*[1-9][0-9]*")


def read_members(body: Any) -> Members:
    """Members of a JSON object, unless it is in parts already. Of one that is there twice the last counts. Raises BadRequest."""
    try:
        if not body.isascii():
            body.decode()
        return _read(body)
    except AttributeError:  # They are members, of a long body.
        return cast(Members, body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(decode_problem(exc, body)) from None


class Plain(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Body with nothing but what is asked, and whether the answer comes as a stream."""

    model: str | None = None
    stream: bool | None = None


def read_plain(decode: Callable[[bytes], Any], stream: bool, body: bytes) -> Any:
    """Plain body whose answer is, or is not, to be a stream. Raises BadRequest for any other."""
    try:
        if not body.isascii():
            body.decode()
        asked = decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UNUSUAL from None
    if bool(asked.stream) is not stream:
        raise UNUSUAL
    return asked


def member(kind: Any) -> Callable[[Members, str], Any]:
    """Make the function that takes a member of this type out of the members; None where it is absent or null."""
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
    """Take a whole number out of the members, as 3 or as 3.0; None where it is absent or null. Raises BadRequest."""
    figure = _take_figure(members, name)
    if figure is None or isinstance(figure, int):
        return figure
    if not figure.is_integer():
        raise BadRequest(f"Expected `int | null`, got `float` - at `$.{name}`")
    return int(figure)


def take_inputs(members: Members, name: str, most: int, check: Callable[[str], str]) -> list[str]:
    """Take out a member that is a text, or a list of at least one and at most `most` texts.

    Raises:
        RequestError: it is anything else, or absent, or `check` refuses a text.
    """
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
            f"token arrays are not taken, as the model has a tokenizer of its own; send text (in LangChain: "
            f"check_embedding_ctx_length=False) - at `$.{name}`"
        )
    found = _take_texts(members, name)
    if found is None:
        raise BadRequest(f"Object missing required field `{name}`; expected a text, or a list of texts - at `$.{name}`")
    if isinstance(found, str):
        return [check(found)]
    if not found:
        raise BadRequest(f"Expected at least one text - at `$.{name}`")
    if len(found) > most:
        raise PayloadTooLarge(f"{len(found)} texts; at most {most} are taken in one request - at `$.{name}`")
    return [check(text) for text in found]


def refuse(members: Members, unserved: Unserved) -> None:
    """Refuse what is not served, and drop members that ask for nothing of it. Raises BadRequest."""
    for name in members.keys() & unserved.keys():
        value = bytes(members.pop(name)).translate(None, b" \t\r\n")
        if value not in _NOTHING and (name, value) != ("top_logprobs", b"0"):
            raise BadRequest(f"{unserved[name]} - at `$.{name}`")


class Format(msgspec.Struct, gc=False):
    """Form of an answer that a request asks for."""

    type: str


def check_format(format: Format | None, model: ServedModel, name: str, place: str) -> None:
    """Refuse any form of the answer but text where the model's target would never see the parameter with it. Raises BadRequest."""
    if format is not None and format.type != "text" and not model.sees(name):
        why = f"does not name {name} in its attribute together" if model.seen else "takes no parameters"
        raise BadRequest(
            f"the model cannot answer in the format {format.type[:40]!r}, as its target {why} and so never sees it; ask for "
            f"JSON in a message, and leave it out - at `{place}`"
        )


def drop_user(members: Members, model: ServedModel) -> None:
    """Drop `user` where the target would not see it, so that the same request of several users is the same request."""
    if not model.sees("user"):
        members.pop("user", None)


def parameters_reader(settings: Settings) -> Callable[[Members], bytes]:
    """Make the function that turns what is left of the members into parameters: text of a JSON object, or empty."""
    most = settings.max_parameters

    def parameters(members: Members) -> bytes:
        if not members:
            return b""
        if len(members) > most:
            raise BadRequest(f"{len(members)} members reach the model as parameters; at most {most} are taken")
        text = b"{" + b",".join([msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in members.items()]) + b"}"
        try:
            return checked_parameters(msgspec.Raw(text), most)
        except BadRequest as exc:
            raise BadRequest(exc.message.replace("`$.parameters`", "what reaches the model as parameters")) from None
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise BadRequest(decode_problem(exc, text)) from None

    return parameters


def long_reader(make: ReadRequest, settings: Settings, name: str, converse: Converse | None = None) -> ReadInSteps:
    """Make the reader of long bodies, out of that of others: it gets nothing that would take it long.

    Arguments:
        make: reader of others.
        settings: bounds of parameters.
        name: member with the texts, or with the messages.
        converse: makes the text of messages, and the parameter `messages`; None: there are none.
    """
    most, most_texts = settings.max_parameters, min(MOST_TEXTS, settings.max_queue)

    def read(body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
        found = yield from members_in_steps(body)
        members = {name: msgspec.Raw(text) for name, text in found.items()}
        told = None
        if converse is not None:
            told = yield from converse(members, known)
        elif (yield from _count(found.get(name, b""), most_texts)) > most_texts:
            raise PayloadTooLarge(f"more than {most_texts} texts, which are the most in one request - at `$.{name}`")
        long = {one: raw for one, raw in members.items() if one != name and len(found[one]) > SHORT}
        for one in long:
            if one in _MOST_READ:
                if len(found[one]) > _MOST_READ[one]:
                    raise PayloadTooLarge(
                        f"{len(found[one])} bytes; at most {_MOST_READ[one]} are taken - at `$.{one}`"
                    )
                continue
            members[one] = _STANDS_FOR.get(found[one][:1], members[one])
        if told is not None:
            members[name] = _ONE_MESSAGE
        yield 0
        exchange = make(cast(Any, members), options, known)  # It leaves the parameters.
        parameters = {one: long.get(one, raw) for one, raw in members.items()}
        if told is not None:
            exchange.input = [told[0]] * len(exchange.input) if isinstance(exchange.input, list) else told[0]
            parameters["messages"] = told[1]
        if parameters:
            exchange.parameters = yield from _joined(parameters, most)
        return exchange

    return read


def _count(text: bytes, most: int) -> Steps[int]:
    """Number of elements of a long array, at most one more than `most`; 1 for anything else."""
    if text[:1] != b"[" or _TOKENS.match(text):  # Those are refused by name.
        return 1
    found = yield from split(text, most)
    return most + 1 if found is None else len(found)


def _joined(members: Members, most: int) -> Steps[bytes]:
    """Text of long parameters. Raises BadRequest."""
    if len(members) > most:
        raise BadRequest(f"{len(members)} members reach the model as parameters; at most {most} are taken")
    text = b"{" + b",".join([msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in members.items()]) + b"}"
    yield 0
    try:
        yield from parameters_in_steps(text, most)
    except BadRequest as exc:
        raise BadRequest(exc.message.replace("`$.parameters`", "what reaches the model as parameters")) from None
    return text


def check_messages(text: bytes, name: str) -> Steps[None]:
    """Check that there are not too many messages in a long text. Raises PayloadTooLarge."""
    if text[:1] != b"[":
        return
    if (yield from split(text, MOST_MESSAGES)) is None:
        raise PayloadTooLarge(
            f"more than {MOST_MESSAGES} messages, which are the most in one request; join some, or send the last - at `$.{name}`"
        )
    pages = Pages(text, known=True)
    for _ in pages:
        yield 0
        if pages.commas > MOST_VALUES:
            raise PayloadTooLarge(
                f"the messages hold more than {MOST_VALUES} values, which are the most in one request; join their parts - at `$.{name}`"
            )


def _at(name: str, exc: Exception, raw: bytes) -> str:
    """Message about a wrong member, with the path from the body's root."""
    message = decode_problem(exc, raw)
    if not isinstance(exc, msgspec.ValidationError):
        return f"{message} - at `$.{name}`"
    text, found, path = message.partition(" - at `$")
    return f"{text} - at `$.{name}{path}" if found else f"{text} - at `$.{name}`"


def openai_codec(read: Reader) -> Codec:
    """Make the codec of one route."""
    return Codec(open=_opener(read), encode_error=encode_error, limit_lines=RateLimitHeaders.lines_and_counts)


def _opener(read: Reader) -> OpenHead:
    def open_head(
        head: Head, target: RequestTarget, options: RequestOptions, context: CodecContext
    ) -> tuple[RequestOptions, Reader]:
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
            exchange = read.at_once(body, options, known)
            exchange.usual = None  # The next one is counted, too.
            return exchange

        return options, Reader(count, read.in_steps)

    return open_head


def _shortened(options: RequestOptions, value: bytes) -> RequestOptions:
    """Options whose deadline is not behind the one at which the client gives up, by its own header field in seconds."""
    seconds = float(value) if _SECONDS.fullmatch(value) else 0.0
    return msgspec.structs.replace(options, timeout=seconds) if 0.0 < seconds < options.timeout else options

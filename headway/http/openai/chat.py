"""Codecs of POST /v1/completions and /v1/chat/completions.

Each prompt becomes `n` entries. A chat template turns messages into a single text for the model. The template `plain` writes one line
`role: content` for each message, then `assistant:`. Any other template is a Jinja file, such as those of models on the Hugging Face Hub.
It runs in Jinja's sandbox, and sees only the messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from headway.config import Settings
from headway.config.extras import install_hint
from headway.core.json_pages import Steps
from headway.doors.bodies import check_text
from headway.doors.exchange import UNUSUAL, Exchange, Reader, unusual
from headway.errors import BadRequest, PayloadTooLarge, SettingError
from headway.gateway.fan_out import MOST_INPUTS
from headway.gateway.served_models import KnownModels
from headway.http.openai.answers import ChoicesWriter
from headway.http.openai.members import (
    MOST_TEXTS,
    Converse,
    Format,
    Members,
    Plain,
    check_format,
    check_messages,
    drop_user,
    long_reader,
    member,
    parameters_reader,
    read_members,
    read_plain,
    refuse,
    take_flag,
    take_inputs,
    take_number,
    take_text,
)
from headway.model import RequestOptions

MOST_CHOICES = 128

_UNSERVED_WITH_PROMPT = {
    "logprobs": "log probabilities are not supported, because the model returns only text; leave this out",
    "echo": "echo is not supported; leave this out, and put the prompt before the answer yourself",
    "best_of": "best_of is not supported; leave this out, request n choices, and pick the best one yourself",
}


class _StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None


class _PlainPrompt(Plain, kw_only=True, gc=False):
    prompt: str


_decode_prompt = msgspec.json.Decoder(_PlainPrompt).decode
_PROMPT_MEMBERS = frozenset(_PlainPrompt.__struct_fields__)
_take_stream_options = member(_StreamOptions)


def completions_reader(settings: Settings) -> Reader:
    """Return the reader of request bodies."""
    limit = min(MOST_TEXTS, settings.max_queue)
    parameters = parameters_reader(settings)

    def make(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        members = read_members(body)
        is_plain, model = members.keys() <= _PROMPT_MEMBERS, take_text(members, "model") or known.default
        prompts = take_inputs(members, "prompt", limit, check_text)
        count = choices(members, limit // len(prompts))
        if bytes(members.get("best_of", b"")) == b"%d" % count:  # Then `best_of` has no effect.
            del members["best_of"]
        write = writer(members, model, False, count)
        drop_user(members, known[model])
        if not members.keys().isdisjoint(_UNSERVED_WITH_PROMPT):
            refuse(members, _UNSERVED_WITH_PROMPT)
        entries = [prompt for prompt in prompts for _ in range(count)]
        exchange = Exchange(model, entries[0] if len(entries) == 1 else [*entries], parameters(members), options, write)
        if len(entries) == 1:
            exchange.usual = write.usual(partial(_read_prompt, model, write.stream) if is_plain else unusual)
        return exchange

    return Reader(make, long_reader(make, settings, "prompt"))


def _read_prompt(model: str, stream: bool, body: bytes) -> tuple[str, str, bytes]:
    request = read_plain(_decode_prompt, stream, body)
    return request.model or model, check_text(request.prompt), b""


def choices(members: Members, room: int) -> int:
    """Remove and return `n`, the number of choices for each prompt. Raises RequestError if it is invalid or above `room`."""
    n: int | None = take_number(members, "n")
    count = 1 if n is None else n
    if not 1 <= count <= MOST_CHOICES:
        raise BadRequest(f"n is {count}; expected a number from 1 to {MOST_CHOICES} - at `$.n`")
    if count > room:
        raise PayloadTooLarge(f"n is {count}; with these prompts at most {room} fit into one request - at `$.n`")
    return count


def writer(members: Members, model: str, chat: bool, count: int) -> ChoicesWriter:
    """Remove the members about streaming, and return the writer of the answer. Raises BadRequest."""
    stream = bool(take_flag(members, "stream"))
    options = _take_stream_options(members, "stream_options")
    if options is not None and not stream:
        raise BadRequest("stream_options is only for streams; leave this out, or set stream - at `$.stream_options`")
    return ChoicesWriter(model, chat, stream, options is not None and bool(options.include_usage), count)


PLAIN = "plain"  # Value of the setting that selects the built-in template.

Message = dict[str, str]

Render = Callable[[Sequence[Message]], str]  # Renders messages as a single text. May raise BadRequest.

RenderInSteps = Callable[[Sequence[Message]], Steps[str]]

_SETTING = "chat_template"
_LINE = "{role}: {content}\n".format_map
_ALWAYS = {"add_generation_prompt": True, "bos_token": "", "eos_token": ""}
_PIECES = 64


def load_template(chosen: str) -> Render:
    """Load the template named by a setting. Raises SettingError if the file isn't a readable template, or Jinja isn't installed."""
    template = _load(chosen)
    if template is None:
        return _plain

    def render(messages: Sequence[Message]) -> str:
        try:
            return str(template.render(messages=messages, **_ALWAYS))
        except Exception as exc:
            raise _not_taken(exc) from None

    return render


def load_long_template(chosen: str) -> RenderInSteps:
    """Load a template as a function that renders long conversations in steps; see `load_template`."""
    template = _load(chosen)

    def render(messages: Sequence[Message]) -> Steps[str]:
        if template is None:
            return _plain(messages)
        pieces: list[str] = []
        try:
            for piece in template.generate(messages=messages, **_ALWAYS):
                pieces.append(piece)
                if len(pieces) % _PIECES == 0:
                    yield 0
        except Exception as exc:
            raise _not_taken(exc) from None
        return "".join(pieces)

    return render


def _not_taken(exc: Exception) -> BadRequest:
    return BadRequest(f"the chat template refuses these messages: {exc} - at `$.messages`")


def _load(chosen: str) -> Any:
    """Return the Jinja template, or None for `plain`. Raises SettingError."""
    if chosen == PLAIN:
        return None
    try:
        source = Path(chosen).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise _unusable(chosen, f"cannot be read: {exc}", f"Name a file, or {PLAIN}.") from exc
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as exc:
        raise _unusable(chosen, "needs Jinja, which is not installed", install_hint("chat")) from exc
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as exc:
        raise _unusable(chosen, f"is not a Jinja template: {exc}", "Fix the file.") from exc
    except SyntaxError as exc:  # Jinja leaves some errors to Python, such as a `break` outside a loop.
        raise _unusable(chosen, f"is not a Jinja template: {exc.msg}", "Fix the file.") from None
    except RecursionError:
        raise _unusable(chosen, "is too deeply nested for a Jinja template", "Fix the file.") from None


def _plain(messages: Sequence[Message]) -> str:
    return "".join(map(_LINE, messages)) + "assistant:"


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _unusable(chosen: str, reason: str, hint: str) -> SettingError:
    return SettingError(_SETTING, chosen, reason, hint)


_TOOLS = "tools are not supported, because the model returns only text; leave them out, and describe them in a message"
_AUDIO = "audio is not supported, because the model returns only text; leave this out"
_UNSERVED = {
    "logprobs": "log probabilities are not supported, because the model returns only text; leave this out",
    "top_logprobs": "log probabilities are not supported, because the model returns only text; leave this out",
    "tools": _TOOLS,
    "functions": _TOOLS,
    "tool_choice": _TOOLS,
    "function_call": _TOOLS,
    "audio": _AUDIO,
    "modalities": _AUDIO,
}


class Part(msgspec.Struct, gc=False):
    """A part of a message."""

    type: str
    text: str | None = None


class _Sent(msgspec.Struct, gc=False):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None


class _PlainMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    role: str
    content: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class _Plain(Plain, kw_only=True, gc=False):
    messages: list[_PlainMessage]


_decode_plain = msgspec.json.Decoder(_Plain).decode
_PLAIN = frozenset(_Plain.__struct_fields__)

MOST_PARTS = 1024
TOGETHER = 256

T = TypeVar("T")

_take_messages = member(list[_Sent])
_take_format = member(Format)


def chat_reader(settings: Settings) -> Reader:
    """Return the reader of request bodies. Raises SettingError if a chat template can't be used."""
    limit = min(MOST_INPUTS, settings.max_queue)
    parameters = parameters_reader(settings)
    render_for = templates(settings, load_template)

    def make(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        members = read_members(body)
        is_plain, model = members.keys() <= _PLAIN, take_text(members, "model")
        name, raw = model or known.default, members.get("messages")
        text = check_text(render_for(name)(_messages_of(_take_messages(members, "messages"))))
        if raw is not None:
            members["messages"] = raw
        count = choices(members, limit)
        write = writer(members, name, True, count)
        if (format := members.get("response_format")) is not None:
            check_format(_take_format(members, "response_format"), known[name], "response_format", "$.response_format")
            members["response_format"] = format
        if "user" in members:
            drop_user(members, known[name])
        if not members.keys().isdisjoint(_UNSERVED):
            refuse(members, _UNSERVED)
        exchange = Exchange(model, text if count == 1 else [text] * count, parameters(members), options, write)
        if count == 1:
            read = partial(_read_plain, render_for(name), write.stream) if is_plain else unusual
            exchange.usual = write.usual(read)
        return exchange

    return Reader(make, long_reader(make, settings, "messages", _converse(settings)))


def _read_plain(render: Render, stream: bool, body: bytes) -> tuple[str | None, str, bytes]:
    request = read_plain(_decode_plain, stream, body)
    if not (messages := request.messages):
        raise UNUSUAL
    text = check_text(render(msgspec.to_builtins(messages)))
    return request.model, text, b'{"messages":%b}' % msgspec.json.encode(messages)


def _converse(settings: Settings) -> Converse:
    render_for = templates(settings, load_long_template)

    def converse(members: Members, known: KnownModels) -> Steps[tuple[str, msgspec.Raw]]:
        raw = members.get("messages", msgspec.Raw(b"null"))
        yield from check_messages(bytes(raw), "messages")
        model = take_text({**members}, "model") or known.default
        sent = _take_messages({"messages": raw}, "messages")
        messages = (yield from read_in_steps(sent, "messages", _message)) if sent else _messages_of(None)
        text = yield from render_for(model)(messages)
        yield 0
        return check_text(text), raw

    return converse


def read_in_steps(sent: Sequence[Any], name: str, read: Callable[[int, Any], Message]) -> Steps[list[Message]]:
    """Decode the messages of a long conversation. Raises RequestError if one is invalid or has too many parts."""
    for place, message in enumerate(sent):
        if isinstance(message.content, list) and len(message.content) > MOST_PARTS:
            raise PayloadTooLarge(
                f"{len(message.content)} parts; at most {MOST_PARTS} are allowed; join some of them - at `$.{name}[{place}].content`"
            )
    yield 0
    messages: list[Message] = []
    for place, message in enumerate(sent):
        messages.append(read(place, message))
        if place % TOGETHER == 0 or isinstance(message.content, list):
            yield 0
    return messages


def templates(settings: Settings, load: Callable[[str], T]) -> Callable[[str], T]:
    """Load the templates of all models. Return a function from a model's name to its template. Raises SettingError."""
    default = load(settings.chat_template)
    by_model = {name: load(model.chat_template) for name, model in settings.served.items()}
    return lambda model: by_model.get(model, default)


def _messages_of(sent: Sequence[_Sent] | None) -> list[Message]:
    if not sent:
        raise BadRequest("Expected at least one message, an object with `role` and `content` - at `$.messages`")
    return [_message(place, message) for place, message in enumerate(sent)]


def _message(place: int, sent: _Sent) -> Message:
    if sent.content is None:
        raise BadRequest(f"Expected text; tool calls are not supported - at `$.messages[{place}].content`")
    message = {"role": sent.role, "content": text_of(sent.content, f"$.messages[{place}]", ("text",))}
    if sent.name is not None:
        message["name"] = sent.name
    return message


def text_of(content: str | list[Part], where: str, kinds: Collection[str]) -> str:
    """Return the text of a message; if it has parts, join their texts by line breaks. `where` is the message's path in the body.
    Raises BadRequest if a part's type isn't among `kinds`."""
    if isinstance(content, str):
        return content
    for at, part in enumerate(content):
        place = f"`{where}.content[{at}]`"
        if part.type not in kinds:
            kind = part.type[:40]
            raise BadRequest(f"a part of type {kind!r} is not supported, only text is; send only the text - at {place}")
        if part.text is None:
            raise BadRequest(f"Object missing required field `text` - at {place}")
    return "\n".join([part.text or "" for part in content])

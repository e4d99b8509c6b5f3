"""Codec of POST /v1/chat/completions: a template makes one text of the messages, and the model answers it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from headway.config import Settings
from headway.errors import BadRequest
from headway.gateway.fan_out import MOST_INPUTS
from headway.gateway.served_models import KnownModels
from headway.http.inference.bodies import input_checker
from headway.http.inference.codecs import Codec
from headway.http.inference.exchange import Exchange, ReadRequest
from headway.http.openai.chat_template import Message, Render, load_template
from headway.http.openai.completions import choices, writer
from headway.http.openai.members import (
    Format,
    Members,
    check_format,
    drop_user,
    member,
    openai_codec,
    parameters_reader,
    read_members,
    refuse,
    take_text,
)
from headway.model import RequestOptions

_TOOLS = "tools are not served, as the model gives text only; describe them in a message, and leave them out"
_AUDIO = "audio is not served, as the model gives text only; leave it out"
_UNSERVED = {
    "logprobs": "log probabilities are not served, as the model gives text only; leave it out",
    "top_logprobs": "log probabilities are not served, as the model gives text only; leave it out",
    "tools": _TOOLS,
    "functions": _TOOLS,
    "tool_choice": _TOOLS,
    "function_call": _TOOLS,
    "audio": _AUDIO,
    "modalities": _AUDIO,
}


class Part(msgspec.Struct, gc=False):
    """Part of a message."""

    type: str
    text: str | None = None


class _Sent(msgspec.Struct, gc=False):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None


_take_messages = member(list[_Sent])
_take_format = member(Format)


def chat(settings: Settings) -> Codec:
    """Make the codec.

    Raises:
        SettingError: the template cannot be used.
    """
    return openai_codec(chat_reader(settings))


def chat_reader(settings: Settings) -> ReadRequest:
    """Make the reader of bodies.

    Raises:
        SettingError: the template cannot be used.
    """
    most = min(MOST_INPUTS, settings.max_queue)
    check, parameters = input_checker(settings), parameters_reader(settings)
    render_for = templates(settings)

    def make(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        members = read_members(body)
        model = take_text(members, "model")
        name = model or known.default
        raw = members.get("messages")
        text = check(render_for(name)(_messages(members)))
        if raw is not None:
            members["messages"] = raw
        count = choices(members, most)
        write = writer(members, name, True, count)
        if (format := members.get("response_format")) is not None:
            check_format(_take_format(members, "response_format"), known[name], "$.response_format")
            members["response_format"] = format
        if "user" in members:
            drop_user(members, known[name])
        if not members.keys().isdisjoint(_UNSERVED):
            refuse(members, _UNSERVED)
        return Exchange(model, text if count == 1 else [text] * count, parameters(members), options, write)

    return make


def templates(settings: Settings) -> Callable[[str], Render]:
    """Make the function from a model's name to its template.

    Raises:
        SettingError: a template cannot be used.
    """
    usual = load_template(settings.chat_template)
    of_models = {name: load_template(one.chat_template) for name, one in settings.served.items()}
    return lambda model: of_models.get(model, usual)


def _messages(members: Members) -> list[Message]:
    """Messages with one text each."""
    sent = _take_messages(members, "messages")
    if not sent:
        raise BadRequest("Expected at least one message, an object with `role` and `content` - at `$.messages`")
    return [_message(place, one) for place, one in enumerate(sent)]


def _message(place: int, sent: _Sent) -> Message:
    if sent.content is None:
        raise BadRequest(f"Expected text; the calls of tools are not served - at `$.messages[{place}].content`")
    message = {"role": sent.role, "content": text_of(sent.content, f"$.messages[{place}]", ("text",))}
    if sent.name is not None:
        message["name"] = sent.name
    return message


def text_of(content: str | list[Part], where: str, kinds: Collection[str]) -> str:
    """Text of a message's content.

    Arguments:
        content: the text, or parts whose texts are joined by line breaks.
        where: path of the message in the body.
        kinds: types of parts that are text.

    Raises:
        BadRequest: a part is no text.
    """
    if isinstance(content, str):
        return content
    for at, part in enumerate(content):
        place = f"`{where}.content[{at}]`"
        if part.type not in kinds:
            kind = part.type[:40]
            raise BadRequest(f"a part of type {kind!r} is not taken, only text; send the text alone - at {place}")
        if part.text is None:
            raise BadRequest(f"Object missing required field `text` - at {place}")
    return "\n".join([part.text or "" for part in content])

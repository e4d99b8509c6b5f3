"""Codec of POST /v1/responses: instructions and input are one conversation, as of a chat, and the model answers it with text.

Nothing is stored, so that a response is known to its own answer alone. A stream has all events of a response at once, since a
model's answer is there as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import time
from typing import Any

import msgspec

from headway.config import Settings
from headway.errors import BadRequest
from headway.gateway.served_models import KnownModels
from headway.http.inference.answer_pieces import HOLE, PIECE, value_within
from headway.http.inference.bodies import input_checker
from headway.http.inference.codecs import Codec
from headway.http.inference.exchange import JSON, Exchange, Outcome, Written
from headway.http.openai.answers import EVENTS, RichText, told_of
from headway.http.openai.chat import Part, templates, text_of
from headway.http.openai.chat_template import Message
from headway.http.openai.members import (
    Members,
    member,
    openai_codec,
    parameters_reader,
    read_members,
    refuse,
    take_flag,
    take_text,
)
from headway.model import RequestOptions

_STORED = "responses are not stored; send the whole conversation as `input`, and leave it out"
_UNSERVED = {
    "tools": "tools are not served, as the model gives text only; describe them in `instructions`, and leave them out",
    "previous_response_id": _STORED,
    "conversation": _STORED,
    "background": "responses in the background are not served; ask /v1/inference for a task, or leave it out",
    "prompt": "stored prompts are not served; send their text as `input`, and leave it out",
    "include": "nothing is there but text and usage; leave it out",
    "top_logprobs": "log probabilities are not served, as the model gives text only; leave it out",
}
_DROPPED = ("user", "store", "stream_options", "tool_choice", "parallel_tool_calls", "max_tool_calls", "truncation")
"""Members that change nothing here."""

_HOLE = HOLE.encode()
_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p")
_TEXTS = ("input_text", "output_text", "text")
"""Types of parts that are text."""

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reasons for which an answer has ended early, by the target's `finish_reason`."""

SETTLED: dict[str, Any] = {
    "error": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "store": False,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "text": {"format": {"type": "text"}},
    **dict.fromkeys(_ECHOED),
}
"""Members of an answer that the model has no part in, where the request says nothing of them."""


class _Item(msgspec.Struct, gc=False):
    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None


class _Format(msgspec.Struct, gc=False):
    type: str = "text"


class _TextOptions(msgspec.Struct, gc=False):
    format: _Format | None = None


_take_input = member(str | list[_Item])
_take_metadata = member(dict[str, str])
_read_text_options = msgspec.json.Decoder(_TextOptions | None)
_encode = msgspec.json.Encoder().encode


def responses(settings: Settings) -> Codec:
    """Make the codec.

    Raises:
        SettingError: a template of chats cannot be used.
    """
    check, parameters = input_checker(settings), parameters_reader(settings)
    render_for = templates(settings)

    def make(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        members = read_members(body)
        model = take_text(members, "model") or known.default
        echoed: dict[str, Any] = {name: members[name] for name in _ECHOED if name in members}
        messages = _messages(members)
        text = check(render_for(model)(messages))
        stream, metadata = bool(take_flag(members, "stream")), _take_metadata(members, "metadata")
        _check_format(members)
        refuse(members, _UNSERVED)
        for name in _DROPPED:
            members.pop(name, None)
        members["messages"] = msgspec.Raw(_encode(messages))
        write = _Writer(model, stream, {**SETTLED, **echoed, "metadata": metadata or {}})
        return Exchange(model, text, parameters(members), options, write)

    return openai_codec(make)


def _messages(members: Members) -> list[Message]:
    """Conversation of instructions and input."""
    instructions, sent = take_text(members, "instructions"), _take_input(members, "input")
    messages = [] if not instructions else [{"role": "system", "content": instructions}]
    if isinstance(sent, str):
        return [*messages, {"role": "user", "content": sent}]
    if not sent:
        raise BadRequest("Expected a text, or at least one message with `role` and `content` - at `$.input`")
    return [*messages, *[_message(place, one) for place, one in enumerate(sent)]]


def _message(place: int, item: _Item) -> Message:
    where = f"$.input[{place}]"
    if item.type != "message":
        kind = item.type[:40]
        raise BadRequest(f"an item of type {kind!r} is not taken, only messages; send its text in one - at `{where}`")
    if item.role is None or item.content is None:
        missing = "role" if item.role is None else "content"
        raise BadRequest(f"Object missing required field `{missing}` - at `{where}`")
    return {"role": item.role, "content": text_of(item.content, where, _TEXTS)}


def _check_format(members: Members) -> None:
    """Refuse any form of the answer but text. The rest of `text`, such as `verbosity`, reaches the target."""
    raw = members.get("text")
    if raw is None:
        return
    try:
        asked = _read_text_options.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise BadRequest(f"{exc}; expected an object - at `$.text`") from None
    if asked is not None and asked.format is not None and asked.format.type != "text":
        kind = asked.format.type[:40]
        raise BadRequest(f"an answer of format {kind!r} is not served, only text; leave it out - at `$.text.format`")


class _Writer(msgspec.Struct, frozen=True):
    """Writer of the answer to one request.

    Attributes:
        model: name of the model as the client sent it.
        stream: whether it comes as server-sent events.
        rest: members of the answer that the request alone decides.
    """

    model: str
    stream: bool
    rest: dict[str, Any]

    def __call__(self, outcome: Outcome) -> Written:
        told, now, id = told_of(outcome.outputs[0], *outcome.tokens), int(time()), outcome.id[4:]
        why = _INCOMPLETE.get(told.finish_reason)
        status = "incomplete" if why else "completed"
        is_large = len(told.text) > PIECE
        part = {"type": "output_text", "text": HOLE if is_large else told.text, "annotations": [], "logprobs": []}
        message = {
            "type": "message",
            "id": f"msg_{id}",
            "status": status,
            "role": "assistant",
            "content": [part],
        }
        head = {"id": f"resp_{id}", "object": "response", "created_at": now, "model": self.model, **self.rest}
        ended = {
            **head,
            "status": status,
            "incomplete_details": {"reason": why} if why else None,
            "completed_at": None if why else now,
            "output": [message],
            "usage": _usage(told),
        }
        if self.stream:
            return EVENTS, _events(head, message, ended, told.text)
        document = _encode(ended)
        return JSON, value_within(document, told.text) if is_large else document


def _events(head: dict[str, Any], message: dict[str, Any], ended: dict[str, Any], text: str) -> Iterator[bytes]:
    """Server-sent events of one response, in pieces: five of them hold its text, or a hole for it."""
    begun = {**head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    (part,) = message["content"]
    item = {"output_index": 0, "item": {**message, "status": "in_progress", "content": []}}
    place = {"item_id": message["id"], "output_index": 0, "content_index": 0}
    each: list[tuple[str, dict[str, Any]]] = [
        ("created", {"response": begun}),
        ("in_progress", {"response": begun}),
        ("output_item.added", item),
        ("content_part.added", {**place, "part": {**part, "text": ""}}),
        ("output_text.delta", {**place, "delta": part["text"], "logprobs": []}),
        ("output_text.done", {**place, "text": part["text"], "logprobs": []}),
        ("content_part.done", {**place, "part": part}),
        ("output_item.done", {"output_index": 0, "item": message}),
        (ended["status"], {"response": ended}),
    ]
    for number, (kind, more) in enumerate(each):
        data = _encode({"type": f"response.{kind}", "sequence_number": number, **more})
        yield b"event: response.%b\ndata: " % kind.encode()
        yield from value_within(data, text) if _HOLE in data else (data,)
        yield b"\n\n"


def _usage(told: RichText) -> dict[str, Any] | None:
    usage = told.usage
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

"""Codec of POST /v1/responses. Instructions and input form a conversation, which the model answers with text.

Responses are not stored. Models return complete outputs, so a stream sends all events of a response at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import time
from typing import Any

import msgspec

from headway.config import Settings
from headway.core.json_pages import Steps
from headway.doors.answer_pieces import HOLE, PIECE, value_within
from headway.doors.bodies import check_text
from headway.doors.exchange import JSON, Exchange, Outcome, Reader, Written
from headway.errors import BadRequest
from headway.gateway.served_model import ServedModel
from headway.gateway.served_models import KnownModels
from headway.http.openai.answers import EVENTS, RichText, rich_text
from headway.http.openai.chat import Message, Part, load_long_template, load_template, read_in_steps, templates, text_of
from headway.http.openai.members import (
    Converse,
    Format,
    Members,
    check_format,
    check_messages,
    drop_user,
    long_reader,
    member,
    parameters_reader,
    read_members,
    refuse,
    take_flag,
    take_text,
)
from headway.model import RequestOptions

_STORED = "responses are not stored; leave this out, and send the whole conversation as `input`"
_TOOLS = (
    "tools are not supported, because the model returns only text; leave them out, and describe them in `instructions`"
)
_UNSERVED = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "previous_response_id": _STORED,
    "conversation": _STORED,
    "background": "background responses are not supported; leave this out, or use /v1/inference for tasks",
    "prompt": "stored prompts are not supported; leave this out, and send their text as `input`",
    "include": "a response has only text and usage; leave this out",
    "modalities": "the model returns only text; leave this out",
    "top_logprobs": "log probabilities are not supported, because the model returns only text; leave this out",
}
_DROPPED = ("store", "stream_options", "parallel_tool_calls", "max_tool_calls", "truncation")

_HOLE = HOLE.encode()
_UNSET: dict[str, Any] = {  # Defaults of members that the answer repeats. Some clients don't accept null for a number.
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "presence_penalty": 0.0,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "user": None,
}
_TEXTS = ("input_text", "output_text", "text")

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reasons for an incomplete response, by the target's `finish_reason`."""

SETTLED: dict[str, Any] = {  # Members of each answer, unless the request has other values.
    "background": False,
    "error": None,
    "max_tool_calls": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "service_tier": "default",
    "store": False,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "text": {"format": {"type": "text"}},
    **_UNSET,
}


class _Item(msgspec.Struct, gc=False):
    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None


class _TextOptions(msgspec.Struct, gc=False):
    format: Format | None = None


_take_input = member(str | list[_Item])
_take_metadata = member(dict[str, str])
_take_text_options = member(_TextOptions)
_read_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_ONE_ITEM = msgspec.Raw(b'""')


def responses_reader(settings: Settings) -> Reader:
    """Return the reader of request bodies. Raises SettingError if a chat template can't be used."""
    parameters = parameters_reader(settings)
    render_for = templates(settings, load_template)

    def make(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        members = read_members(body)
        model = take_text(members, "model") or known.default
        served = known[model]
        echoed = {name: members[name] for name in _UNSET if bytes(members.get(name, b"null")) != b"null"}
        messages = _messages(members)
        text = check_text(render_for(model)(messages))
        stream, metadata = bool(take_flag(members, "stream")), _take_metadata(members, "metadata")
        if "text" in members:
            echoed["text"] = _text_options(members, served)
        drop_user(members, served)
        refuse(members, _UNSERVED)
        for name in _DROPPED:
            members.pop(name, None)
        members["messages"] = msgspec.Raw(_encode(messages))
        write = _Writer(model, stream, {**SETTLED, **echoed, "metadata": metadata or {}})
        return Exchange(model, text, parameters(members), options, write)

    return Reader(make, long_reader(make, settings, "input", _converse(settings)))


def _converse(settings: Settings) -> Converse:
    render_for = templates(settings, load_long_template)

    def converse(members: Members, known: KnownModels) -> Steps[tuple[str, msgspec.Raw]]:
        yield from check_messages(bytes(members.get("input", b"")), "input")
        members = {**members}
        model = take_text(members, "model") or known.default
        messages = yield from _messages_in_steps(members)
        yield 0
        text = yield from render_for(model)(messages)
        yield 0
        text = check_text(text)
        yield 0
        return text, msgspec.Raw(_encode(messages))

    return converse


def _messages(members: Members) -> list[Message]:
    instructions, sent = take_text(members, "instructions"), _take_input(members, "input")
    messages = [] if not instructions else [{"role": "system", "content": instructions}]
    if isinstance(sent, str):
        return [*messages, {"role": "user", "content": sent}]
    if not sent:
        raise BadRequest("Expected a string, or at least one message with `role` and `content` - at `$.input`")
    return [*messages, *[_message(place, item) for place, item in enumerate(sent)]]


def _messages_in_steps(members: Members) -> Steps[list[Message]]:
    sent = _take_input({**members}, "input")
    if not isinstance(sent, list):
        return _messages(members)
    instructions = _messages({**members, "input": _ONE_ITEM})[:-1]
    return [*instructions, *(yield from read_in_steps(sent, "input", _message))]


def _message(place: int, item: _Item) -> Message:
    where = f"$.input[{place}]"
    if item.type != "message":
        kind = item.type[:40]
        raise BadRequest(
            f"an item of type {kind!r} is not supported, only messages are; send its text in a message - at `{where}`"
        )
    if item.role is None or item.content is None:
        missing = "role" if item.role is None else "content"
        raise BadRequest(f"Object missing required field `{missing}` - at `{where}`")
    return {"role": item.role, "content": text_of(item.content, where, _TEXTS)}


def _text_options(members: Members, model: ServedModel) -> Any:
    """Check the member `text`, and leave it as a parameter. Return its value for the answer. Raises BadRequest."""
    raw = members["text"]
    options = _take_text_options(members, "text")
    members["text"] = raw
    if options is None:
        return SETTLED["text"]
    check_format(options.format, model, "text", "$.text.format")
    return raw if options.format is not None else {**_read_members(raw), **SETTLED["text"]}


class _Writer(msgspec.Struct, frozen=True):
    """Writes the answer to one request. `model` is the name that the client sent. If `stream`, the answer is server-sent events.
    `echoed` has the members that depend only on the request."""

    model: str
    stream: bool
    echoed: dict[str, Any]

    def __call__(self, outcome: Outcome) -> Written:
        answer, now, id = rich_text(outcome.outputs[0], outcome.tokens[0]), int(time()), outcome.id[4:]
        reason = _INCOMPLETE.get(answer.finish_reason)
        status = "incomplete" if reason else "completed"
        is_large = len(answer.text) > PIECE
        part = {"type": "output_text", "text": HOLE if is_large else answer.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{id}", "status": status, "role": "assistant", "content": [part]}
        head = {"id": f"resp_{id}", "object": "response", "created_at": now, "model": self.model, **self.echoed}
        ended = {
            **head,
            "status": status,
            "incomplete_details": {"reason": reason} if reason else None,
            "completed_at": None if reason else now,
            "output": [message],
            "usage": _usage(answer),
        }
        if self.stream:
            return EVENTS, _events(head, message, ended, answer.text)
        document = _encode(ended)
        return JSON, value_within(document, answer.text) if is_large else document


def _events(head: dict[str, Any], message: dict[str, Any], ended: dict[str, Any], text: str) -> Iterator[bytes]:
    """Yield the server-sent events of a response in pieces. They may contain HOLE in place of a large `text`."""
    open_members = dict.fromkeys(("completed_at", "incomplete_details", "usage"))
    begun = {**head, "status": "in_progress", **open_members, "output": []}
    (part,) = message["content"]
    item = {"output_index": 0, "item": {**message, "status": "in_progress", "content": []}}
    place = {"item_id": message["id"], "output_index": 0, "content_index": 0}
    events: list[tuple[str, dict[str, Any]]] = [
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
    for number, (kind, content) in enumerate(events):
        data = _encode({"type": f"response.{kind}", "sequence_number": number, **content})
        yield b"event: response.%b\ndata: " % kind.encode()
        yield from value_within(data, text) if _HOLE in data else (data,)
        yield b"\n\n"
    yield b"data: [DONE]\n\n"


def _usage(answer: RichText) -> dict[str, Any] | None:
    usage = answer.usage
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

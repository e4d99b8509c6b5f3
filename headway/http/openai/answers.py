"""Answers of completions and chats: one choice for each output, as a JSON object or as server-sent events.

Models return complete outputs, so a stream has only one event for each choice. An output is a text, or an object with `text` and
optionally `usage` and `finish_reason`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import time
from typing import Any

import msgspec

from headway.core.values import shown as shown_value
from headway.doors.answer_pieces import PIECE, array_within, released, tensor_pieces, text_pieces
from headway.doors.exchange import JSON, Outcome, ReadText, Usual, WriteText, Written
from headway.model import Tensors, TokenCount, Value

EVENTS = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"

FINISHED = "stop"
TEXT = "text_completion"
CHAT = "chat.completion"
_Tokens = Sequence[TokenCount | None]
_Head = tuple[str, str, int, str]  # The first members of an answer: id, object, created, model.


class Usage(msgspec.Struct, gc=False):
    """Number of tokens in one or more answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class RichText(msgspec.Struct, gc=False):
    """A target's output: its text, and optionally its usage and the reason why it ended."""

    text: str
    usage: Usage | None = None
    finish_reason: str = FINISHED


class _Body(msgspec.Struct, gc=False, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[()]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class _TextChoice(msgspec.Struct, gc=False):
    index: int
    text: str
    logprobs: None
    finish_reason: str


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str
    refusal: None


class _ChatChoice(msgspec.Struct, gc=False):
    index: int
    message: _Message
    logprobs: None
    finish_reason: str


class _DeltaChoice(msgspec.Struct, gc=False):
    index: int
    delta: _Message
    logprobs: None
    finish_reason: str


class _OneChoice(msgspec.Struct, gc=False):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[Any]
    usage: Usage | msgspec.UnsetType


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RichText).decode


class ChoicesWriter(msgspec.Struct):
    """Writes the answer to one request. `model` is the name that the client sent. If `stream`, the answer is server-sent
    events. If `usage`, these end with the usage. A prompt's tokens are counted once for all of its `choices`."""

    model: str
    chat: bool
    stream: bool
    usage: bool
    choices: int = 1

    def __call__(self, outcome: Outcome) -> Written:
        head = self._prefix + outcome.id[4:], self._kind(), int(time()), self.model
        write = self._events if self.stream else self._object
        return EVENTS if self.stream else JSON, write(head, outcome.outputs, outcome.tokens)

    def _events(self, head: _Head, outputs: Sequence[Value], tokens: _Tokens) -> Iterator[bytes]:
        empty = None if self.usage else msgspec.UNSET
        used: list[Usage | None] = []
        for index, output in enumerate(released(outputs)):
            answer = rich_text(output, tokens[index])
            used.append(answer.usage)
            yield b"data: "
            yield from array_within(_encode(_Body(*head, (), empty)), "choices", (self._choice(index, answer),))
            yield b"\n\n"
        if self.usage:
            yield b"data: %b\n\n" % _encode(_Body(*head, (), _sum(used, self.choices) or Usage()))
        yield b"data: [DONE]\n\n"

    def _object(self, head: _Head, outputs: Sequence[Value], tokens: _Tokens) -> Iterator[bytes]:
        used: list[Usage | None] = []
        yield _encode(_Body(*head, ())).removesuffix(b"]}")
        for index, output in enumerate(released(outputs)):
            answer = rich_text(output, tokens[index])
            used.append(answer.usage)
            yield b"," if index else b""
            yield from self._choice(index, answer)
        usage = _sum(used, self.choices)
        if usage is None and not self.chat:
            usage = Usage()  # Some clients, including LangChain, fail without it.
        yield b"]}" if usage is None else b'],"usage":%b}' % _encode(usage)

    def usual(self, read: ReadText) -> Usual | None:
        """Return the fast path for requests with one choice, or None if a stream must end with usage. `read` decodes the
        bodies."""
        write = self._text_writer(msgspec.UNSET if self.chat or self.stream else Usage())
        if not self.stream:
            return Usual(read, write, JSON, self)

        def write_events(shown: str, text: str, milliseconds: float, version: str, tokens: TokenCount | None) -> bytes:
            return b"data: %b\n\ndata: [DONE]\n\n" % write(shown, text, milliseconds, version, None)

        return None if self.usage else Usual(read, write_events, EVENTS, self)

    def _text_writer(self, unknown: Usage | msgspec.UnsetType) -> WriteText:
        kind, model, prefix, chat = self._kind(), self.model, self._prefix, self.chat
        message_choice = _DeltaChoice if self.stream else _ChatChoice

        def write(shown: str, text: str, milliseconds: float, version: str, tokens: TokenCount | None) -> bytes:
            usage = unknown if tokens is None else Usage(tokens.prompt, tokens.used - tokens.prompt, tokens.used)
            choice: Any
            if chat:
                choice = message_choice(0, _Message("assistant", text, None), None, FINISHED)
            else:
                choice = _TextChoice(0, text, None, FINISHED)
            return _encode(_OneChoice(prefix + shown[4:], kind, int(time()), model, (choice,), usage))

        return write

    @property
    def _prefix(self) -> str:
        return "chatcmpl-" if self.chat else "cmpl-"

    def _kind(self) -> str:
        if not self.chat:
            return TEXT
        return "chat.completion.chunk" if self.stream else CHAT

    def _choice(self, index: int, answer: RichText) -> Iterator[bytes]:
        if len(answer.text) <= PIECE:
            yield _encode(self._choice_struct(index, answer.text, answer.finish_reason))
            return
        head, _, tail = _encode(self._choice_struct(index, "", answer.finish_reason)).partition(b'""')
        yield head
        yield from text_pieces(answer.text)
        yield tail

    def _choice_struct(self, index: int, text: str, reason: str) -> Any:
        if not self.chat:
            return _TextChoice(index, text, None, reason)
        message = _Message("assistant", text, None)
        return (_DeltaChoice if self.stream else _ChatChoice)(index, message, None, reason)


def rich_text(output: Value, tokens: TokenCount | None = None) -> RichText:
    """Return the text of an output, with its usage and the reason why it ended. `tokens` is the usage if the target reports it
    separately. Raises RequestError for tensors that JSON can't represent."""
    usage = None if tokens is None else Usage(tokens.prompt, tokens.used - tokens.prompt)
    if isinstance(output, str):
        return RichText(output, usage)
    if isinstance(output, Tensors):
        return RichText(b"".join(tensor_pieces(output)).decode(), usage)
    if isinstance(output, bytes) and output[:1] == b"{":
        try:
            answer = _decode(output)
        except msgspec.MsgspecError:
            pass
        else:
            return answer if answer.usage is not None else RichText(answer.text, usage, answer.finish_reason)
    return RichText(shown_value(output), usage)


def _sum(each: Sequence[Usage | None], choices: int) -> Usage | None:
    """Return the sum of the known usages, or None if none is known. A prompt's tokens are counted once for all of its choices."""
    known = [usage for usage in each if usage is not None]
    if not known:
        return None
    by_prompt = (filter(None, each[first : first + choices]) for first in range(0, len(each), choices))
    prompt = sum(usage.prompt_tokens for usages in by_prompt if (usage := next(usages, None)) is not None)
    completion = sum(usage.completion_tokens for usage in known)
    return Usage(prompt, completion, prompt + completion)

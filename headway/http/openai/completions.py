"""Codec of POST /v1/completions. Each prompt becomes `n` entries."""

from __future__ import annotations

from functools import partial

import msgspec

from headway.config import Settings
from headway.doors.bodies import check_text
from headway.doors.exchange import Exchange, Reader, unusual
from headway.errors import BadRequest, PayloadTooLarge
from headway.gateway.served_models import KnownModels
from headway.http.openai.answers import ChoicesWriter
from headway.http.openai.members import (
    MOST_TEXTS,
    Members,
    Plain,
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

_UNSERVED = {
    "logprobs": "log probabilities are not served, as the model gives text only; leave it out",
    "echo": "echo is not served; put the prompt before the answer yourself, and leave it out",
    "best_of": "best_of is not served; ask for n choices and choose among them, and leave it out",
}


class _StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None


class _Plain(Plain, kw_only=True, gc=False):
    prompt: str


_decode_plain = msgspec.json.Decoder(_Plain).decode
_PLAIN = frozenset(_Plain.__struct_fields__)
_take_stream_options = member(_StreamOptions)


def completions_reader(settings: Settings) -> Reader:
    """Make the reader of request bodies."""
    limit = min(MOST_TEXTS, settings.max_queue)
    parameters = parameters_reader(settings)

    def make(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        members = read_members(body)
        is_plain, model = members.keys() <= _PLAIN, take_text(members, "model") or known.default
        prompts = take_inputs(members, "prompt", limit, check_text)
        count = choices(members, limit // len(prompts))
        if bytes(members.get("best_of", b"")) == b"%d" % count:  # Then it has no effect.
            del members["best_of"]
        write = writer(members, model, False, count)
        drop_user(members, known[model])
        if not members.keys().isdisjoint(_UNSERVED):
            refuse(members, _UNSERVED)
        entries = [prompt for prompt in prompts for _ in range(count)]
        exchange = Exchange(model, entries[0] if len(entries) == 1 else [*entries], parameters(members), options, write)
        if len(entries) == 1:
            exchange.usual = write.usual(partial(_read_plain, model, write.stream) if is_plain else unusual)
        return exchange

    return Reader(make, long_reader(make, settings, "prompt"))


def _read_plain(model: str, stream: bool, body: bytes) -> tuple[str, str, bytes]:
    request = read_plain(_decode_plain, stream, body)
    return request.model or model, check_text(request.prompt), b""


def choices(members: Members, room: int) -> int:
    """Take the member `n`, the choices of each prompt. At most `room` fit into one request. Raises RequestError."""
    n: int | None = take_number(members, "n")
    count = 1 if n is None else n
    if not 1 <= count <= MOST_CHOICES:
        raise BadRequest(f"n is {count}; expected a number from 1 to {MOST_CHOICES} - at `$.n`")
    if count > room:
        raise PayloadTooLarge(f"n is {count}; with these prompts at most {room} fit into one request - at `$.n`")
    return count


def writer(members: Members, model: str, chat: bool, count: int) -> ChoicesWriter:
    """Take the members about streaming, and make the writer of the answer. Raises BadRequest."""
    stream = bool(take_flag(members, "stream"))
    options = _take_stream_options(members, "stream_options")
    if options is not None and not stream:
        raise BadRequest("stream_options is for streams; leave it out, or set stream - at `$.stream_options`")
    return ChoicesWriter(model, chat, stream, options is not None and bool(options.include_usage), count)

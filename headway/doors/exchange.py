"""Exchange: the common shape of every request between its decoded body and its answer.

A reader turns a body into an exchange, whose `write` function holds whatever the answer needs. An HTTP route makes one reader for
each head, and uses it for every body that follows an equal head on the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
from msgspec.structs import replace

from headway.config import Settings
from headway.core.json_pages import Steps
from headway.errors import BadRequest
from headway.gateway.served_models import KnownModels
from headway.model import DedupKind, Reply, RequestOptions, TokenCount, Value
from headway.runtime.counters import GatewayCounts

_MARKS = {
    (DedupKind.SAME, True): (("x-headway-cache", "hit"),),
    (DedupKind.SAME, False): (("x-headway-cache", "collapsed"),),
    (DedupKind.KEY, True): (("idempotency-replayed", "true"),),
    (DedupKind.KEY, False): (("idempotency-replayed", "true"),),
}
"""Header fields of an answer that another request's outcome serves: by what the two share, and whether it was stored."""


def outcome_headers(reply: Reply) -> tuple[tuple[str, str], ...]:
    """Return header fields, or metadata, that say whether an outcome was replayed or cached, or couldn't be stored."""
    shared = () if reply.shared is None else _MARKS.get((reply.shared, reply.kept), ())
    return (*shared, ("x-headway-kept", "no")) if reply.unkept else shared


JSON = b"content-type: application/json\r\n"

Written = tuple[bytes, bytes | Iterator[bytes]]
"""Header lines of an answer, with their line ends and including Content-Type, and its body. With several outputs, the body is an
iterator of pieces that are quick to make. It raises the errors of `WriteAnswer`."""


class Outcome(msgspec.Struct, gc=False):
    """Outcome of a request whose inputs all have an output. `id` is as clients see it. `outputs` and `tokens` have one element
    for each input; tokens are None if not reported. `milliseconds` passed from the complete request to its answer."""

    id: str
    outputs: Sequence[Value]
    milliseconds: float
    version: str
    tokens: Sequence[TokenCount | None]


WriteAnswer = Callable[[Outcome], Written]
"""Write the answer to a request. Raises RequestError if the API can't express an output, UnicodeEncodeError for lone surrogates."""


ReadText = Callable[[bytes], tuple[str | None, str, bytes]]
"""Read a body with one text into (model or None, input, parameters). Raises RequestError for any other body."""
WriteText = Callable[[str, Any, float, str, TokenCount | None], bytes]
"""Write the body of an answer. The arguments are the members of an Outcome with one output, or several on routes that take lists.
An output that isn't a text comes as Raw. Raises UnicodeEncodeError for a lone surrogate."""


class Usual(msgspec.Struct, frozen=True):
    """Fast path of a head whose requests differ only in their text, so nothing has to be kept for each request.

    `read` is `unusual` if the head has no fast path for reading. `write` writes an answer with a plain text, with the header
    lines `kind`. `write_any` writes any other answer."""

    read: ReadText
    write: WriteText
    kind: bytes
    write_any: WriteAnswer


UNUSUAL = BadRequest("the body has another reader")
"""Raised for a body that `Usual.read` leaves to the general reader. No client sees it."""


def unusual(body: bytes) -> NoReturn:
    """Leave a body to the general reader."""
    raise UNUSUAL


class Exchange(msgspec.Struct):
    """One request between its body and its answer.

    `model` is None for the default model. Each member of a list `input` becomes an entry. `parameters` is a JSON object, or
    empty. `id` is the client's own id if a failure must mention it, or empty. `final` is True if an answer on a stream
    must say that it is the last. `usual` is the fast path for requests like this one, or None."""

    model: str | None
    input: Value | list[Value]
    parameters: bytes
    options: RequestOptions
    write: WriteAnswer
    id: str = ""
    final: bool = False
    usual: Usual | None = None


ReadRequest = Callable[[bytes, RequestOptions, KnownModels], Exchange]
"""Read a body or message, given the options from its head and the models its principal may use. Raises RequestError."""


class CodecContext(msgspec.Struct, frozen=True):
    """Facts about the service that readers of requests need. `counters` count requests of clients that retry."""

    settings: Settings
    known: KnownModels
    counters: GatewayCounts

    def seen_by(self, only: Collection[str]) -> CodecContext:
        """Return a copy that shows only the models in `only`, which a credential is limited to, or empty for all."""
        return replace(self, known=self.known.seen_by(only)) if only else self


ReadInSteps = Callable[[bytes, RequestOptions, KnownModels], Steps[Exchange]]
"""Read a long body as ReadRequest does, a little at a time."""


class Reader(NamedTuple):
    """Reader of the bodies under one head. `in_steps` is None if reading costs next to nothing, as for octets."""

    at_once: ReadRequest
    in_steps: ReadInSteps | None = None

    def steps(self, body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
        """Read a long body in steps, or in a single one if reading costs next to nothing."""
        if self.in_steps is None:
            yield 0
            return self.at_once(body, options, known)
        return (yield from self.in_steps(body, options, known))

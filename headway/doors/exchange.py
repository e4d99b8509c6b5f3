"""Exchange: a request between its decoded body and its answer, in the same form for every API.

A reader makes an exchange from a body. The exchange's `write` function knows all that the answer needs. An HTTP route makes one
reader for a head, and uses it for all bodies that follow an equal head on the connection.
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
"""Header fields of an answer that reuses another request's outcome, by kind of deduplication and whether it was stored."""


def outcome_headers(reply: Reply) -> tuple[tuple[str, str], ...]:
    """Return header fields (or gRPC metadata) that mark a replayed, cached or unstored outcome."""
    shared = () if reply.shared is None else _MARKS.get((reply.shared, reply.kept), ())
    return (*shared, ("x-headway-kept", "no")) if reply.unkept else shared


JSON = b"content-type: application/json\r\n"

Written = tuple[bytes, bytes | Iterator[bytes]]
"""Header lines of an answer, with Content-Type, and its body. Large bodies are iterators, which raise as `WriteAnswer` does."""


class Outcome(msgspec.Struct, gc=False):
    """Outcome of a request whose inputs all have an output. `id` is the public one, `req_…`. `outputs` and `tokens` have an element
    for each input; tokens are None if not reported. `milliseconds` have passed since the request was complete."""

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
"""Write the body of an answer. The arguments are the members of an Outcome with one output (several on routes that take lists).
An output that isn't a text is given as Raw. Raises UnicodeEncodeError for a lone surrogate."""


class Usual(msgspec.Struct, frozen=True):
    """Fast path of a head whose requests differ only in their text. It keeps nothing for each request.

    `read` is `unusual` if the head has no fast path for reading. `write` writes an answer with a plain text, whose header lines
    are `kind`. `write_any` writes all other answers."""

    read: ReadText
    write: WriteText
    kind: bytes
    write_any: WriteAnswer


UNUSUAL = BadRequest("the body has another reader")
"""Raised for a body that `Usual.read` leaves to the general reader. No client sees it."""


def unusual(body: bytes) -> NoReturn:
    """Raise UNUSUAL: this head has no fast path."""
    raise UNUSUAL


class Exchange(msgspec.Struct):
    """One request between its body and its answer.

    `model` is None for the default model. Each element of a list `input` becomes an entry. `parameters` is a JSON object or
    empty. `id` is the client's own id if a failure has to mention it, or empty. `final` is True if the last answer on a stream
    has to be marked. `usual` is the fast path for requests like this one, or None."""

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
    """Facts about the service that readers of requests need."""

    settings: Settings
    known: KnownModels
    counters: GatewayCounts

    def seen_by(self, only: Collection[str]) -> CodecContext:
        """Return a copy with only the models in `only`, which a credential may use. Empty means all."""
        return replace(self, known=self.known.seen_by(only)) if only else self


ReadInSteps = Callable[[bytes, RequestOptions, KnownModels], Steps[Exchange]]
"""Read a long body in steps; see ReadRequest."""


class Reader(NamedTuple):
    """Reader of the bodies that follow one head. `in_steps` is None if reading is fast for any body, as for octets."""

    at_once: ReadRequest
    in_steps: ReadInSteps | None = None

    def steps(self, body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
        """Read a long body in steps, or in a single step if reading is fast for any body."""
        if self.in_steps is None:
            yield 0
            return self.at_once(body, options, known)
        return (yield from self.in_steps(body, options, known))

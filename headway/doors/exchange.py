"""Exchange: a request after its body has been decoded and before its answer is written, in the same form for every API.

A reader turns a body into an exchange, whose `write` function knows all that the answer needs from the request. An HTTP route
makes a reader for each distinct head, and uses it for all bodies that follow an identical head on the same connection.
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

_MARKS = {  # Header fields of a reused outcome, by kind of deduplication and whether it was stored.
    (DedupKind.SAME, True): (("x-headway-cache", "hit"),),
    (DedupKind.SAME, False): (("x-headway-cache", "collapsed"),),
    (DedupKind.KEY, True): (("idempotency-replayed", "true"),),
    (DedupKind.KEY, False): (("idempotency-replayed", "true"),),
}


def outcome_headers(reply: Reply) -> tuple[tuple[str, str], ...]:
    """Return the header fields (or gRPC metadata) that mark an outcome as replayed, cached, or too large to keep."""
    shared = () if reply.shared is None else _MARKS.get((reply.shared, reply.kept), ())
    return (*shared, ("x-headway-kept", "no")) if reply.unkept else shared


JSON = b"content-type: application/json\r\n"

Written = tuple[bytes, bytes | Iterator[bytes]]
"""An answer's header lines, including Content-Type, and its body. A large body is an iterator, which may raise the same errors
as `WriteAnswer`."""


class Outcome(msgspec.Struct, gc=False):
    """The outputs of a successful request. `id` is the public id, `req_…`. `outputs` and `tokens` have one element per input;
    tokens are None if not reported. `milliseconds` is the time since the request was complete."""

    id: str
    outputs: Sequence[Value]
    milliseconds: float
    version: str
    tokens: Sequence[TokenCount | None]


WriteAnswer = Callable[[Outcome], Written]
"""Writes an answer. Raises RequestError if the API can't represent an output, UnicodeEncodeError for a lone surrogate."""


ReadText = Callable[[bytes], tuple[str | None, str, bytes]]
"""Decodes a body with a single text into (model or None, input, parameters). Raises RequestError for any other body."""
WriteText = Callable[[str, Any, float, str, TokenCount | None], bytes]
"""Writes the body of an answer. The arguments are an Outcome's fields, but with the only output (or a list of several)
and the total token count. An output that isn't text is passed as Raw. Raises UnicodeEncodeError for a lone surrogate."""


class Usual(msgspec.Struct, frozen=True):
    """The fast path for a head whose requests differ only in their text. It stores nothing per request. `read` decodes bodies;
    it is `unusual` if only answers have a fast path. `write` encodes an answer whose output is text; `kind` has its header
    lines. `write_any` encodes all other answers."""

    read: ReadText
    write: WriteText
    kind: bytes
    write_any: WriteAnswer


UNUSUAL = BadRequest("the body has another reader")  # Leaves a body to the general reader. Clients never see it.


def unusual(body: bytes) -> NoReturn:
    """Raise UNUSUAL: this head has no fast path."""
    raise UNUSUAL


class Exchange(msgspec.Struct):
    """A request after its body has been decoded and before its answer is written.

    `model` is None for the default model. If `input` is a list, each element becomes an entry. `parameters` is a JSON object or
    empty. `id` is the client's own id if failures must include it, otherwise empty. `final` is True if the last answer on a stream
    must be marked. `usual` is the fast path for requests like this one, or None."""

    model: str | None
    input: Value | list[Value]
    parameters: bytes
    options: RequestOptions
    write: WriteAnswer
    id: str = ""
    final: bool = False
    usual: Usual | None = None


ReadRequest = Callable[[bytes, RequestOptions, KnownModels], Exchange]
"""Decodes a body or message, given the options from its head and the models that its principal may use. Raises RequestError."""


class CodecContext(msgspec.Struct, frozen=True):
    """Facts about the service that request readers need."""

    settings: Settings
    known: KnownModels
    counters: GatewayCounts

    def seen_by(self, only: Collection[str]) -> CodecContext:
        """Return a copy restricted to `only`, the models that a credential may use. Empty means all."""
        return replace(self, known=self.known.seen_by(only)) if only else self


ReadInSteps = Callable[[bytes, RequestOptions, KnownModels], Steps[Exchange]]  # Decodes a long body; see ReadRequest.


class Reader(NamedTuple):
    """Decodes the bodies that follow one head. `in_steps` is None if decoding is fast for any body, as it is for octets."""

    at_once: ReadRequest
    in_steps: ReadInSteps | None = None

    def steps(self, body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
        """Decode a long body in steps, or in a single step if decoding is fast for any body."""
        if self.in_steps is None:
            yield 0
            return self.at_once(body, options, known)
        return (yield from self.in_steps(body, options, known))

"""Exchanges: the one shape of all requests between the body, or the message, and the answer.

A reader makes one of each body: what is asked, and the function that writes the answer, which holds whatever has to be remembered
until then. A route over HTTP opens each head once; its reader holds what the head says, and is used for every body under an equal
head on the same connection.
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
from headway.runtime.counters import Counters

_MARKS = {
    (DedupKind.SAME, True): (("x-headway-cache", "hit"),),
    (DedupKind.SAME, False): (("x-headway-cache", "collapsed"),),
    (DedupKind.KEY, True): (("idempotency-replayed", "true"),),
    (DedupKind.KEY, False): (("idempotency-replayed", "true"),),
}
"""Header fields of an answer that is another request's, by what they share and whether it was kept."""


def marks_of(reply: Reply) -> tuple[tuple[str, str], ...]:
    """Header fields, or metadata, on how an outcome came about, where that is another request's or is not kept."""
    found = () if reply.shared is None else _MARKS.get((reply.shared, reply.kept), ())
    return (*found, ("x-headway-kept", "no")) if reply.unkept else found


JSON = b"content-type: application/json\r\n"
"""Content type of an answer in JSON, as a line of its header."""

Written = tuple[bytes, bytes | Iterator[bytes]]
"""Lines of an answer's header, each with its end, the content type among them; and the answer's body.

The body of an answer with several outputs is an iterator of pieces, each of which is made in a short time. It raises what `WriteAnswer`
does.
"""


class Outcome(msgspec.Struct, gc=False):
    """Outcome of a request whose inputs all have an output, as its answer tells it.

    Attributes:
        id: id of the request as clients see it.
        outputs: outputs in the order of the inputs.
        milliseconds: time from the complete request to its answer.
        version: version of the model that answered.
        tokens: tokens that each input has used; None for one of which nobody has told.
    """

    id: str
    outputs: Sequence[Value]
    milliseconds: float
    version: str
    tokens: Sequence[TokenCount | None]


WriteAnswer = Callable[[Outcome], Written]
"""Writer of the answer to a request. Raises RequestError: an output is not what the API can answer with; UnicodeEncodeError: one
holds a lone surrogate."""


ReadText = Callable[[bytes], tuple[str | None, str, bytes]]
"""Body with one text to (model or None, input, parameters). Raises RequestError for any that it does not know."""
WriteText = Callable[[str, Any, float, str, TokenCount | None], bytes]
"""Writer of the body of an answer. Its arguments are the members of an Outcome, with one output or, where the route takes lists, with
several texts. What is no text comes as Raw. Raises UnicodeEncodeError: one has a lone surrogate."""


class Usual(msgspec.Struct, frozen=True):
    """Way of the requests under one head that ask alike but for a text: nothing has to be remembered of each.

    Attributes:
        read: reads their bodies; `unusual` where each has to be read as if it were the first.
        write: writes their usual answers.
        kind: lines of the header of these that say what they are.
        write_any: writes any other answer.
    """

    read: ReadText
    write: WriteText
    kind: bytes
    write_any: WriteAnswer


UNUSUAL = BadRequest("the body has another reader")
"""Error of a body that is not read by `Usual.read`. No client reads it."""


def unusual(body: bytes) -> NoReturn:
    """Leave a body to another reader."""
    raise UNUSUAL


class Exchange(msgspec.Struct):
    """One request between its body and its answer.

    Attributes:
        model: name of the model; None: the default one.
        input: the input, or a list of several, each of which becomes an entry.
        parameters: text of a JSON object, or empty.
        options: options of the request.
        write: writes the answer.
        id: id by which the client knows the request, where its API has one and its failure is to tell it; else empty.
        final: whether its answer on a stream says that it is the last.
        usual: way of others like it; None where each may ask for something else.
    """

    model: str | None
    input: Value | list[Value]
    parameters: bytes
    options: RequestOptions
    write: WriteAnswer
    id: str = ""
    final: bool = False
    usual: Usual | None = None


ReadRequest = Callable[[bytes, RequestOptions, KnownModels], Exchange]
"""Body or message, the options by its head, and the models that its principal may ask, to exchange. Raises RequestError."""


class CodecContext(msgspec.Struct, frozen=True):
    """Facts of the service that readers of requests go by.

    Attributes:
        settings: bounds, times, tiers and the default model.
        known: what the models take and give.
        counters: counters of what clients do.
    """

    settings: Settings
    known: KnownModels
    counters: Counters

    def seen_by(self, only: Collection[str]) -> CodecContext:
        """Facts that a credential may know which may ask `only` some models; see ServedModels."""
        return replace(self, known=self.known.seen_by(only)) if only else self


ReadInSteps = Callable[[bytes, RequestOptions, KnownModels], Steps[Exchange]]
"""The same for a long body, a little of it at a time. The steps raise RequestError."""


class Reader(NamedTuple):
    """Reader of the bodies under one head.

    Attributes:
        at_once: reads one in one go.
        in_steps: reads a long one; None where reading takes next to nothing, as of octets.
    """

    at_once: ReadRequest
    in_steps: ReadInSteps | None = None

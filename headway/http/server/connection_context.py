"""Context shared by all connections of one listener: limits, templates, counters, and whether the listener is closing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Literal

from headway.config import Settings
from headway.errors import RequestError
from headway.http.admission import Admission, NewId
from headway.http.inference.exchange import JSON, CodecContext
from headway.http.inference.routes import Routes
from headway.http.problem import EncodeError, encode_problem
from headway.http.requests import Handler, Request
from headway.http.server.hangups import Hangups
from headway.http.server.head import TRACE_FIELDS, Head, OtherProtocol, picked
from headway.model import RequestOptions
from headway.runtime.counters import Counters
from headway.runtime.fair_turns import FairTurns
from headway.runtime.listening import SPARE
from headway.runtime.protocol_hints import ProtocolHints

if TYPE_CHECKING:
    from headway.http.server.connection import Connection

LINGER = 1.0
"""Seconds for which a refused client may go on sending before it is cut off."""

GRACE = 1.0
"""Seconds of silence after which a closing listener drops an idle client."""

LARGE = 1 << 16
"""Bytes of a body from which it waits for its turn, as do those of an answer: to read one takes up to some tens of milliseconds."""
UPLOADS = b"/v1/files"
"""Target at which files are uploaded."""
FORM = 1 << 16
"""Bytes of an upload beside the file."""
SLOWEST = 16_384
"""Least bytes per second at which a client has to take its answer, or send an upload."""


class ConnectionContext:
    """Context shared by a listener's connections.

    Arguments:
        answer: answers the requests of ordinary routes.
        settings: limits and times.
        new_id: makes request ids.
        counters: counters of refusals.

    Attributes:
        hangups: watch for clients that leave while nothing is read from them.
        turns: line of the connections that have sent many requests at once.
        drops: line of the connections of which what comes is thrown away, as they are about to end.
        encode_error: encoder of errors where no inference route is known.
        scheme: scheme of the port's URLs.
        closing: whether every answer is its connection's last.
        shut: whether the port has closed, too: idle clients are dropped, and those that only wait for news are
            answered.
        label: what the port is called in the log.
        spare: file descriptors that its connections leave to others.
        fd_ceiling: first descriptor number at which a connection is refused.
        fd_brink: first descriptor number at which it is cut off without an answer.
        connections: open connections.
        tasks: requests of ordinary routes that are being answered.
    """

    label = "admin"
    spare = 8

    def __init__(self, answer: Handler, settings: Settings, new_id: NewId, counters: Counters) -> None:
        self.answer = answer
        self.settings = settings
        self.new_id = new_id
        self.encode_error: EncodeError = encode_problem
        self.counters = counters
        self.most_header = settings.max_header_bytes
        self.most_body = settings.max_body_bytes
        self.read_timeout = settings.read_timeout_ms / 1000
        self.keep_alive = settings.keep_alive_ms / 1000
        self.scheme: Literal["http", "https"] = "http"
        self.closing = False
        self.shut = asyncio.Event()
        self.date = b""
        self.fd_ceiling = self.fd_brink = 1 << 30
        self.loop = asyncio.get_running_loop()
        self.hangups = Hangups(self.loop)
        self.turns = FairTurns(loop=self.loop, rests=False)
        self.drops = FairTurns(loop=self.loop, rests=False)
        self._left = asyncio.Event()
        self._hints = ProtocolHints(self.label, self.loop.time)
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.refresh()

    def most_body_of(self, head: Head) -> int:
        """Bytes of the largest body that a request with this head to an ordinary route may have."""
        return self.most_body

    def refresh(self) -> None:
        """Bring the Date header up to date. The listener calls it now and then."""
        self.date = formatdate(usegmt=True).encode()

    def retire(self) -> None:
        """Make every answer its connection's last from now on."""
        self.closing = True

    def close(self) -> None:
        """Drop idle connections too, as the port closes."""
        self.retire()
        self.shut.set()

    def left(self) -> None:
        """Note that a connection has ended."""
        if not self.connections:
            self._left.set()

    async def emptied(self) -> None:
        """Return as soon as no connection is left."""
        while self.connections:
            self._left.clear()
            await self._left.wait()

    def refused(self, error: RequestError, tier: str | None) -> None:
        """Count a refusal under a tier; None: a gateway has counted it."""
        if isinstance(error, OtherProtocol):
            self._hints.tell(error.kind)
        if tier is not None:
            self.counters.refusals[error.reason or error.code.lower(), tier, ""] += 1

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin to answer a request of an ordinary route."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def trace_head(self, head: Head, id: str, error: RequestError, begun: float) -> None:
        """Record the span of a request that is refused after its head, if traces are recorded here."""

    def trace_answer(self, request: Request, status: int, begun: float) -> None:
        """Record the span of a request to an ordinary route that is answered with an error, if traces are recorded here."""


class InferenceContext(ConnectionContext):
    """Context of a listener with inference routes.

    Arguments:
        answer: answers the requests of ordinary routes.
        admission: admission of the requests of the inference routes.
    """

    label = "public"
    spare = SPARE

    def __init__(self, answer: Handler, admission: Admission) -> None:
        self.opening = self.bare_opening = b""
        settings, gateway = admission.settings, admission.gateway
        super().__init__(answer, settings, admission.new_id, admission.counters)
        self.admission, self.gateway = admission, gateway
        self.refusal_traces = admission.refusal_traces
        self.routes = Routes(settings)
        self.codec_context = CodecContext(settings, gateway.served, admission.counters)
        self.rate_limits = admission.rate_limits
        self.quotas = gateway.quotas
        self.large_bodies = FairTurns(loop=self.loop)
        self.most_at_once = min(self.most_body, LARGE - 1)
        self.served = gateway.served
        self.version = settings.model_version
        self.tiers = admission.tiers

    def most_body_of(self, head: Head) -> int:
        """Bytes of the largest body that a request with this head may have: of an upload, as many as a tenant may store."""
        upload = head.method == b"POST" and self.settings.bulk_dir and head.target == UPLOADS
        return self.settings.bulk_max_bytes + FORM if upload else self.most_body

    def trace_head(self, head: Head, id: str, error: RequestError, begun: float) -> None:
        """Record the span of a request that is refused after its head."""
        traces = self.refusal_traces
        if traces is not None:
            found = self.routes.find(head.target) if head.method == b"POST" else None
            way = found[0].way if found is not None else head.method.decode()
            traces.refused(way, head.single, id, error, begun)

    def trace_answer(self, request: Request, status: int, begun: float) -> None:
        """Record the span of a request to an ordinary route that is answered with an error, and that names a span."""
        if self.refusal_traces is None or status < 400:
            return
        if fields := picked(request.fields, TRACE_FIELDS, TRACE_FIELDS):
            self.refusal_traces.answered(request.method, request.path, fields, request.id, status, begun)

    def trace_refused(self, options: RequestOptions, id: str, error: RequestError, begun: float) -> None:
        """Record the span of a request whose head was good, and that is refused."""
        if self.refusal_traces is not None:
            self.refusal_traces.refused_below(options.trace, options.way, id, error, begun)

    def refresh(self) -> None:
        """Bring the Date header up to date, also in the prepared beginning of an answer."""
        super().refresh()
        bare = self.bare_opening = b"HTTP/1.1 200 OK\r\ndate: %b\r\nx-request-id: " % self.date
        self.opening = bare.replace(b"x-request-id", JSON + b"x-request-id")

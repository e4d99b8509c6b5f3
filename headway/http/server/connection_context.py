"""Context shared by all connections of one listener: limits, templates, counters, and whether the listener is closing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from email.utils import formatdate
from typing import Any, Literal

from headway.config import Settings
from headway.errors import RequestError
from headway.gateway.client_quotas import Quotas
from headway.http.problem import EncodeError, encode_problem
from headway.http.requests import Handler, Request
from headway.http.server.hangups import Hangups
from headway.http.server.head import Head, OtherProtocol
from headway.runtime.counters import GatewayCounts
from headway.runtime.fair_turns import FairTurns
from headway.runtime.protocol_hints import ProtocolHints
from headway.runtime.request_id import NewId

LINGER = 1.0
"""Seconds for which a refused client may go on sending before it is cut off."""

GRACE = 1.0
"""Seconds of silence after which a closing listener drops an idle client."""

LARGE = 1 << 16
"""Bytes of a body from which it waits for its turn, as do those of an answer: to read one takes up to some tens of milliseconds."""
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
        fd_brief_at: first descriptor number at which it is closed with that answer, and does not linger.
        quotas: quotas of its clients. A connection without an owner is not counted.
        connections: open connections.
        tasks: requests of ordinary routes that are being answered.
    """

    label = "admin"
    spare = 8

    def __init__(self, answer: Handler, settings: Settings, new_id: NewId, counters: GatewayCounts) -> None:
        self.answer = answer
        self.settings = settings
        self.new_id = new_id
        self.encode_error: EncodeError = encode_problem
        self.counters = counters
        self.quotas = Quotas(settings)
        self.most_header = settings.max_header_bytes
        self.most_body = settings.max_body_bytes
        self.read_timeout = settings.read_timeout_ms / 1000
        self.keep_alive = settings.keep_alive_ms / 1000
        self.scheme: Literal["http", "https"] = "http"
        self.closing = False
        self.shut = asyncio.Event()
        self.date = b""
        self.fd_ceiling = self.fd_brief_at = 1 << 30
        self.loop = asyncio.get_running_loop()
        self.hangups = Hangups(self.loop)
        self.turns = FairTurns(loop=self.loop, rests=False)
        self.drops = FairTurns(loop=self.loop, rests=False)
        self._left = asyncio.Event()
        self._hints = ProtocolHints(self.label, self.loop.time)
        self.connections: set[asyncio.BaseProtocol] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.refresh()

    def fit(self, connections: int) -> None:
        """Share no more connections among clients than this, as there are descriptors for no more."""

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

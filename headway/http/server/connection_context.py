"""State that all connections of one listener share: limits, counters, and whether the listener is closing."""

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
"""Seconds that a refused client may keep sending before its connection is cut."""

GRACE = 1.0
"""Idle seconds after which a closing listener closes a connection."""

LARGE = 1 << 16
"""Size in bytes from which a body or an answer counts as large, and is processed in turns: it may take tens of milliseconds."""
SLOWEST = 16_384
"""Lowest rate, in bytes per second, at which a client may read its answer or send an upload."""


class ConnectionContext:
    """State shared by a listener's connections.

    Ordinary connections leave `spare` file descriptors for other uses: connections are refused from the descriptor number
    `fd_ceiling` on, and from `fd_brief_at` on they close at once instead of lingering. Connections that have sent many requests
    at once wait for `turns`, and lingering ones, whose bytes are dropped, for `drops`. `encode_error` encodes errors of requests
    that match no inference route. If `closing`, every answer is its connection's last. `shut` is set once the port has closed:
    idle connections close, and requests that wait for news are answered. `quotas` ignore connections without an owner. `tasks`
    are the running ordinary routes."""

    label = "admin"
    spare = 8

    def __init__(self, answer: Handler, settings: Settings, new_id: NewId, counters: GatewayCounts) -> None:
        self.answer = answer
        self.settings = settings
        self.new_id = new_id
        self.encode_error: EncodeError = encode_problem
        self.counters = counters
        self.quotas = Quotas(settings)
        self.max_header = settings.max_header_bytes
        self.max_body = settings.max_body_bytes
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
        """Share at most this many connections among clients, because there are no descriptors for more."""

    def max_body_of(self, head: Head) -> int:
        return self.max_body

    def refresh(self) -> None:
        """Update the Date header. The listener calls this from time to time."""
        self.date = formatdate(usegmt=True).encode()

    def retire(self) -> None:
        """From now on, close each connection after its next answer."""
        self.closing = True

    def close(self) -> None:
        """Close idle connections too, because the port closes."""
        self.retire()
        self.shut.set()

    def left(self) -> None:
        if not self.connections:
            self._left.set()

    async def emptied(self) -> None:
        while self.connections:
            self._left.clear()
            await self._left.wait()

    def refused(self, error: RequestError, tier: str | None) -> None:
        """Count a refusal under a tier, unless it is counted already and `tier` is None."""
        if isinstance(error, OtherProtocol):
            self._hints.tell(error.kind)
        if tier is not None:
            self.counters.refusals[error.reason or error.code.lower(), tier, ""] += 1

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def trace_head(self, head: Head, id: str, error: RequestError, begun: float) -> None:
        """Record the span of a request that is refused before its body is read, if this port records traces."""

    def trace_answer(self, request: Request, status: int, begun: float) -> None:
        """Record the span of an ordinary route that answers with an error, if this port records traces."""

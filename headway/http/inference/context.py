"""State that all connections of a listener with inference routes share."""

from __future__ import annotations

from headway.core.json_pages import SHORT
from headway.doors.entrance import Entrance
from headway.doors.exchange import CodecContext
from headway.doors.fields import TRACE_FIELDS, select_fields
from headway.errors import RequestError
from headway.http.inference.cross_origin import Origins
from headway.http.inference.routes import Routes
from headway.http.requests import Handler, Request
from headway.http.server.connection_context import ConnectionContext
from headway.http.server.head import Head
from headway.model import RequestOptions
from headway.runtime.fair_turns import MILLISECOND, FairTurns
from headway.runtime.listening import SPARE

UPLOADS = b"/v1/files"
FORM = 1 << 16
"""Number of bytes that the form of an upload may have in addition to its file."""


class InferenceContext(ConnectionContext):
    """State shared by the connections of a listener with inference routes, whose requests go to an entrance."""

    label = "public"
    spare = SPARE

    def __init__(self, answer: Handler, entrance: Entrance) -> None:
        self.opening = b""
        settings, gateway = entrance.settings, entrance.gateway
        super().__init__(answer, settings, entrance.new_id, entrance.counters)
        self.entrance, self.gateway = entrance, gateway
        self.refusal_traces = entrance.refusal_traces
        self.routes = Routes(settings)
        self.codec_context = CodecContext(settings, gateway.served, entrance.counters)
        self.origins = Origins(settings.cors_origins) if settings.cors_origins else None
        self.rate_limits = entrance.rate_limits
        self.quotas = gateway.quotas
        self.large_bodies = FairTurns(loop=self.loop, budget=MILLISECOND)
        self.max_at_once = min(self.max_body, SHORT)
        self.served = gateway.served
        self.version = settings.model_version
        self.tiers = entrance.tiers

    def fit(self, connections: int) -> None:
        self.quotas.fit(connections)

    def max_body_of(self, head: Head) -> int:
        """Return the largest body in bytes. An upload may be as large as everything a tenant may store."""
        upload = head.method == b"POST" and self.settings.bulk_dir and head.target == UPLOADS
        return self.settings.bulk_max_bytes + FORM if upload else self.max_body

    def trace_head(self, head: Head, id: str, error: RequestError, begun: float) -> None:
        traces = self.refusal_traces
        if traces is not None:
            route = self.routes.find(head.target) if head.method == b"POST" else None
            way = route[0].way if route is not None else head.method.decode()
            traces.refused(way, head.single, id, error, begun)

    def trace_answer(self, request: Request, status: int, begun: float) -> None:
        if self.refusal_traces is None or status < 400:
            return
        if fields := select_fields(request.fields, TRACE_FIELDS, TRACE_FIELDS):
            self.refusal_traces.answered(request.method, request.path, fields, request.id, status, begun)

    def trace_refused(self, options: RequestOptions, id: str, error: RequestError, begun: float) -> None:
        if self.refusal_traces is not None:
            self.refusal_traces.refused_below(options.trace, options.way, id, error, begun)

    def refresh(self) -> None:
        super().refresh()
        self.opening = b"HTTP/1.1 200 OK\r\ndate: %b\r\nx-request-id: " % self.date

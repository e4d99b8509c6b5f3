"""CORS, and the state shared by all connections of a listener that has inference routes."""

from __future__ import annotations

from headway.core.json_pages import SHORT
from headway.doors.entrance import Entrance
from headway.doors.exchange import CodecContext
from headway.doors.fields import TRACE_FIELDS, select_fields
from headway.errors import FORBIDDEN, RequestError
from headway.http.inference.routes import Routes
from headway.http.routing import Handler, Request
from headway.http.server.connection_context import ConnectionContext
from headway.http.server.head import Head
from headway.model import RequestOptions
from headway.runtime.fair_turns import MILLISECOND, FairTurns
from headway.runtime.listening import SPARE

ANY = "*"
_EXPOSED = (
    "x-request-id, retry-after, retry-after-ms, location, preference-applied, ratelimit, ratelimit-policy, idempotency-replayed, "
    "x-headway-cache, x-headway-kept, x-headway-dropped-reason, x-headway-error, x-should-retry, x-ratelimit-limit-requests, "
    "x-ratelimit-remaining-requests, x-ratelimit-reset-requests, inference-header-content-length"
)
_EXPOSE = f"access-control-expose-headers: {_EXPOSED}\r\n".encode()
_MAX_AGE = 600
_PERMISSION = (
    b"HTTP/1.1 204 No Content\r\ndate: %b\r\nx-request-id: %b\r\naccess-control-allow-methods: GET, POST, DELETE\r\n"
    b"%baccess-control-max-age: %d\r\n%b\r\n"
)


class Origins:
    """The allowed origins, from the setting `cors_origins`."""

    def __init__(self, text: str) -> None:
        self._any = text == ANY
        self._known = {origin.strip().lower().encode() for origin in text.split(",")}

    def marks(self, head: Head) -> bytes:
        """Return the header lines that allow a page to read the answer, or b"" if the page's origin isn't allowed."""
        origin = _last(head, b"origin")
        if not origin or not (self._any or origin.lower() in self._known):
            return b""
        allowed = b"*\r\n" if self._any else origin + b"\r\nvary: origin\r\n"
        return b"access-control-allow-origin: " + allowed + _EXPOSE

    def refusal(self, head: Head) -> RequestError:
        shown = _last(head, b"origin")[:100].decode("latin-1")
        return RequestError(
            f"pages of {shown!r} may not send requests here, because it is not in --cors-origins", code=FORBIDDEN
        )


def is_preflight(head: Head) -> bool:
    """Return True for a CORS preflight request."""
    return head.method == b"OPTIONS" and bool(_last(head, b"access-control-request-method"))


def preflight_answer(head: Head, shown: str, date: bytes, ending: bytes) -> bytes:
    """Return the answer to a preflight that allows the request. `ending` has additional header lines."""
    requested = _last(head, b"access-control-request-headers")
    headers = b"access-control-allow-headers: %b\r\n" % requested if requested else b""
    return _PERMISSION % (date, shown.encode(), headers, _MAX_AGE, ending)


def _last(head: Head, field: bytes) -> bytes:
    return next((value for name, value in reversed(head.fields) if name == field), b"")


UPLOADS = b"/v1/files"
FORM = 1 << 16  # Size in bytes that an upload's form may have in addition to its file.


class InferenceContext(ConnectionContext):
    """State shared by the connections of a listener that has inference routes."""

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
        """Return the maximum size of a body. An upload may fill its tenant's whole storage."""
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

"""Log lines about clients that use the wrong protocol on a port, or break its rules: at most one line a minute of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from headway.runtime.logger import get_logger

log = get_logger(__name__)

LOG_EVERY = 60.0  # Minimum time in seconds between two lines of a kind.

TLS = (
    "a client speaks TLS to a plain port",
    "let clients connect without TLS, set --tls-cert, or terminate TLS in a proxy in front",
)
HTTP2 = (
    "a client speaks HTTP/2 to the HTTP port",
    "gRPC has its own port (--grpc-port); other clients must use HTTP/1.1",
)
CUTS = {
    "protocol_error": (
        "a client of the gRPC port violates HTTP/2",
        "its connection was closed; look for a faulty client or proxy",
    ),
    "too_many_frames": (
        "a client sends too many useless frames",
        "its connection was closed; look for a client that cancels most of its calls, or is malicious",
    ),
    "too_many_pings": (
        "a client pings too often",
        "its connection was closed; let it ping at most every 10 s (GRPC_ARG_KEEPALIVE_TIME_MS)",
    ),
}
"""Why a connection to the gRPC port is closed, by the reason label of `headway_refusals_total`."""
HTTP1 = ("a client speaks HTTP/1.1 to the gRPC port", "HTTP has its own port (--port)")


class ProtocolHints:
    """Logs protocol errors on one port. `port` is the port's name in the log."""

    def __init__(self, port: str, clock: Callable[[], float]) -> None:
        self._port, self._clock = port, clock
        self._times: Counter[tuple[str, str]] = Counter()
        self._logged_at: dict[tuple[str, str], float] = {}

    def tell(self, kind: tuple[str, str]) -> None:
        """Count a client that makes an error of this kind (event and hint), and log the count if a line is due."""
        self._times[kind] += 1
        now = self._clock()
        if now >= self._logged_at.get(kind, -LOG_EVERY) + LOG_EVERY:
            event, hint = kind
            log.warning(event, port=self._port, times=self._times.pop(kind), hint=hint)
            self._logged_at[kind] = now

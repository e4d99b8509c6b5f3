"""OTLP over HTTP: one POST for each message, in protobuf."""

from __future__ import annotations

import gzip

import urllib3

from headway import __version__
from headway.telemetry.tracing.environment import Collector
from headway.telemetry.tracing.sender import MOST_ANSWER, NotSent

_AGAIN = frozenset((429, 502, 503, 504))
"""Statuses after which the protocol allows another try."""
_PROTOBUF = "application/x-protobuf"


class HttpSender:
    """Sender over HTTP, on one connection that is kept.

    Arguments:
        collector: the collector.
    """

    def __init__(self, collector: Collector) -> None:
        self._url, self._gzip = collector.url, collector.gzip
        self._headers = {
            "user-agent": f"headway/{__version__}",
            **dict(collector.headers),
            "content-type": _PROTOBUF,
            **({"content-encoding": "gzip"} if collector.gzip else {}),
        }
        self._connections = urllib3.PoolManager(
            num_pools=1,
            maxsize=1,
            ca_certs=collector.authority or None,
            cert_file=collector.certificate or None,
            key_file=collector.key or None,
        )

    def send(self, body: bytes, within: float) -> bytes:
        """Send a message; see SpanSender."""
        content = gzip.compress(body, 1) if self._gzip else body
        timeout = urllib3.Timeout(total=within)
        try:
            answer = self._connections.request(
                "POST", self._url, body=content, headers=self._headers, timeout=timeout,
                retries=False, redirect=False, preload_content=False,
            )  # fmt: skip
            found = answer.read(MOST_ANSWER + 1, decode_content=True)
            if len(found) > MOST_ANSWER:
                answer.close()
            else:
                answer.release_conn()
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as exc:
            raise NotSent(f"{type(exc).__name__}: {exc}") from None
        if answer.status != 200:
            rest = answer.headers.get("retry-after", "")
            wait = float(rest) if rest.isascii() and rest.isdigit() and len(rest) < 6 else None
            raise NotSent(f"HTTP {answer.status}", answer.status in _AGAIN, wait)
        if len(found) > MOST_ANSWER:
            raise NotSent(f"an answer of more than {MOST_ANSWER} bytes", again=False)
        kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        if found and kind != _PROTOBUF:
            if kind == "application/json":  # As some collectors do, whatever they are asked in.
                return b""
            raise NotSent(f"an answer of type {kind[:60]!r}, which no collector gives", again=False)
        return bytes(found)

    def close(self) -> None:
        """Close the connection."""
        self._connections.clear()

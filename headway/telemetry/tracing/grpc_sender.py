"""OTLP over gRPC: one call for each message. Imported only where that is asked for, as it needs the package grpcio."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from headway import __version__
from headway.runtime.quiet_grpc import import_quietly
from headway.telemetry.tracing.environment import Collector
from headway.telemetry.tracing.sender import MOST_ANSWER, NotSent

import_quietly()

import grpc  # noqa: E402

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_AGAIN = frozenset((
    grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE,
))  # fmt: skip
"""Statuses after which the protocol allows another try."""


class GrpcSender:
    """Sender over gRPC.

    Arguments:
        collector: the collector. Its files can be read.
    """

    def __init__(self, collector: Collector) -> None:
        parts = urlsplit(collector.url)
        options = (
            ("grpc.max_receive_message_length", MOST_ANSWER),
            ("grpc.primary_user_agent", f"headway/{__version__}"),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.max_reconnect_backoff_ms", 5000),
        )
        target = parts.netloc.rpartition("@")[2]
        if parts.scheme == "https":
            files = collector.authority, collector.key, collector.certificate
            self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(*map(_content, files)), options)
        else:
            self._channel = grpc.insecure_channel(target, options)
        self._compression = grpc.Compression.Gzip if collector.gzip else grpc.Compression.NoCompression
        self._metadata = collector.headers
        self._export = self._channel.unary_unary(_METHOD)

    def send(self, body: bytes, within: float) -> bytes:
        """Send a message; see SpanSender."""
        try:
            return bytes(self._export(body, timeout=within, metadata=self._metadata, compression=self._compression))
        except grpc.RpcError as exc:
            code = exc.code()
            raise NotSent(f"gRPC {code.name}: {(exc.details() or '')[:200]}", code in _AGAIN) from None
        except ValueError as exc:  # The channel was closed.
            raise NotSent(str(exc), again=False) from None

    def close(self) -> None:
        """Close the channel, and end the call that is under way."""
        self._channel.close()


def _content(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None

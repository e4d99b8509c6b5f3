"""Traces of a process, if it records any: what the variables OTEL_… say, who records, and who sends."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Mapping

import msgspec

from headway import __version__
from headway.config import Settings
from headway.config.extras import install_hint
from headway.core.trace_sampling import Sampler
from headway.model import Role
from headway.runtime.counters import Counters
from headway.runtime.logger import get_logger
from headway.runtime.spans import SpanRecorder
from headway.telemetry.tracing.environment import GRPC, Collector, TraceEnvironment, read_environment
from headway.telemetry.tracing.exporter import SpanExporter
from headway.telemetry.tracing.otlp import Origin, origin_of
from headway.telemetry.tracing.sender import SpanSender

log = get_logger(__name__)


class Tracing(msgspec.Struct, frozen=True):
    """Parts of a process that records traces."""

    recorder: SpanRecorder
    exporter: SpanExporter


def make_tracing(
    settings: Settings,
    role: Role,
    counters: Counters,
    clock: Callable[[], float],
    variables: Mapping[str, str] | None = None,
) -> Tracing | None:
    """Make what records and sends the traces of a process; None where none are recorded.

    Arguments:
        settings: settings of the process.
        role: role of the process.
        counters: counters of the process.
        clock: monotonic seconds.
        variables: variables of the environment; None: those of this process.
    """
    if not settings.trace:
        return None
    environment = read_environment(os.environ if variables is None else variables)
    for wrong in environment.wrong:
        log.warning(
            "a variable of OpenTelemetry cannot be used",
            variable=wrong.name,
            value=wrong.value,
            reason=wrong.reason,
            used_instead=wrong.used,
        )
    if environment.off:
        log.info("no traces are recorded", variable=environment.off)
        return None
    make_sender = _make_sender(environment.collector)
    if make_sender is None:
        return None
    exporter = SpanExporter(environment, _origin(environment, settings, role), make_sender, counters)
    sampler = Sampler(environment.ratio, environment.follows, random.Random().getrandbits)  # noqa: S311 - no secret
    collector = environment.collector
    log.info("traces are recorded", collector=collector.shown, protocol=collector.protocol, share=environment.ratio)
    return Tracing(SpanRecorder(sampler, exporter.buffer, clock), exporter)


def _make_sender(collector: Collector) -> Callable[[], SpanSender] | None:
    """Maker of the sender to a collector; None, and it is logged, where a package is missing."""
    if collector.protocol != GRPC:
        from headway.telemetry.tracing.http_sender import HttpSender

        return lambda: HttpSender(collector)
    try:
        from headway.telemetry.tracing.grpc_sender import GrpcSender
    except ImportError as exc:
        if (exc.name or "").partition(".")[0] != "grpc":
            raise
        hint = f"{install_hint('otel')} Or set OTEL_EXPORTER_OTLP_PROTOCOL to http/protobuf."
        log.error("no traces are recorded: OTLP over gRPC needs the package grpcio, which is not here", hint=hint)
        return None
    return lambda: GrpcSender(collector)


def _origin(environment: TraceEnvironment, settings: Settings, role: Role) -> Origin:
    """Description of the process, in OpenTelemetry's words; what the environment says of it goes first."""
    own: dict[str, str | int] = {
        "service.version": __version__,
        "service.instance.id": settings.name,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "telemetry.sdk.name": "headway",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": __version__,
        "headway.role": role.value,
    }
    return origin_of(tuple({**own, **dict(environment.resource)}.items()), "headway", __version__)

"""Sets up tracing for a process: reads the OTEL_… variables, and builds the span recorder and the span exporter."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from headway.config import Settings
from headway.config.extras import needing
from headway.core.trace_context import Sampler
from headway.model import Role
from headway.runtime.logger import get_logger
from headway.runtime.spans import SpanRecorder
from headway.telemetry.trace_environment import read_environment
from headway.version import __version__

if TYPE_CHECKING:
    from headway.telemetry.trace_exporter import SpanExporter

log = get_logger(__name__)


class Tracing(msgspec.Struct, frozen=True):
    """The span recorder and the span exporter of a process."""

    recorder: SpanRecorder
    exporter: SpanExporter


def make_tracing(
    settings: Settings,
    role: Role,
    dropped: dict[str, int],
    clock: Callable[[], float],
    variables: Mapping[str, str] | None = None,
) -> Tracing | None:
    """Return the span recorder and exporter for a process, or None if tracing is off. Raises SettingError if packages are missing.
    `dropped` counts dropped spans by reason. `variables` replaces the environment, except for variables that the SDK reads itself."""
    if not settings.trace:
        return None
    environment = read_environment(os.environ if variables is None else variables)
    for wrong in environment.wrong:
        log.warning(
            "an OpenTelemetry variable has an unusable value",
            variable=wrong.name,
            value=wrong.value,
            reason=wrong.reason,
            used_instead=wrong.used,
        )
    if environment.off:
        log.info("no traces are recorded", variable=environment.off)
        return None
    with needing("otel", "trace", True, "needs OpenTelemetry packages, which are not installed"):
        from headway.telemetry.trace_exporter import SpanExporter, exporter_for, resource_of

        make = exporter_for(environment.collector)
    exporter = SpanExporter(environment, resource_of(_attributes(settings, role)), make, dropped)
    sampler = Sampler(environment.ratio, environment.follows, random.Random().getrandbits)  # noqa: S311 - no secret
    collector = environment.collector
    log.info("traces are recorded", collector=collector.shown, protocol=collector.protocol, share=environment.ratio)
    return Tracing(SpanRecorder(sampler, exporter.buffer, clock), exporter)


def _attributes(settings: Settings, role: Role) -> dict[str, str | int]:
    return {
        "service.name": "headway",
        "service.version": __version__,
        "service.instance.id": settings.name,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "telemetry.sdk.name": "headway",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": __version__,
        "headway.role": role.value,
    }

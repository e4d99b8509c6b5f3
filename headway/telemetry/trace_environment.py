"""Reads the standard trace variables `OTEL_…` that OpenTelemetry's SDK doesn't handle correctly.

The SDK itself reads the variables for resource attributes, header fields and TLS files. But its exporters mistake milliseconds for
seconds, and one of them doesn't know the compression `none`. If a value is unusable, it is logged, and the default is used, because
such variables are often set for many programs at once. An empty variable counts as not set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

HTTP, GRPC = "http/protobuf", "grpc"
_PATH = "v1/traces"
_ENDPOINTS = {HTTP: "http://localhost:4318", GRPC: "http://localhost:4317"}
_SAMPLERS: Mapping[str, tuple[float | None, bool]] = {
    "always_on": (1.0, False),
    "always_off": (0.0, False),
    "traceidratio": (None, False),
    "parentbased_always_on": (1.0, True),
    "parentbased_always_off": (0.0, True),
    "parentbased_traceidratio": (None, True),
}
"""Samplers: the ratio (None to read OTEL_TRACES_SAMPLER_ARG), and True if the sampler follows the parent's decision."""
_DEFAULT_SAMPLER = "parentbased_always_on"
_OTLP = "OTEL_EXPORTER_OTLP_"

T = TypeVar("T", int, float)


class Wrong(NamedTuple):
    """Variable with an unusable `value`, which is safe to log. `used` is what replaces the value."""

    name: str
    value: str
    reason: str
    used: str


class Collector(msgspec.Struct, frozen=True):
    """Span collector. `protocol` is HTTP or GRPC. An HTTP `url` includes the path. `timeout` is the limit in seconds for
    sending a message, including retries."""

    protocol: str
    url: str
    gzip: bool
    timeout: float

    @property
    def shown(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class TraceEnvironment(msgspec.Struct, frozen=True):
    """Trace settings. `off` names the variable that turns tracing off, and is empty if tracing is on. If `follows`, the sampling
    decision of a client's trace is followed. `ratio` is the share of other traces to sample. `delay` is the time between messages
    in seconds. `most_waiting` limits the waiting spans, `most_sent` the spans per message, and `most_links` the links per span."""

    off: str
    ratio: float
    follows: bool
    collector: Collector
    delay: float
    most_waiting: int
    most_sent: int
    most_links: int
    wrong: tuple[Wrong, ...]


def read_environment(environment: Mapping[str, str]) -> TraceEnvironment:
    """Read the trace settings from environment variables."""
    read = _Reader(environment)
    ratio, follows = _sampler(read)
    most_waiting = read.number("OTEL_BSP_MAX_QUEUE_SIZE", 2048, 1, 1 << 20)
    most_sent = read.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(512, most_waiting), 1, 1 << 16)
    if most_sent > most_waiting:
        reason = "is more than OTEL_BSP_MAX_QUEUE_SIZE"
        read.refuse("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", str(most_sent), reason, str(most_waiting))
        most_sent = most_waiting
    return TraceEnvironment(
        off=_off(read),
        ratio=ratio,
        follows=follows,
        collector=_collector(read),
        delay=read.milliseconds("OTEL_BSP_SCHEDULE_DELAY", 5000),
        most_waiting=most_waiting,
        most_sent=most_sent,
        most_links=read.number("OTEL_SPAN_LINK_COUNT_LIMIT", 1 << 16, 0, 1 << 16),
        wrong=tuple(read.wrong),
    )


class _Reader:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.wrong: list[Wrong] = []

    def text(self, name: str) -> str:
        return self._environment.get(name, "").strip()

    def otlp(self, name: str) -> tuple[str, str]:
        """Return the name and value of the exporter variable for traces or, if it isn't set, of the one for all signals."""
        for full in (f"{_OTLP}TRACES_{name}", f"{_OTLP}{name}"):
            if value := self.text(full):
                return full, value
        return f"{_OTLP}{name}", ""

    def refuse(self, name: str, value: str, reason: str, used: str) -> None:
        self.wrong.append(Wrong(name, value, reason, used))

    def of(self, name: str, value: str, default: T, read: Callable[[str], T], least: T, most: T, kind: str) -> T:
        """Parse a value with `read`. Return the default if there is no value, or it isn't a number from `least` to `most`."""
        if not value:
            return default
        try:
            number = read(value)
            if least <= number <= most:
                return number
        except ValueError:
            pass
        self.refuse(name, value[:100], f"is not a {kind} from {least} to {most}", str(default))
        return default

    def number(self, name: str, default: int, least: int, most: int) -> int:
        return self.of(name, self.text(name), default, int, least, most, "whole number")

    def milliseconds(self, name: str, default: float, value: str | None = None) -> float:
        text = self.text(name) if value is None else value
        return self.of(name, text, default, float, 1, 3_600_000, "number of milliseconds") / 1000


def _off(read: _Reader) -> str:
    disabled = read.text("OTEL_SDK_DISABLED").lower()
    if disabled == "true":
        return "OTEL_SDK_DISABLED"
    if disabled not in ("", "false"):
        read.refuse("OTEL_SDK_DISABLED", disabled[:100], "is neither true nor false", "false")
    exporters = [name.strip() for name in read.text("OTEL_TRACES_EXPORTER").split(",") if name.strip()]
    if exporters == ["none"]:
        return "OTEL_TRACES_EXPORTER"
    if set(exporters) - {"otlp"}:
        read.refuse("OTEL_TRACES_EXPORTER", ",".join(exporters)[:100], "is neither otlp nor none", "otlp")
    propagators = [name.strip() for name in read.text("OTEL_PROPAGATORS").split(",") if name.strip()]
    if propagators and "tracecontext" not in propagators:
        read.refuse("OTEL_PROPAGATORS", ",".join(propagators)[:100], "does not include tracecontext", "tracecontext")
    return ""


def _sampler(read: _Reader) -> tuple[float, bool]:
    name, variable = read.text("OTEL_TRACES_SAMPLER").lower(), "OTEL_TRACES_SAMPLER"
    if name and name not in _SAMPLERS:
        read.refuse(variable, name[:100], f"is not one of {', '.join(_SAMPLERS)}", _DEFAULT_SAMPLER)
        name = ""
    ratio, follows = _SAMPLERS[name or _DEFAULT_SAMPLER]
    if ratio is not None:
        return ratio, follows
    argument = "OTEL_TRACES_SAMPLER_ARG"
    return read.of(argument, read.text(argument), 1.0, float, 0, 1, "share"), follows


def _collector(read: _Reader) -> Collector:
    variable, protocol = read.otlp("PROTOCOL")
    if protocol not in ("", HTTP, GRPC):
        read.refuse(variable, protocol[:100], f"is neither {HTTP} nor {GRPC}", HTTP)
        protocol = HTTP
    protocol = protocol or HTTP
    variable, compression = read.otlp("COMPRESSION")
    if compression not in ("", "none", "gzip"):
        read.refuse(variable, compression[:100], "is neither gzip nor none", "none")
    variable, timeout = read.otlp("TIMEOUT")
    seconds = read.milliseconds(variable, 10_000, timeout)
    return Collector(protocol, _url(read, protocol), compression == "gzip", seconds)


def _url(read: _Reader, protocol: str) -> str:
    variable, value = read.otlp("ENDPOINT")
    own = variable == f"{_OTLP}TRACES_ENDPOINT"
    url = value
    if protocol == GRPC and value and "://" not in value:
        plain = read.otlp("INSECURE")[1].lower() == "true"
        url = f"{'http' if plain else 'https'}://{value}"
    if value and not _is_url(url):
        hidden = value.rpartition("@")[2].partition("?")[0][:100]  # A password may be in it.
        read.refuse(variable, hidden, "is not a URL such as http://HOST:PORT", _ENDPOINTS[protocol])
        url, own = _ENDPOINTS[protocol], False
    url = url or _ENDPOINTS[protocol]
    if protocol == GRPC or own:
        return url
    return f"{url.rstrip('/')}/{_PATH}"


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        return False

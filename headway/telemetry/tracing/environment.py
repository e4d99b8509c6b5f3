"""The standard variables `OTEL_…`, as far as they concern traces.

A value that cannot be used is told of and passed over: what stands there by default counts in its place. None of them keeps a
process from starting, since they are often set for many programs at once. An empty one counts as not set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

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
"""Samplers: the ratio, None for the one that OTEL_TRACES_SAMPLER_ARG says; and whether they follow the parent."""
_DEFAULT_SAMPLER = "parentbased_always_on"
_OTLP = "OTEL_EXPORTER_OTLP_"
_NOT_SHOWN = "a value that is not shown"

T = TypeVar("T")


class Wrong(NamedTuple):
    """Variable that cannot be used: its name, its value as it may be shown, why, and what counts in its place."""

    name: str
    value: str
    reason: str
    used: str


class Collector(msgspec.Struct, frozen=True):
    """Collector that spans are sent to.

    Attributes:
        protocol: HTTP or GRPC.
        url: its URL, with the path where that is asked over HTTP.
        headers: header fields that go with each request; they may be secret.
        gzip: whether what is sent is compressed.
        timeout: seconds for one message, its tries included.
        authority: file of the authorities that its certificate is checked by; empty for the system's.
        certificate, key: files of the certificate that it is shown, and of its key; empty for none.
    """

    protocol: str
    url: str
    headers: tuple[tuple[str, str], ...]
    gzip: bool
    timeout: float
    authority: str
    certificate: str
    key: str

    @property
    def shown(self) -> str:
        """URL as the log may show it."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class TraceEnvironment(msgspec.Struct, frozen=True):
    """Settings of traces, as the variables say them.

    Attributes:
        off: whether nothing is recorded, and the variable that says so; empty where none does.
        ratio: share of the traces that are sampled, where that is decided here.
        follows: whether the decision of a client's trace is taken over.
        resource: attributes of the process.
        collector: collector that spans are sent to.
        delay: seconds for which spans gather.
        most_waiting: most spans that wait to be sent.
        most_sent: most spans in one message.
        most_links: most links of a span.
        wrong: variables that cannot be used.
    """

    off: str
    ratio: float
    follows: bool
    resource: tuple[tuple[str, str], ...]
    collector: Collector
    delay: float
    most_waiting: int
    most_sent: int
    most_links: int
    wrong: tuple[Wrong, ...]


def read_environment(environment: Mapping[str, str]) -> TraceEnvironment:
    """Read the variables."""
    read = _Reader(environment)
    ratio, follows = _sampler(read)
    most_waiting = read.number("OTEL_BSP_MAX_QUEUE_SIZE", 2048, 1, 1 << 20)
    most_sent = read.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(512, most_waiting), 1, 1 << 16)
    if most_sent > most_waiting:
        reason = "is more than may wait (OTEL_BSP_MAX_QUEUE_SIZE)"
        read.refuse("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", str(most_sent), reason, str(most_waiting))
        most_sent = most_waiting
    return TraceEnvironment(
        off=_off(read),
        ratio=ratio,
        follows=follows,
        resource=_resource(read),
        collector=_collector(read),
        delay=read.milliseconds("OTEL_BSP_SCHEDULE_DELAY", 5000),
        most_waiting=most_waiting,
        most_sent=most_sent,
        most_links=read.number("OTEL_SPAN_LINK_COUNT_LIMIT", 1 << 16, 0, 1 << 16),
        wrong=tuple(read.wrong),
    )


class _Reader:
    """Reader of variables, which notes those that cannot be used."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.wrong: list[Wrong] = []

    def text(self, name: str) -> str:
        return self._environment.get(name, "").strip()

    def otlp(self, name: str) -> tuple[str, str]:
        """Name and value of a variable of the exporter: the one for traces, else the one for all."""
        for full in (f"{_OTLP}TRACES_{name}", f"{_OTLP}{name}"):
            if value := self.text(full):
                return full, value
        return f"{_OTLP}{name}", ""

    def refuse(self, name: str, value: str, reason: str, used: str) -> None:
        self.wrong.append(Wrong(name, value, reason, used))

    def of(self, name: str, value: str, default: T, read: Callable[[str], T], reason: str) -> T:
        """Result of `read` for a value; the default where it raises ValueError."""
        if not value:
            return default
        try:
            return read(value)
        except ValueError:
            self.refuse(name, value[:100], reason, str(default))
            return default

    def number(self, name: str, default: int, least: int, most: int) -> int:
        def read(value: str) -> int:
            number = int(value)
            if not least <= number <= most:
                raise ValueError
            return number

        return self.of(name, self.text(name), default, read, f"is no whole number from {least} to {most}")

    def milliseconds(self, name: str, default: float, value: str | None = None) -> float:
        """Seconds for a number of milliseconds."""

        def read(value: str) -> float:
            number = float(value)
            if not 1 <= number <= 3_600_000:
                raise ValueError
            return number

        text = self.text(name) if value is None else value
        return self.of(name, text, default, read, "is no number of milliseconds from 1 to 3600000") / 1000

    def pairs(self, name: str, value: str) -> list[tuple[str, str]]:
        """Names and values in a list as `a=1,b=2`, whose values may have %XX in them."""
        found = []
        for part in filter(None, map(str.strip, value.split(","))):
            key, equals, content = part.partition("=")
            key = unquote(key.strip())
            if not (key and equals):
                self.refuse(name, _NOT_SHOWN, "has a part that is no name=value", "the other parts")
                continue
            found.append((key, unquote(content.strip())))
        return found

    def file(self, name: str) -> str:
        """Path of a file that can be read; empty where there is none."""
        full, value = self.otlp(name)
        if not value:
            return ""
        try:
            with Path(value).open("rb"):
                return value
        except (OSError, ValueError) as exc:
            self.refuse(full, value, f"cannot be read: {exc}", "none")
            return ""


def _off(read: _Reader) -> str:
    """Variable by which nothing is recorded; empty where none says so."""
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
        read.refuse("OTEL_PROPAGATORS", ",".join(propagators)[:100], "is without tracecontext", "tracecontext")
    return ""


def _sampler(read: _Reader) -> tuple[float, bool]:
    name, variable = read.text("OTEL_TRACES_SAMPLER").lower(), "OTEL_TRACES_SAMPLER"
    if name and name not in _SAMPLERS:
        read.refuse(variable, name[:100], f"is none of {', '.join(_SAMPLERS)}", _DEFAULT_SAMPLER)
        name = ""
    ratio, follows = _SAMPLERS[name or _DEFAULT_SAMPLER]
    if ratio is not None:
        return ratio, follows

    def share(value: str) -> float:
        number = float(value)
        if math.isnan(number) or not 0 <= number <= 1:
            raise ValueError
        return number

    argument = "OTEL_TRACES_SAMPLER_ARG"
    return read.of(argument, read.text(argument), 1.0, share, "is no share from 0 to 1"), follows


def _resource(read: _Reader) -> tuple[tuple[str, str], ...]:
    name = "OTEL_RESOURCE_ATTRIBUTES"
    found = dict(read.pairs(name, read.text(name)))
    if service := read.text("OTEL_SERVICE_NAME"):
        found["service.name"] = service
    return tuple({"service.name": "headway", **found}.items())


def _collector(read: _Reader) -> Collector:
    variable, protocol = read.otlp("PROTOCOL")
    if protocol not in ("", HTTP, GRPC):
        read.refuse(variable, protocol[:100], f"is neither {HTTP} nor {GRPC}", HTTP)
        protocol = HTTP
    protocol = protocol or HTTP
    compression_name, compression = read.otlp("COMPRESSION")
    if compression not in ("", "none", "gzip"):
        read.refuse(compression_name, compression[:100], "is neither gzip nor none", "none")
    (variable, headers), timeout = read.otlp("HEADERS"), read.otlp("TIMEOUT")
    key, certificate = read.file("CLIENT_KEY"), read.file("CLIENT_CERTIFICATE")
    if bool(key) != bool(certificate):
        there, missing = ("CLIENT_KEY", "CLIENT_CERTIFICATE") if key else ("CLIENT_CERTIFICATE", "CLIENT_KEY")
        read.refuse(read.otlp(there)[0], key or certificate, f"needs {_OTLP}{missing}, too", "none")
        key = certificate = ""
    return Collector(
        protocol=protocol,
        url=_url(read, protocol),
        headers=tuple(_header_fields(read, variable, headers)),
        gzip=compression == "gzip",
        timeout=read.milliseconds(timeout[0], 10_000, timeout[1]),
        authority=read.file("CERTIFICATE"),
        certificate=certificate,
        key=key,
    )


def _header_fields(read: _Reader, variable: str, headers: str) -> Sequence[tuple[str, str]]:
    found = []
    for name, value in read.pairs(variable, headers):
        if not (name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()):
            read.refuse(variable, _NOT_SHOWN, "has a name that is none of a header field", "the other parts")
        elif not (value.isascii() and value.isprintable()):
            read.refuse(variable, _NOT_SHOWN, f"has a value of {name} that no header field may have", "the other parts")
        else:
            found.append((name.lower(), value))
    return found


def _url(read: _Reader, protocol: str) -> str:
    variable, value = read.otlp("ENDPOINT")
    own = variable == f"{_OTLP}TRACES_ENDPOINT"
    url = value
    if protocol == GRPC and value and "://" not in value:
        plain = read.otlp("INSECURE")[1].lower() == "true"
        url = f"{'http' if plain else 'https'}://{value}"
    if value and not _is_url(url):
        default = _ENDPOINTS[protocol]
        read.refuse(variable, _hidden(value), "is no URL as http://HOST:PORT", default)
        url, own = default, False
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


def _hidden(value: str) -> str:
    """Value of an endpoint without what may be a password."""
    return value.rpartition("@")[2].partition("?")[0][:100]

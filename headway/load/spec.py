"""Specification of a load test: a frozen object that checks its values when it is built."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from headway.config.fields import check_options, tool_option, tool_options_of
from headway.core.tensors import BYTES, JSON, SIZES, count_of, join_elements
from headway.errors import SettingError

if TYPE_CHECKING:
    import ssl

DEFAULT_PATH = "/v1/inference"
DEFAULT_INPUT = "the quick brown fox jumps over the lazy dog"
EXPECTATIONS = ("none", "upper", "echo")
ALL = "all"  # Name of the only stream of requests when there is no mix of tiers.

_INPUT_MEMBERS = ("input", "input_data", "prompt")
_LOAD, _RESULT = "Load", "Results"
_MAX_REQUESTS = 500_000_000
_MAX_DATA = 1 << 30


@dataclass(frozen=True)
class Target:
    """Target of the requests. `authority` is the Host header. `path` includes the query."""

    host: str
    port: int
    authority: str
    path: str
    tls: bool = False

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """Settings of one load test. The constructor raises SettingError for impossible values."""

    target: Target
    # fmt: off
    rate: float = tool_option(MISSING, "--rate", "R", _LOAD,
        "Mean requests per second.", unit="requests/s", within=(0.001, 1_000_000))
    duration: float = tool_option(MISSING, "--duration", "S", _LOAD,
        "Seconds of load.", unit="s", within=(0.001, 604_800))
    arrivals: str = tool_option("poisson", "--arrivals", "poisson|uniform|FILE", _LOAD,
        "How requests arrive: at random (Poisson), evenly, or as in a trace, scaled to the rate: a CSV file with a TIMESTAMP column or "
        "a single column of seconds.",
        type=str)
    seed: int = tool_option(0, "--seed", "N", _LOAD, "Seed of the load: the same seed repeats the same load. Default: a new one.", type=int)
    mix: Mapping[str, float] = field(default_factory=dict)  # Weights of the tiers to send as X-Request-Tier; may be empty.
    keys: Mapping[str, str] = field(default_factory=dict)  # API keys by tier. The key at "" is for all tiers.
    body: Mapping[str, Any] = field(default_factory=lambda: {"input": DEFAULT_INPUT})
    member: str = "input"  # Member of the JSON body that holds the input, which differs in each request; may be empty.
    data: bytes = b""  # Tensors after the JSON body.
    timeout: float = tool_option(10.0, "--timeout", "S", _LOAD,
        "Give up on a request S seconds after it was due.", unit="s", within=(0.001, 3_600))
    promise: float | None = tool_option(None, "--promise", "MS", _RESULT,
        "Promised latency. The report says how many answers kept it.", unit="ms", per=1000, within=(0.001, 3_600_000))
    expect: str = tool_option("none", "--expect", "none|upper|echo", _RESULT,
        "Check that each answer is the input of its own request: in capitals, or unchanged.", type=str)
    connections: int | None = tool_option(None, "--connections", "N", _LOAD,
        "Maximum number of open connections. Default: as many as needed, up to 10,000.", type=int, within=(1, 60_000))
    # fmt: on
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        check_options(self, tool_options_of(self))
        if self.rate * self.duration > _MAX_REQUESTS:
            reason = f"makes {self.rate * self.duration:,.0f} requests at --rate {self.rate:g}"
            raise SettingError("--duration", self.duration, reason, f"Keep it under {_MAX_REQUESTS:,} requests.")
        if self.expect not in EXPECTATIONS:
            raise SettingError("--expect", self.expect, "is not known", f"Use {', '.join(EXPECTATIONS)}.")
        if self.expect != "none" and not self.member:
            members = ", ".join(_INPUT_MEMBERS)
            reason = f"needs a string member in the body to check answers against: {members}"
            raise SettingError("--expect", self.expect, reason, "Use none.")

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the request streams, in the order of the mix."""
        return tuple(self.mix) or (ALL,)

    @property
    def rows(self) -> int | None:
        """Rows of a request: the size of its first tensor's first axis. None if it has no tensors."""
        try:
            return int(self.body["inputs"][0]["shape"][0])
        except (KeyError, IndexError, TypeError, ValueError):
            return None


def parse_target(url: str, default: str = DEFAULT_PATH) -> Target:
    """Parse `http://host[:port][/path]`, or https. The default scheme is http, the default path `default`. Raises SettingError."""
    example = "For example http://127.0.0.1:8000/v1/inference."
    if not url.isascii() or not url.isprintable() or " " in url:
        raise SettingError("URL", url, "contains characters that are not allowed in a URL", example)
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as exc:
        raise SettingError("URL", url, f"is not a URL: {exc}", example) from None
    if parts.scheme not in ("http", "https"):
        raise SettingError("URL", url, f"the scheme {parts.scheme!r} is not supported", example)
    if not parts.hostname:
        raise SettingError("URL", url, "has no host", example)
    path = parts.path if parts.path not in ("", "/") else default
    authority = parts.netloc.rpartition("@")[2]
    tls = parts.scheme == "https"
    return Target(parts.hostname, port, authority, f"{path}?{parts.query}" if parts.query else path, tls)


def parse_mix(text: str) -> dict[str, float]:
    """Parse tier weights such as `enterprise=5,paid=25,free=70`. An empty string means no mix. Raises SettingError."""
    mix: dict[str, float] = {}
    example = "For example enterprise=5,paid=25,free=70."
    for part in filter(None, text.split(",")):
        name, _, weight = (piece.strip() for piece in part.partition("="))
        try:
            mix_weight = float(weight)
        except ValueError:
            mix_weight = math.nan
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name in mix or not 0 <= mix_weight < math.inf:
            raise SettingError("--mix", text, f"{part.strip()!r} is not TIER=WEIGHT with a new tier", example)
        mix[name] = mix_weight
    if mix and not sum(mix.values()) > 0:
        raise SettingError("--mix", text, "all weights are 0", example)
    return mix


def parse_keys(texts: Iterable[str], tiers: Iterable[str]) -> dict[str, str]:
    """Parse API keys: `TIER=KEY`, or `KEY` for all tiers. Raises SettingError, which names only the tier."""
    keys: dict[str, str] = {}
    known = list(tiers)
    for text in texts:
        # A key may end in equals signs, as base64 does.
        bare = text.rstrip("=")
        tier, equals, key = text.partition("=") if "=" in bare or bare in known else ("", "", text)
        shown = f"{tier}{equals}…"
        if tier and tier not in known:
            hint = f"Use {' or '.join(known)}." if known else "Also name the tier in --mix."
            raise SettingError("--key", shown, f"the mix has no tier {tier!r}", hint)
        if tier in keys:
            raise SettingError("--key", shown, "is given twice", "Give one key for each tier.")
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise SettingError("--key", shown, "is empty or has characters that a header can't have", "Copy it again.")
        keys[tier] = key
    return keys


def make_body(path: str, text: str | None, model: str | None, content: bytes | None) -> tuple[dict[str, Any], str]:
    """Return the body of the requests, and the name of the member that holds the input, or "" if none does. The names of
    members depend on the route. `content` is a JSON object to start from, or None for a minimal body. `text` and `model`
    override its members. If neither `content` nor `text` is given, the input is a short sentence. Raises SettingError if
    `content` is not a JSON object, or if the route needs a model but `model` and `content` name none."""
    route = path.partition("?")[0]
    model_member = "model_id" if route.endswith("/v1/predict") else "model"
    member = "input_data" if route.endswith("/v1/predict") else "input"
    if route.endswith("/v1/completions"):
        member = "prompt"
    body: dict[str, Any] = {}
    if content is not None:
        try:
            body = msgspec.json.decode(content, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            reason, hint = f"is not a JSON object: {exc}", 'For example {"input": "some text"}.'
            raise SettingError("--body", content[:40], reason, hint) from None
        member = next((name for name in _INPUT_MEMBERS if isinstance(body.get(name), str)), member if text else "")
    elif text is None:
        text = DEFAULT_INPUT
    if text is not None:
        body[member] = text
    if model is not None:
        body[model_member] = model
    if model_member == "model_id" and model_member not in body:
        raise SettingError("--model", None, f"must be given for {route}", "Name a model.")
    return body, member


def make_tensors(texts: Iterable[str]) -> tuple[dict[str, Any], bytes]:
    """Return the JSON body of requests with tensors of zeros, and the data that follows it, as in the Open Inference Protocol. Each
    text is `[NAME=]DATATYPE:SHAPE`, and the first axis is the rows. Raises SettingError if one is malformed, or row counts differ."""
    headers: list[dict[str, Any]] = []
    data = []
    for text in texts:
        name, _, kind = text.rpartition("=")
        datatype, _, sizes = kind.partition(":")
        axes = sizes.split(",")
        if datatype not in SIZES or datatype == JSON or not all(axis.isdecimal() and int(axis) for axis in axes):
            known = ", ".join(name for name in SIZES if name != JSON)
            reason = "is not [NAME=]DATATYPE:SHAPE"
            raise SettingError("--tensor", text, reason, f"For example FP32:8,4 for 8 rows. Datatypes are {known}.")
        shape = [int(axis) for axis in axes]
        if headers and shape[0] != headers[0]["shape"][0]:
            reason = f"has {shape[0]} rows, but the first tensor has {headers[0]['shape'][0]}"
            raise SettingError("--tensor", text, reason, "Give all tensors the same number of rows.")
        if count_of(shape) * (SIZES[datatype] or 1) > _MAX_DATA:
            raise SettingError("--tensor", text, f"is larger than {_MAX_DATA >> 20} MiB", "Give fewer rows.")
        zeros = bytes(SIZES[datatype] * count_of(shape))
        data.append(zeros if datatype != BYTES else join_elements([DEFAULT_INPUT.encode()] * count_of(shape)))
        parameters = {"binary_data_size": len(data[-1])}
        headers.append({"name": name or "INPUT", "datatype": datatype, "shape": shape, "parameters": parameters})
    return {"inputs": headers, "parameters": {"binary_data_output": True}}, b"".join(data)

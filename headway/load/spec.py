"""Order for a load test: one frozen object, checked when it is built."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from headway.config.tool_options import check_options, tool_option, tool_options_of
from headway.core.tensors import BYTES, JSON, SIZES, count_of, join_elements
from headway.errors import SettingError

if TYPE_CHECKING:
    import ssl

DEFAULT_PATH = "/v1/inference"
DEFAULT_INPUT = "the quick brown fox jumps over the lazy dog"
EXPECTATIONS = ("none", "upper", "echo")
ALL = "all"
"""Name of the one stream of requests when no mix of tiers is asked for."""

_INPUT_MEMBERS = ("input", "input_data", "prompt")
_LOAD, _RESULT = "Load", "Results"
_MAX_REQUESTS = 500_000_000
_MAX_DATA = 1 << 30


@dataclass(frozen=True)
class Target:
    """Target of the requests.

    Attributes:
        host, port: address to connect to.
        authority: value of the Host header.
        path: path and query.
        tls: whether it speaks TLS.
    """

    host: str
    port: int
    authority: str
    path: str
    tls: bool = False

    @property
    def url(self) -> str:
        """URL that is asked."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """Order for a load test. Raises SettingError when a part of it cannot be.

    Attributes:
        target: target of the requests.
        rate: mean requests per second.
        duration: seconds during which requests fall due.
        arrivals: `poisson`, `uniform`, or the path of a trace file.
        seed: seed of the draws of arrivals and tiers; the same seed gives the same load.
        mix: tier name to weight; the tier is sent as X-Request-Tier. Empty: no tier is sent.
        keys: tier name to API key; the key under "" serves all tiers.
        body: members of the JSON body; the member `member` is made different in each request.
        member: name of the body's member that holds the input; "" when it has none to vary.
        data: octets behind the JSON body, which are those of its tensors.
        timeout: seconds from the due instant until a request counts as timed out.
        promise: latency promise in seconds, for goodput; None for none.
        expect: check of the answer's `output`: `none`, `upper` (the input in capitals) or `echo`.
        connections: most connections open at once; None for as many as the process may open, up to 10,000.
        tls: certificates to trust and to show, where the target speaks TLS.
    """

    target: Target
    rate: float = tool_option(
        MISSING,
        "--rate",
        "R",
        _LOAD,
        "Mean requests per second.",
        unit="requests/s",
        within=(0.001, 1_000_000),
    )
    duration: float = tool_option(
        MISSING, "--duration", "S", _LOAD, "Seconds of load.", unit="s", within=(0.001, 604_800)
    )
    arrivals: str = tool_option(
        "poisson",
        "--arrivals",
        "poisson|uniform|FILE",
        _LOAD,
        "When requests come: Poisson, evenly, or as in a trace (CSV with a TIMESTAMP column or one column of seconds), its "
        "time scaled to the rate.",
        type=str,
    )
    seed: int = tool_option(0, "--seed", "N", _LOAD, "Same seed, same load. By default a new one.", type=int)
    mix: Mapping[str, float] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=lambda: {"input": DEFAULT_INPUT})
    member: str = "input"
    data: bytes = b""
    timeout: float = tool_option(
        10.0, "--timeout", "S", _LOAD, "Give a request up after S seconds.", unit="s", within=(0.001, 3_600)
    )
    promise: float | None = tool_option(
        None,
        "--promise",
        "MS",
        _RESULT,
        "Latency promise, to count the answers in time.",
        unit="ms",
        per=1000,
        within=(0.001, 3_600_000),
    )
    expect: str = tool_option(
        "none",
        "--expect",
        "none|upper|echo",
        _RESULT,
        "Check each answer against its own request: the input in capitals, or as it is.",
        type=str,
    )
    connections: int | None = tool_option(
        None,
        "--connections",
        "N",
        _LOAD,
        "Most connections at once. By default as many as it takes, up to 10,000.",
        type=int,
        within=(1, 60_000),
    )
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
            raise SettingError(
                "--expect", self.expect, f"the body has no text member {members} to check answers by", "Use none."
            )

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the streams of requests, in the order of the mix."""
        return tuple(self.mix) or (ALL,)

    @property
    def rows(self) -> int | None:
        """Rows of a request: the first axis of its first tensor; None where the body has no tensors."""
        try:
            return int(self.body["inputs"][0]["shape"][0])
        except (KeyError, IndexError, TypeError, ValueError):
            return None


def parse_target(url: str, default: str = DEFAULT_PATH) -> Target:
    """The target of `http://host[:port][/path]`, or of https; without a scheme http, without a path `default`.

    Raises:
        SettingError: not such a URL.
    """
    example = "For example http://127.0.0.1:8000/v1/inference."
    if not url.isascii() or not url.isprintable() or " " in url:
        raise SettingError("URL", url, "has characters no URL has", example)
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as exc:
        raise SettingError("URL", url, f"is no URL: {exc}", example) from None
    if parts.scheme not in ("http", "https"):
        raise SettingError("URL", url, f"the scheme {parts.scheme!r} is not supported", example)
    if not parts.hostname:
        raise SettingError("URL", url, "names no host", example)
    path = parts.path if parts.path not in ("", "/") else default
    authority = parts.netloc.rpartition("@")[2]
    tls = parts.scheme == "https"
    return Target(parts.hostname, port, authority, f"{path}?{parts.query}" if parts.query else path, tls)


def parse_mix(text: str) -> dict[str, float]:
    """Tier weights from `enterprise=5,paid=25,free=70`; empty text for no mix.

    Raises:
        SettingError: not of that form, a tier twice, or no weight above 0.
    """
    mix: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, weight = (piece.strip() for piece in part.partition("="))
        try:
            mix_weight = float(weight)
        except ValueError:
            mix_weight = math.nan
        if not _is_token(name) or name in mix or not (math.isfinite(mix_weight) and mix_weight >= 0):
            raise SettingError(
                "--mix", text, f"{part.strip()!r} is not a new TIER=WEIGHT", "For example enterprise=5,paid=25,free=70."
            )
        mix[name] = mix_weight
    if mix and not sum(mix.values()) > 0:
        raise SettingError("--mix", text, "all weights are 0", "For example enterprise=5,paid=25,free=70.")
    return mix


def parse_keys(texts: Iterable[str], tiers: Iterable[str]) -> dict[str, str]:
    """API keys from `TIER=KEY` or, for all tiers, `KEY`.

    Raises:
        SettingError: a tier that is not one of `tiers`, a key twice for one tier, or a key that no header can
            carry. Keys are not shown.
    """
    keys: dict[str, str] = {}
    known = list(tiers)
    for text in texts:
        # A key may end in equals signs, as base64 does.
        bare = text.rstrip("=")
        tier, equals, key = text.partition("=") if "=" in bare or bare in known else ("", "", text)
        shown = f"{tier}{equals}…"
        if tier and tier not in known:
            hint = f"Use {' or '.join(known)}." if known else "Name it in --mix, too."
            raise SettingError("--key", shown, f"the mix has no tier {tier!r}", hint)
        if tier in keys:
            raise SettingError("--key", shown, "is given twice", "Give one key for each tier.")
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise SettingError("--key", shown, "is empty or has characters no header can carry", "Copy it again.")
        keys[tier] = key
    return keys


def make_body(path: str, text: str | None, model: str | None, content: bytes | None) -> tuple[dict[str, Any], str]:
    """The body of the requests, and the name of its member that holds the input, "" when none does.

    Arguments:
        path: route; `/v1/predict` and `/v1/completions` name their members differently from the others.
        text: the input; None for that of `content`, or a short sentence.
        model: name of the model; None to leave it out, or for that of `content`.
        content: a JSON object to start from; None for the least that the route asks for.

    Raises:
        SettingError: the content is not a JSON object, or the route asks for a model and none is named.
    """
    route = path.partition("?")[0]
    model_member = "model_id" if route.endswith("/v1/predict") else "model"
    member = "input_data" if route.endswith("/v1/predict") else "input"
    if route.endswith("/v1/completions"):
        member = "prompt"
    body: dict[str, Any] = {}
    if content is not None:
        body = _decoded(content)
        member = next((name for name in _INPUT_MEMBERS if isinstance(body.get(name), str)), member if text else "")
    elif text is None:
        text = DEFAULT_INPUT
    if text is not None:
        body[member] = text
    if model is not None:
        body[model_member] = model
    if model_member == "model_id" and model_member not in body:
        raise SettingError("--model", None, f"{route} asks for a model", "Name it.")
    return body, member


def make_tensors(texts: Iterable[str]) -> tuple[dict[str, Any], bytes]:
    """The body of requests with tensors of zeros, and the data behind it, by the Open Inference Protocol.

    Arguments:
        texts: for each tensor `[NAME=]DATATYPE:SHAPE`, the first axis of which are the rows.

    Raises:
        SettingError: not of that form, or with another number of rows than the first.
    """
    heads: list[dict[str, Any]] = []
    data = []
    for text in texts:
        name, _, kind = text.rpartition("=")
        datatype, _, sizes = kind.partition(":")
        axes = sizes.split(",")
        if datatype not in SIZES or datatype == JSON or not all(one.isdecimal() and int(one) for one in axes):
            known = ", ".join(one for one in SIZES if one != JSON)
            reason = "is not [NAME=]DATATYPE:SHAPE"
            raise SettingError("--tensor", text, reason, f"For example FP32:8,4, of 8 rows. Datatypes are {known}.")
        shape = [int(one) for one in axes]
        if heads and shape[0] != heads[0]["shape"][0]:
            reason = f"has {shape[0]} rows, and the first tensor {heads[0]['shape'][0]}"
            raise SettingError("--tensor", text, reason, "Give all as many.")
        if count_of(shape) * (SIZES[datatype] or 1) > _MAX_DATA:
            raise SettingError("--tensor", text, f"is of more than {_MAX_DATA >> 20} MiB", "Give fewer rows.")
        one = bytes(SIZES[datatype] * count_of(shape))
        data.append(one if datatype != BYTES else join_elements([DEFAULT_INPUT.encode()] * count_of(shape)))
        told = {"binary_data_size": len(data[-1])}
        heads.append({"name": name or "INPUT", "datatype": datatype, "shape": shape, "parameters": told})
    return {"inputs": heads, "parameters": {"binary_data_output": True}}, b"".join(data)


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SettingError(
            "--body", content[:40], f"is not a JSON object: {exc}", 'For example {"input": "some text"}.'
        ) from None


def _is_token(name: str) -> bool:
    return bool(name) and name.isascii() and all(c.isalnum() or c in "-_." for c in name)

"""Codecs of the three native routes: requests, outputs and problem documents.

All three mean the same inside: a model, an input, parameters. A body is decoded once and an answer encoded
once; whatever is wrong with a body becomes a BadRequest that names the member and what was expected of it. Of a
member that is there twice the last one counts, here and in the workers alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

import msgspec

from headway.config import Settings
from headway.core.parameters import decode as decode_parameters
from headway.errors import (
    BACKEND_ERROR,
    HOPELESS,
    SHOWN,
    STATUS,
    TITLE,
    UNAUTHENTICATED,
    BadRequest,
    PayloadTooLarge,
)
from headway.model import Failure

MAX_DEPTH = 32
"""Deepest nesting of `parameters`, as a worker must be able to decode whatever was accepted."""

_ABSENT = msgspec.Raw()
_NUL = "the input contains U+0000, which not every model can hold; remove it"
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_LABEL = re.compile(r"[a-z0-9_-]{1,40}")
_CONTROL = re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Control characters: C0 without tab, line feed and carriage return; DEL; C1. U+0000 is refused before."""

Check = Callable[[str], str]
"""Function that takes an input and returns what the model gets, or raises RequestError."""


class _Inference(msgspec.Struct, gc=False):
    input: str
    model: str | None = None
    parameters: msgspec.Raw = _ABSENT
    client_id: str | None = None


class _Plain(msgspec.Struct, gc=False):
    input: str
    model: ClassVar[None] = None
    parameters: ClassVar[msgspec.Raw] = _ABSENT


class _Predict(msgspec.Struct, gc=False):
    model: str = msgspec.field(name="model_id")
    input: str = msgspec.field(name="input_data")
    parameters: ClassVar[msgspec.Raw] = _ABSENT


class _Metadata(msgspec.Struct, gc=False):
    tokens_used: None
    latency_ms: float
    model_version: str


class _InferenceAnswer(msgspec.Struct, gc=False):
    request_id: str
    output: str
    metadata: _Metadata


class _PlainAnswer(msgspec.Struct, gc=False):
    output: str
    request_id: str
    latency_ms: float


class _PredictAnswer(msgspec.Struct, gc=False):
    request_id: str
    output: str
    latency_ms: float


class Problem(msgspec.Struct, gc=False):
    """An error document: the members of RFC 9457, and the short ones with the same content."""

    type: str
    title: str
    status: int
    detail: str
    error: str
    message: str
    request_id: str
    retry_after_ms: int | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Shape:
    """Codec of one native route.

    Attributes:
        path: path of the route.
        read: body to (model or None, input, parameters as the text of a JSON object or empty). Raises RequestError.
        text: the input in a body that is the input itself. Raises RequestError.
        write: (shown id, output, milliseconds, model version) to the body of the answer. Raises UnicodeEncodeError when
            the output holds a lone surrogate.
        octets: whether an `application/octet-stream` body is the input itself.
    """

    path: str
    read: Callable[[bytes], tuple[str | None, str, bytes]]
    text: Callable[[bytes], str]
    write: Callable[[str, str, float, str], bytes]
    octets: bool = False


_encode = msgspec.json.Encoder().encode


def _reader(
    kind: type[Any], most_parameters: int, check: Check | None
) -> Callable[[bytes], tuple[str | None, str, bytes]]:
    decode = msgspec.json.Decoder(kind).decode

    def read(body: bytes) -> tuple[str | None, str, bytes]:
        try:
            if not body.isascii():
                body.decode()
            asked = decode(body)
            raw = asked.parameters
            parameters = b"" if raw is _ABSENT else _parameters(raw, most_parameters)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(_why(exc, body)) from None
        text = asked.input
        if "\x00" in text:
            raise BadRequest(_NUL)
        return asked.model, text if check is None else check(text), parameters

    return read


def _text_reader(check: Check | None) -> Callable[[bytes], str]:
    def read(body: bytes) -> str:
        try:
            text = body.decode()
        except UnicodeDecodeError as exc:
            raise BadRequest(_why(exc, body)) from None
        if "\x00" in text:
            raise BadRequest(_NUL)
        return text if check is None else check(text)

    return read


def _checker(settings: Settings) -> Check | None:
    """Make the check of inputs under these settings; None for nothing to check."""
    most, policy = settings.max_input_chars, settings.control_chars
    if not most and policy == "keep":
        return None

    def check(text: str) -> str:
        if most and len(text) > most:
            raise PayloadTooLarge(f"the input has {len(text)} characters; at most {most} are taken (max_input_chars)")
        if policy == "keep" or text.isprintable():
            return text
        if policy == "strip":
            return _CONTROL.sub("", text)
        found = _CONTROL.search(text)
        if found is not None:
            where = f"U+{ord(found[0]):04X} at character {found.start()}"
            raise BadRequest(f"the input contains the control character {where}; remove it (control_chars)")
        return text

    return check


def _parameters(raw: msgspec.Raw, most: int) -> bytes:
    text = bytes(raw)
    if text == b"null":
        return b""
    tree = decode_parameters(text)
    if not isinstance(tree, dict):
        raise BadRequest("Expected `object | null` - at `$.parameters`")
    if len(tree) > most:
        raise BadRequest(f"`$.parameters` has {len(tree)} members; at most {most} are taken (max_parameters)")
    if text.count(b"{") + text.count(b"[") > MAX_DEPTH and _deeper(tree, MAX_DEPTH):
        raise BadRequest(f"`$.parameters` is nested deeper than {MAX_DEPTH} levels")
    return text if tree else b""


def _deeper(tree: object, levels: int) -> bool:
    """True when `tree` has more than `levels` levels."""
    layer = [tree]
    for _ in range(levels):
        below: list[object] = []
        for node in layer:
            if isinstance(node, dict):
                below.extend(node.values())
            elif isinstance(node, list):
                below.extend(node)
        layer = [node for node in below if isinstance(node, dict | list)]
        if not layer:
            return False
    return True


def _why(exc: Exception, body: bytes) -> str:
    if isinstance(exc, UnicodeDecodeError):
        return f"the body is not UTF-8: {exc.reason} at byte {exc.start}"
    if isinstance(exc, RecursionError):
        return "the body is nested too deeply"
    if isinstance(exc, msgspec.ValidationError):
        return str(exc)
    if not body:
        return "the body is empty; expected a JSON object"
    if _LONE_SURROGATE.search(body):
        return r"the body contains a lone surrogate (\ud800 to \udfff without its other half), which is no text"
    return f"the body is not JSON: {exc}"


def _write_inference(shown: str, output: str, milliseconds: float, version: str) -> bytes:
    return _encode(_InferenceAnswer(shown, output, _Metadata(None, milliseconds, version)))


def _write_plain(shown: str, output: str, milliseconds: float, version: str) -> bytes:
    return _encode(_PlainAnswer(output, shown, milliseconds))


def _write_predict(shown: str, output: str, milliseconds: float, version: str) -> bytes:
    return _encode(_PredictAnswer(shown, output, milliseconds))


_NATIVE: tuple[tuple[str, type[Any], Callable[[str, str, float, str], bytes], bool], ...] = (
    ("/v1/inference", _Inference, _write_inference, False),
    ("/api/inference", _Plain, _write_plain, False),
    ("/v1/predict", _Predict, _write_predict, True),
)

PATHS = tuple(path for path, *_ in _NATIVE)
"""Paths of the native routes."""


def native(settings: Settings) -> tuple[Shape, ...]:
    """Codecs of the native routes, with the checks that these settings ask for."""
    check = _checker(settings)
    text = _text_reader(check)
    return tuple(
        Shape(path, _reader(kind, settings.max_parameters, check), text, write, octets)
        for path, kind, write, octets in _NATIVE
    )


def patience(code: str, retry_after: float | None) -> float | None:
    """Seconds after which a retry makes sense: as given, or 1 where the status must name one."""
    if retry_after is None and STATUS[code] in (429, 503):
        return 1.0
    return retry_after


def anchor(code: str) -> str:
    """Anchor on the page /docs that describes an error."""
    return code.lower().replace("_", "-")


def problem(code: str, message: str, shown: str, retry_after: float | None = None) -> Problem:
    """Problem document of one error.

    Arguments:
        code: a code of `headway.errors`.
        message: what happened, for the client to read.
        shown: the request's id as clients see it, `req_…`.
        retry_after: seconds after which a retry makes sense; None when it does not, or is not known.
    """
    document = Problem(
        type=f"/docs#{anchor(code)}",
        title=TITLE[code],
        status=STATUS[code],
        detail=message,
        error=SHOWN.get(code, code),
        message=message,
        request_id=shown,
    )
    seconds = patience(code, retry_after)
    if seconds is not None:
        document.retry_after_ms = math.ceil(max(seconds, 0.0) * 1000)
    return document


def no_text() -> Failure:
    """Failure of a request whose output cannot be sent, as it is no proper text."""
    return Failure(BACKEND_ERROR, "the model's output contains a lone surrogate, which is no text")


def escaped(text: str) -> str:
    """`text` with lone surrogates escaped, as a model may return them."""
    return text.encode("utf-8", "backslashreplace").decode()


def problem_body(document: Problem) -> bytes:
    """Problem document as JSON. Lone surrogates, as a model may return them, are escaped."""
    try:
        return _encode(document)
    except UnicodeEncodeError:
        document.detail = document.message = escaped(document.message)
        return _encode(document)


def problem_header(code: str, retry_after: float | None = None, reason: str = "") -> dict[str, str]:
    """Header fields of an error.

    Arguments:
        code: a code of `headway.errors`.
        retry_after: seconds after which a retry makes sense; None when it does not, or is not known.
        reason: short label for metrics of why the request is refused.
    """
    fields = {"content-type": "application/problem+json"}
    seconds = patience(code, retry_after)
    if seconds is not None and STATUS[code] in (429, 503):
        fields["retry-after"] = str(max(1, math.ceil(seconds)))
        fields["retry-after-ms"] = str(math.ceil(max(seconds, 0.0) * 1000))
    if code in HOPELESS:
        fields["x-should-retry"] = "false"
    if code == UNAUTHENTICATED:
        fields["www-authenticate"] = "Bearer"
    if _LABEL.fullmatch(reason):
        fields["x-headway-dropped-reason"] = reason
    return fields


def problem_response(
    code: str,
    message: str,
    shown: str,
    *,
    date: bytes,
    retry_after: float | None = None,
    reason: str = "",
    close: bool = False,
    fields: bytes = b"",
) -> bytes:
    """Whole HTTP/1.1 response with the problem document of one error, as `problem` and `problem_header` make them.

    Arguments:
        code: a code of `headway.errors`.
        message: what happened, for the client to read.
        shown: the request's id as clients see it, `req_…`.
        date: value of its Date header.
        retry_after: seconds after which a retry makes sense; None when it does not, or is not known.
        reason: short label for metrics of why the request is refused.
        close: whether the response says that the connection ends.
        fields: further lines of its header, each with its end.
    """
    body = problem_body(problem(code, message, shown, retry_after))
    status = STATUS[code]
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ndate: {date.decode()}\r\nx-request-id: {shown}"]
    lines.extend(f"{name}: {value}" for name, value in problem_header(code, retry_after, reason).items())
    if close:
        lines.append("connection: close")
    lines.append(f"content-length: {len(body)}\r\n")
    return b"%b%b\r\n%b" % ("\r\n".join(lines).encode("ascii"), fields, body)

"""Input from clients: heads, header values and bodies."""

from __future__ import annotations

import json
import uuid

from headway.config import Settings
from headway.doors.bodies import read_text
from headway.doors.fields import MOST_KEY
from headway.errors import RequestError
from headway.http.inference.inference_head import InferenceHead, read_inference_head
from headway.http.inference.routes import Routes, codecs
from headway.http.server.head import END, Head, RequestTarget, read_head, suspect
from headway.http.server.reader import Chunks
from tests.fuzz.models import check_error, context_of, models_of

_SETTINGS = Settings()
_CODECS = tuple(codecs(_SETTINGS).values())
_ROUTES = Routes(_SETTINGS)
_CONTEXT = context_of(_SETTINGS, models_of())
_MOST = 4096
_SLACK = 512

HEADS = (
    b"POST /v1/inference HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Type: application/json\r\n\r\n",
    (
        b"POST /v1/predict?model_id=m HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    ),
    b"GET /v1/result/req_0190b9a5-0000-7000-8000-000000000000?wait=3 HTTP/1.0\r\nConnection: keep-alive, close\r\n\r\n",
    (
        b"POST http://a/api/inference HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nPrefer: respond-async, wait=2\r\n"
        b"Idempotency-Key: k\r\nX-Request-Tier: free\r\nX-Request-Timeout-Ms: 20\r\nX-Request-Id: req_"
        b"0190b9a5-0000-7000-8000-000000000000\r\nAuthorization: Bearer x\r\nCache-Control: no-cache\r\n\r\n"
    ),
)
HEAD_WORDS = (
    b"Content-Length: 5\r\n", b"Content-Length: +5\r\n", b"Transfer-Encoding: chunked\r\n", b"transfer-encoding:\tgzip, chunked\r\n",
    b"Host: b\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"HTTP/1.1", b"HTTP/2.0",
    b"HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT", b"OPTIONS", b" :", b"\r\n ", b"\r\n\r\n", b"X: y\r\n",
    b"?model_id=", b"%ff", b"http://", b"*", b"\x16\x03\x01", b"%2f", b"%2F", b"Host: localhost:1@evil\r\n", b"Host: [::1]:80\r\n",
    b"Content-Length: " + b"0" * 5000 + b"\r\n", b"Content-Length: " + b"9" * 19 + b"\r\n",
)  # fmt: skip

_FIELDS = (
    b"prefer",
    b"idempotency-key",
    b"x-request-timeout-ms",
    b"x-request-tier",
    b"x-request-id",
    b"cache-control",
    b"content-encoding",
    b"content-type",
    b"authorization",
    b"query",
)
VALUES = (
    b"0respond-async, wait=10",
    b'0wait="3"; a=b, respond-async',
    b"18e03978e-40d5-43e8-bc93-6894a57f9324",
    b'1"quoted \\"key\\""',
    b"21500.5",
    b"3free",
    b"4req_0190b9a5-0000-7000-8000-000000000000",
    b"5no-cache, max-age=0",
    b"6identity",
    b"7application/octet-stream; charset=utf-8",
    b"8Bearer hw_live_x",
    b"9model_id=default&x=y",
)
VALUE_WORDS = (
    b"respond-async", b"wait=", b'"', b'\\"', b", ", b"; ", b"=", b"enterprise", b"paid", b"free", b"gzip", b"no-store",
    b"model_id=", b"&", b"%zz", b"req_", b"1e5", b".", b"application/octet-stream",
)  # fmt: skip

CHUNKED = (
    b"5\r\nhello\r\n0\r\n\r\n",
    b"1\r\na\r\n1;x=y\r\nb\r\n0\r\nTrailer: t\r\n\r\nPOST /next HTTP/1.1\r\n",
    b"A\r\n0123456789\r\n00\r\n\r\n",
    b"3\r\n\r\n\r\r\n4\r\n\r\n\r\n\r\n0\r\n\r\n",
)
CHUNK_WORDS = (
    b"0\r\n\r\n", b"\r\n", b"1\r\na\r\n", b"ffffffffffffffff", b"FFFFFFF", b"-1", b"+5", b"0x5", b"5 ", b";ext=\"q\"", b"5\nhello\n",
    b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n",
)  # fmt: skip

BODIES = (
    b'{"input":"hello","model":"default","parameters":{"a":[1,{"b":null}]},"client_id":"c"}',
    b'{"model_id":"default","input_data":"hello"}',
    '{"input":"h\\u00e9llo \\ud83d\\ude00 é"}'.encode(),
    b"plain text",
    b'{"input":"' + b"x" * 200 + b'","parameters":{"a":1,"b":2,"c":3,"d":4}}',
    b'{"input":"\\u0007\\u001b[2J","parameters":{"a":' + b"[" * 31 + b"]" * 31 + b"}}",
)
BODY_WORDS = (
    b'"input":', b'"input_data":', b'"model_id":', b'"parameters":', b'{"a":', b"[" * 40, b"]" * 40, b'{"a":' * 40, b"}" * 40,
    b"\\udc00", b"\\u0000", b"\\u0085", b'"x"', b":", b",", b"1e400", b"-0", b"\xef\xbb\xbf",
)  # fmt: skip


def check_head(data: bytes) -> None:
    """A head is read completely or refused, and no prefix of a valid head looks suspect."""
    at = data.find(END)
    raw = data + END if at < 0 else data[: at + len(END)]
    why = suspect(data[: at if at >= 0 else len(data)])
    assert why is None or why.message.isprintable()
    try:
        head = read_head(raw)
    except RequestError as exc:
        check_error(exc)
        return
    assert -1 <= head.length < 1 << 64
    assert b"%2f" not in head.target.partition(b"?")[0].lower() or head.target.startswith(
        (b"/v1/models/", b"/v2/models/")
    )
    assert b"@" not in head.single.get(b"host", b"")
    assert b"host" in head.single or head.version == "1.0"
    assert not (head.length >= 0 and b"transfer-encoding" in head.single)
    assert all(b"\r" not in value and b"\n" not in value and b"\0" not in value for _, value in head.fields)
    for end in {1, len(raw) // 3, len(raw) // 2, len(raw) - 4}:
        assert suspect(raw[:end]) is None, raw[:end]
    _ROUTES.error_form(head.target)
    _, target = _ROUTES.find(head.target) or (None, RequestTarget({}, b""))
    target = target._replace(names={"model": "m", **target.names})
    _check_orders(head, target)


def check_values(data: bytes) -> None:
    """The first byte picks the header field, the rest is its value."""
    value = data[1:].translate(None, b"\r\n\0").strip(b" \t")
    field = _FIELDS[data[0] % 16 % len(_FIELDS)] if data else b"prefer"
    head = Head(b"POST", b"/", "1.1", [(field, value)])
    head.length = len(value)
    head.single = {b"host": b"a", field: value}
    if field == b"query":
        head.single[b"content-type"] = b"application/octet-stream"
    _check_orders(head, RequestTarget({"model": "m"}, value if field == b"query" else b"model_id=m"))


def _check_orders(head: Head, target: RequestTarget) -> None:
    for codec in _CODECS:
        try:
            order = read_inference_head(codec, head, target, _CONTEXT, None)
        except RequestError as exc:
            check_error(exc)
        else:
            _check_order(order)


def _check_order(order: InferenceHead) -> None:
    settings = _SETTINGS
    longest = settings.task_timeout_ms if order.wish is not None else settings.request_timeout_ms
    assert 0 < order.options.timeout <= longest / 1000
    assert 0 <= order.options.tier < len(settings.tier_names)
    assert 0 <= order.wait <= settings.request_timeout_ms / 1000
    assert len(order.options.key) <= MOST_KEY
    assert order.options.key.isascii()
    assert not order.options.key or order.options.key.isprintable()
    assert not order.id or str(uuid.UUID(order.id)) == order.id
    if order.wish is not None:
        assert order.wish.applied.decode("ascii").isprintable()


def check_chunks(data: bytes) -> None:
    """A body is the same however it is split, and never larger than allowed."""
    whole = _unwrapped([data])
    step = 1 + len(data) % 7
    pieces = _unwrapped([data[at : at + step] for at in range(0, len(data), step)])
    if whole is not None and pieces is not None:
        assert whole == pieces
    if whole is not None:
        content, rest, done = whole
        assert len(content) <= _MOST
        assert data.endswith(rest)
        assert done or not rest


def _unwrapped(pieces: list[bytes]) -> tuple[bytes, bytes, bool] | None:
    """Return the content, what follows it, and whether it was complete; None if it was refused."""
    chunks = Chunks(_MOST, _SLACK)
    content = b""
    for place, piece in enumerate(pieces):
        try:
            more, rest = chunks.feed(piece)
        except RequestError as exc:
            check_error(exc)
            return None
        content += more
        if chunks.done:
            return content, rest + b"".join(pieces[place + 1 :]), True
    return content, b"", False


def check_body(data: bytes) -> None:
    """Accepted input is a string, with parameters that a worker can read."""
    for codec in _NATIVE:
        try:
            model, text, parameters = codec.read(data)
        except RequestError as exc:
            check_error(exc)
            continue
        assert model is None or isinstance(model, str)
        _check_text(text)
        assert parameters == b"" or isinstance(json.loads(parameters), dict)
    try:
        _check_text(read_text(data))
    except RequestError as exc:
        check_error(exc)


_NATIVE = [codecs(_SETTINGS)[path] for path in ("/v1/inference", "/api/inference", "/v1/predict")]


def _check_text(text: str) -> None:
    text.encode()
    assert "\0" not in text

"""What a tenant does at its worst, by the resource that it takes: over HTTP, and with frames of its own over gRPC."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.load import http2
from bench.stand import stand
from headway.grpc import messages
from headway.oip.tensors import pack

KEY = b"?" * len(stand.fresh_key()[2])
"""Placeholder of the tenant's key, as long as every key, since lengths that stand in a request hold for it."""

Request = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Worst:
    """What one tenant does.

    Attributes:
        what: it does, in words.
        request: the bytes of its request of this number.
        connections: it uses at once.
        every: seconds between two requests of a connection; 0: as fast as they are answered.
        limited: its key has a limit.
        waits: it waits for answers; else it only holds its connections.
        leaves: it leaves as soon as it has sent a request.
        grpc: it comes to the gRPC port. Its answers are read and dropped, and it waits for none.
        once: requests after which a connection sends no more; 0: none.
        streams: streams of messages on each connection, over gRPC, by a client that heeds flow control; `request` is a message.
        flags: further ones of the service's command line.
    """

    what: str
    request: Request
    connections: int
    every: float = 0.0
    limited: bool = True
    waits: bool = True
    leaves: bool = False
    grpc: bool = False
    once: int = 0
    streams: int = 0
    flags: tuple[str, ...] = ()


def _ask(text: str, *fields: str, **members: Any) -> bytes:
    return _post(json.dumps({"input": text, **members}).encode(), *fields)


def _post(body: bytes, *fields: str, path: str = "/v1/inference", method: str = "POST") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: bench",
        f"Content-Length: {len(body)}",
        f"Authorization: Bearer {KEY.decode()}",
    ]
    return "\r\n".join([*lines, *fields, "", ""]).encode() + body


def _label(number: int) -> bytes:
    """Something else that a metric could be labelled with, each time."""
    one = f"x{number}"
    return [
        _ask("label", model=one),
        _ask("label", f"X-Request-Tier: {one}"),
        _post(b"{}", path=f"/{one}"),
        _post(b"", path="/v1/inference", method=one.upper()),
    ][number % 4]


_UNENDED = _ask("b" * 1_000_000)[:-1]
_HALF = _ask("h" * 5_000_000)[:2_500_000]
_UNWANTED = _post(b"u" * 5_000_000, path="/v1/inference", method="PUT")
_ROOMY = ("--max-body-bytes", "8000000")
_CHUNKED = _post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
_TINY = _CHUNKED + b"1\r\na\r\n" * 50_000
_EMPTY = _CHUNKED + (b"1000\r\n" + b"\r\n" * 2048 + b"\r\n") * 100

WORST: dict[str, Worst] = {
    "queue": Worst("asks more than there is capacity", lambda n: _ask(f"flood {n}"), 300, limited=False),
    "retry budget": Worst("every input raises", lambda n: _ask(f"POISON {n}"), 16, every=1.0),
    "kept outcomes": Worst(
        "answers of 1 MB under keys of their own",
        lambda n: _ask(f"BIG {n}", f"Idempotency-Key: k{n}", "Prefer: respond-async"), 16, every=1.0,
    ),
    "memory": Worst("inputs of 0.9 MB", lambda n: _ask("m" * 900_000 + str(n)), 64, limited=False),
    "connections": Worst("as many connections as it gets, idle", lambda n: _ask(f"c {n}"), 3000, every=600.0),
    "bodies": Worst("1 MB of a body, never ended", lambda n: _UNENDED, 300, waits=False),
    "half bodies": Worst("half of 5 MB, and away", lambda n: _HALF, 100, limited=False, leaves=True, flags=_ROOMY),
    "refused bodies": Worst("5 MB that nobody wants, and away", lambda n: _UNWANTED, 100, limited=False, leaves=True),
    "chunks": Worst("bodies in chunks of one byte, and of empty lines", lambda n: (_TINY, _EMPTY)[n % 2], 16, limited=False),
    "ledger": Worst("an unknown model, as fast as it goes", lambda n: _ask("x", model="none"), 50),
    "metric labels": Worst("other models, tiers, routes and methods", _label, 50),
    "dead letters": Worst("inputs that the model refuses", lambda n: _ask(f"REJECT {n}"), 16, every=0.5),
    "log": Worst("requests that are none", lambda n: _post(b"{" * 200, f"X-Request-Timeout-Ms: {n}x"), 50),
}  # fmt: skip


# Over gRPC.

_PREDICT = f"/{messages.HEADWAY}/Predict"
_INFER = f"/{messages.OPEN_INFERENCE}/ModelInfer"
_STREAM = f"/{messages.OPEN_INFERENCE}/ModelStreamInfer"
_WATCH = f"/{messages.HEALTH}/Watch"
_REFLECT = f"/{messages.REFLECTION}/ServerReflectionInfo"
_AUTHORIZATION = (("authorization", f"Bearer {KEY.decode()}"),)
_INPUT = messages.message("headway.v1.PredictRequest")
_TENSOR = messages.message("inference.ModelInferRequest")


def _input(text: str) -> bytes:
    return bytes(_INPUT(input_data=text.encode()).SerializeToString())


def _call(number: int, method: str, body: bytes, more: http2.Fields = _AUTHORIZATION, *, end: bool = True) -> bytes:
    return http2.headers(number, method, more) + http2.message(number, body, end=end)


def _liar(number: int) -> bytes:
    """Tensor of which lengths or shape are not true."""
    asked = _TENSOR(model_name="default")
    asked.inputs.add(name="x", datatype="BYTES", shape=((1 << 62,), (1024,), (2,), (1,) * 1000)[number % 4])
    asked.raw_input_contents.append((b"\xff\xff\xff\xff", b"", b"\x01\0\0\0a" * 9)[number % 3])
    return bytes(asked.SerializeToString())


def _trickle(number: int) -> bytes:
    """Streams that begin, and then a byte of a message on each of them in turn."""
    if number < _STREAMS:
        return http2.headers(number, _STREAM, _AUTHORIZATION) + http2.frame(
            http2.DATA, 0, http2.stream_of(number), b"\0\0\x0f\xff\xff"
        )
    return http2.frame(http2.DATA, 0, http2.stream_of(number % _STREAMS), b"a")


def _large(number: int) -> bytes:
    """Tensor of one text of 60 kB."""
    asked = _TENSOR(model_name="default", id=str(number), raw_input_contents=[pack([b"s" * 60_000])])
    asked.inputs.add(name="x", datatype="BYTES", shape=[1])
    return bytes(asked.SerializeToString())


_STREAMS = 900
_LIST = messages.message("grpc.reflection.v1.ServerReflectionRequest")(list_services="").SerializeToString()
_FILE = messages.message("grpc.reflection.v1.ServerReflectionRequest")(
    file_containing_symbol=messages.OPEN_INFERENCE
).SerializeToString()
_HUGE = tuple((f"x-{number}", "m" * 1000) for number in range(15))

WORST |= {
    "calls": Worst(
        "calls that are cancelled at once", lambda n: _call(n, _PREDICT, _input(f"c {n}")) + http2.reset(n), 8, every=0.002,
        grpc=True, limited=False,
    ),
    "rapid reset": Worst(
        "streams that are reset as soon as they begin",
        lambda n: b"".join(http2.headers(at, _PREDICT) + http2.reset(at) for at in range(100 * n, 100 * n + 100)), 4,
        every=0.01, grpc=True,
    ),
    "watches": Worst(
        "as many calls of Watch as it gets", lambda n: _call(n, _WATCH, b"", ()), 20, grpc=True, once=_STREAMS,
    ),
    "reflection": Worst(
        "questions to the reflection service", lambda n: _call(n, _REFLECT, _FILE, ()), 8, every=0.002, grpc=True,
    ),
    "questions": Worst(
        "a stream of questions to the reflection service",
        lambda n: (http2.headers(0, _REFLECT) if n == 0 else b"") + http2.message(0, _FILE, end=False) * 20, 8, every=0.01,
        grpc=True,
    ),
    "silent streams": Worst(
        "streams that are opened and never written", lambda n: http2.headers(n, _STREAM, _AUTHORIZATION), 20, grpc=True,
        once=_STREAMS,
    ),
    "streams": Worst(
        "a stream of messages of 60 kB, as fast as they are taken", _large, 8, grpc=True, limited=False, streams=1,
    ),
    "many streams": Worst(
        "20 streams of messages of 60 kB, as fast as they are taken", _large, 8, grpc=True, limited=False, streams=20,
    ),
    "slow streams": Worst("streams that send a byte at a time", _trickle, 20, every=0.001, grpc=True),
    "malformed calls": Worst(
        "messages that are none, or cut off",
        lambda n: http2.headers(n, _INFER, _AUTHORIZATION)
        + http2.message(n, b"\xff" * 200, length=(200, 100, 1 << 20, (1 << 32) - 1)[n % 4]),
        8, every=0.002, grpc=True,
    ),
    "metadata": Worst(
        "15 kB of metadata", lambda n: _call(n, _PREDICT, b"", (*_AUTHORIZATION, *_HUGE)), 8, every=0.002, grpc=True,
    ),
    "pings": Worst("pings, a hundred at a time", lambda n: http2.ping() * 100, 8, every=0.01, grpc=True),
    "settings": Worst(
        "settings, a hundred at a time", lambda n: b"".join(map(http2.settings, range(100))), 8, every=0.01, grpc=True,
    ),
    "tensors": Worst("tensors of lying lengths, over gRPC", lambda n: _call(n, _INFER, _liar(n)), 8, every=0.002, grpc=True),
}  # fmt: skip


# Over HTTP, in other APIs.

_ZEROS = gzip.compress(b" " * 200_000_000, 9)
"""200 kB of which 200 MB come."""
_INFER_PATH = "/v2/models/default/infer"


def _members(path: str, *fields: str, **members: Any) -> bytes:
    return _post(json.dumps(members).encode(), *fields, path=path)


def _nested(number: int) -> bytes:
    """JSON that is nested far deeper than any reader follows."""
    deep = b"[" * 400_000
    return (
        _post(b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":' + deep, path=_INFER_PATH),
        _post(b'{"model":"default","prompt":"x","more":' + deep, path="/v1/completions"),
    )[number % 2]


_TALK = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20}] * 800
_DEEP = _members("/v1/chat/completions", model="default", messages=_TALK)
_FULL = _members("/v1/completions", model="default", prompt=["p"] * 4096)
_CHOICES = _members("/v1/completions", model="default", prompt=["p"] * 8, n=128)
_BOMB = _post(_ZEROS, "Content-Encoding: gzip", path=_INFER_PATH)

WORST |= {
    "bombs": Worst("gzip of 200 MB of spaces", lambda n: _BOMB, 8),
    "nesting": Worst("JSON nested 400,000 deep", _nested, 8),
    "prompts": Worst("4,096 prompts, and 8 prompts of 128 choices", lambda n: (_FULL, _CHOICES)[n % 2], 16, limited=False),
    "chats": Worst("chats of 800 messages of 20 parts", lambda n: _DEEP, 16),
}  # fmt: skip

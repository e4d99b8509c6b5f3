"""A tenant at its worst, by the resource that it takes: over HTTP, and over gRPC with hand-made frames."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.load import http2
from headway import protos
from headway.oip.tensors import pack
from tests.identity.writing import key_of

KEY = b"?" * len(key_of("worst"))
"""Placeholder for the tenant's key, with the length of every key, because requests state lengths."""

FILE_ID = b"file-" + b"?" * 32

Request = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Worst:
    """What one tenant does.

    Attributes:
        what: in words.
        request: maps a number to the bytes of a request.
        every: seconds between two requests of a connection; 0: as fast as they are answered.
        limited: its key has a limit.
        waits: it waits for answers; otherwise it only holds its connections.
        leaves: it disconnects right after every n-th request; 0: never.
        fresh: each request uses a new connection.
        file: size in bytes of a file that it sends first, whose id replaces FILE_ID.
        grpc: it sends its own frames to the gRPC port, and waits for no answer.
        once: requests after which a connection sends no more; 0: no limit.
        streams: streams on each connection, by a client that respects flow control; `request` is a message.
        unary: gRPC calls by such a client; `request` is the method, a space and the message.
        bound: maximum P95 of the measured tenant, in percent of calm.
        tier, calm_tier: tiers of its keys, and of the measured tenant's.
        rate: requests per second of the measured tenant.
        beside: name of what it does at the same time.
        newcomers: the measured tenant's new connections are timed, too.
        target: class of what is served.
        calm: additional flags of the measured tenant's load.
    """

    what: str
    request: Request
    connections: int
    every: float = 0.0
    limited: bool = True
    waits: bool = True
    leaves: int = 0
    fresh: bool = False
    file: int = 0
    grpc: bool = False
    once: int = 0
    streams: int = 0
    unary: bool = False
    gateway_flags: tuple[str, ...] = ()
    worker_flags: tuple[str, ...] = ()
    controller_flags: tuple[str, ...] = ()
    bound: float = 110.0
    tier: str = "paid"
    calm_tier: str = "paid"
    rate: float = 100.0
    beside: str = ""
    newcomers: bool = False
    target: str = "Neighbours"
    calm: tuple[str, ...] = ()


def _ask(text: str, *fields: str, **members: Any) -> bytes:
    return _post(json.dumps({"input": text, **members}).encode(), *fields)


def _post(body: bytes, *fields: str, path: str = "/v1/inference", method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: bench", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, f"Authorization: Bearer {KEY.decode()}", *fields, "", ""]).encode() + body


def _members(path: str, **members: Any) -> bytes:
    return _post(json.dumps(members).encode(), path=path)


def _label(number: int) -> bytes:
    """Return a request with a new value for something that a metric might use as a label."""
    name = f"x{number}"
    return [
        _ask("label", model=name),
        _ask("label", f"X-Request-Tier: {name}"),
        _post(b"{}", path=f"/{name}"),
        _post(b"", path="/v1/inference", method=name.upper()),
    ][number % 4]


_UNENDED = _ask("b" * 1_000_000)[:-1]
_UNWANTED = _post(b"u" * 5_000_000, path="/v1/inference", method="PUT")

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
    "ledger": Worst("an unknown model, as fast as it goes", lambda n: _ask("x", model="none"), 50),
    "metric labels": Worst("other models, tiers, routes and methods", _label, 50),
    "dead letters": Worst("inputs that the model refuses", lambda n: _ask(f"REJECT {n}"), 16, every=0.5),
    "log": Worst("requests that are none", lambda n: _post(b"{" * 200, f"X-Request-Timeout-Ms: {n}x"), 50),
}  # fmt: skip


# Over gRPC.

_PREDICT = f"/{protos.HEADWAY}/Predict"
_INFER = f"/{protos.OPEN_INFERENCE}/ModelInfer"
STREAM = f"/{protos.OPEN_INFERENCE}/ModelStreamInfer"
_AUTHORIZATION = (("authorization", f"Bearer {KEY.decode()}"),)
_INPUT = protos.message("headway.v1.PredictRequest")
_TENSOR = protos.message("inference.ModelInferRequest")


def _input(text: str) -> bytes:
    return bytes(_INPUT(input_data=text.encode()).SerializeToString())


def _call(number: int, method: str, body: bytes) -> bytes:
    return http2.headers(number, method, _AUTHORIZATION) + http2.message(number, body)


def _large(number: int) -> bytes:
    asked = _TENSOR(model_name="default", id=str(number), raw_input_contents=[pack([b"s" * 60_000])])
    asked.inputs.add(name="x", datatype="BYTES", shape=[1])
    return bytes(asked.SerializeToString())


# Lengths and parameters of a call.

CALM_LENGTH = 400
"""Octets of the measured tenant's inputs when lengths count. A full batch of them takes the usual time."""


def _lengths(what: str, length: Callable[[int], int], connections: int = 8, every: float = 0.5) -> Worst:
    """Return a tenant that sends inputs of certain lengths to a model that pads."""
    return Worst(
        what, lambda n: _ask(f"{n} ".ljust(length(n), "l")), connections, every=every, limited=False, target="PaddedNeighbours",
        calm=("--input", "c" * CALM_LENGTH),
    )  # fmt: skip


FITTING: dict[str, Worst] = {
    "longest": _lengths("16 inputs/s of five times the length", lambda n: 5 * CALM_LENGTH),
    "alternating": _lengths("a short input and one of five times the length in turn", lambda n: CALM_LENGTH * (5 if n % 2 else 1) // (1 if n % 2 else 20)),
    "enormous": _lengths("one input a second of 25 times the length", lambda n: 25 * CALM_LENGTH, 1, 1.0),
    "thousand values": Worst(
        "16 inputs/s with 1,000 values of a parameter that a call has once",
        lambda n: _ask(f"v {n}", parameters={"temperature": n % 1000}), 8, every=0.5, limited=False, target="NeighboursTogether",
    ),
}  # fmt: skip
WORST |= FITTING


# Large bodies, answers and lists, and floods that others of the tier should not notice.

_LISTED, _LARGE_LIST = ["text"] * 160, {"x": "p" * 900_000}
_FEW, _LITTLE = ("--max-batch-size", "2"), ("--target-utilisation", "0.1")
"""Flags of a service whose lowest tier may send 20 requests per second."""
_DEEP_TREE: Any = []
for _ in range(29):
    _DEEP_TREE = [_DEEP_TREE]
_TREES = [_DEEP_TREE] * 14_000
_PARAMETERS: list[dict[str, Any]] = [{"x": _TREES}, {"x": [{}] * 7_000}]
_DOORS: dict[str, dict[str, Any]] = {
    "/v1/inference": {"input": "x"},
    "/v1/predict": {"model_id": "default", "input_data": "x"},
    "/v1/completions": {"model": "default", "prompt": "x"},
    "/v1/chat/completions": {"model": "default", "messages": [{"role": "user", "content": "x"}]},
    "/v2/models/default/infer": {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["x"]}]},
}
_TREES_IN = [_members(path, **body, parameters=tree) for tree in _PARAMETERS for path, body in _DOORS.items()] + [
    _members("/v1/completions", **_DOORS["/v1/completions"], logit_bias=_TREES),
    _members("/v1/completions", **_DOORS["/v1/completions"], metadata=_TREES),
    _members("/v1/chat/completions", **_DOORS["/v1/chat/completions"], tools=[{"x": _TREES}]),
]
_WIDE = _members("/v1/inference", inputs=["BIG"] * 1000)
_PACKED = _post(gzip.compress(b'{"input":"zip"' + b" " * 1_000_000 + b"}", 9), "Content-Encoding: gzip")


def _kept(number: int) -> bytes:
    """Return a request for an output of 8 MB that is kept, or shared by several requests."""
    fields = ((), ("Prefer: respond-async",), (f"Idempotency-Key: k{number}",), ())[number % 4]
    return _ask("HUGE" if number % 4 == 3 else f"HUGE {number}", *fields)


def _listed(number: int) -> bytes:
    asked = _TENSOR(model_name="default", id=str(number), raw_input_contents=[pack([b"%d" % at for at in range(1024)])])
    asked.inputs.add(name="x", datatype="BYTES", shape=[1024])
    return bytes(asked.SerializeToString())


_ROWS = ("rows=bench/stand/targets.py:Ends('FP32', -1)",)
"""A second model, which takes arrays."""


def _rows(rows: int, width: int, size: int) -> bytes:
    """Return a tensor of `size` bytes that claims `rows` rows of `width` FP32 numbers."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, width], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = f"Inference-Header-Content-Length: {len(head)}"
    return _post(head + bytes(size), length, path="/v2/models/rows/infer")


_TENSOR_600 = _rows(1, 150_000, 600_000)
_MISSHAPEN = (_rows(1, 150_001, 600_000), _rows(1 << 40, 4, 600_000), _rows(0, 4, 0), _rows(1000, 150, 600_000))
_THOUSAND = (
    _members("/v1/inference", model="rows", inputs=[[1.5, 2.5, 3.5, 4.5]] * 1000),
    _members("/v1/inference", model="rows", input=[[1.5, 2.5, 3.5, 4.5]] * 1000),
)

NEIGHBOURS: dict[str, Worst] = {
    "large tensors": Worst(
        "100 tensors/s of 600 kB for another model", lambda n: _TENSOR_600, 16, every=0.16, limited=False, bound=125, worker_flags=_ROWS,
    ),
    "misshapen tensors": Worst(
        "600 kB of other shapes than they say, or of too many rows", lambda n: _MISSHAPEN[n % 4], 16, every=0.16, limited=False,
        bound=125, worker_flags=_ROWS,
    ),
    "many rows": Worst(
        "1,000 rows as a list, and as one array", lambda n: _THOUSAND[n % 2], 8, every=4.0, limited=False, bound=125,
        worker_flags=_ROWS,
    ),
    "free": Worst(
        "300 requests/s of a tier that has room for 20", lambda n: _ask(f"flood {n}"), 30, every=0.1, limited=False, bound=125,
        worker_flags=_FEW, controller_flags=_LITTLE, tier="free", calm_tier="free", rate=5.0,
    ),
    "paid as free": Worst(
        "the same by a higher tier that asks as the lowest", lambda n: _ask(f"flood {n}", "X-Request-Tier: free"), 30, every=0.1,
        limited=False, bound=125, worker_flags=_FEW, controller_flags=_LITTLE, calm_tier="free", rate=5.0,
    ),
    "list parameters": Worst(
        "160, and 8, texts with 900 kB of parameters",
        lambda n: _members("/v1/inference", inputs=_LISTED[: (160, 8)[n % 2]], parameters=_LARGE_LIST), 8, every=4.0,
        limited=False, bound=125,
    ),
    "nested parameters": Worst(
        "14,000 lists nested 30 deep, and 7,000 objects, as parameters at every door", lambda n: _TREES_IN[n % len(_TREES_IN)],
        8, every=4.0, limited=False, bound=125,
    ),
    "wide answers": Worst(
        "1,000 outputs of 1 MB that ran once", lambda n: _WIDE, 2, every=1.0, limited=False, bound=125, gateway_flags=("--collapse",),
    ),
    "long answers": Worst(
        "160 outputs of 1 MB", lambda n: _members("/v1/inference", inputs=[f"BIG {n} {at}" for at in range(160)]), 2, every=1.0,
        limited=False, bound=125,
    ),
    "kept answers": Worst(
        "outputs of 8 MB for tasks, keys, the cache and who asks the same", _kept, 8, every=4.0, limited=False, bound=125,
        gateway_flags=("--cache", "--collapse"),
    ),
    "many kept answers": Worst(
        "the same, 16 a second", _kept, 32, every=2.0, limited=False, bound=125, gateway_flags=("--cache", "--collapse"),
    ),
    "lists": Worst(
        "lists of 1,024 small texts", lambda n: _members("/v1/inference", inputs=[f"{n} {at}" for at in range(1024)]), 8,
        every=4.0, limited=False,
    ),
    "lists over gRPC": Worst(
        "tensors of 1,024 small texts", lambda n: _call(n, _INFER, _listed(n)), 8, every=4.0, grpc=True, limited=False,
    ),
    "gzip": Worst("2 kB of gzip of which 1 MB comes", lambda n: _PACKED, 16, every=0.25, limited=False),
    "bodies at both doors": Worst(
        "bodies without an end over HTTP and over gRPC", lambda n: _UNENDED, 300, waits=False, limited=False,
        beside="half messages",
    ),
    "new connections": Worst(
        "300 new connections at once, again and again", lambda n: _ask(f"c {n}"), 300, every=0.5, limited=False, leaves=1,
        newcomers=True,
    ),
    "streams": Worst(
        "a stream of messages of 60 kB, as fast as they are taken", _large, 8, grpc=True, limited=False, streams=1,
    ),
    "many streams": Worst(
        "20 streams of messages of 60 kB, as fast as they are taken", _large, 8, grpc=True, limited=False, streams=20,
    ),
    "refused bodies": Worst("5 MB that nobody wants, and away", lambda n: _UNWANTED, 100, limited=False, leaves=1),
}  # fmt: skip
WORST |= NEIGHBOURS | {
    "half messages": Worst(
        "messages of 1 MB over gRPC, never ended",
        lambda n: http2.headers(n, _PREDICT, _AUTHORIZATION) + http2.message(n, b"u" * 16_000, length=1_000_000, end=False), 20,
        grpc=True, once=30, limited=False,
    )
}  # fmt: skip


# What costs as little as a single request but much of the event loop.

_TEXT_ROWS = ("rows=bench/stand/targets.py:Ends('FP32', -1)", "texts=bench/stand/targets.py:Letters")
"""Models that take arrays of numbers, and of strings."""
_NUMBERS = _post(b'{"model":"rows","input":[' + b"0," * 499_000 + b"0]}")
_MESSAGES = [
    _post(b'{"model":"default","%b":[%b]}' % (name, b",".join([b'{"role":"user","content":"a"}'] * 28_000)), path=path)
    for path, name in (("/v1/chat/completions", b"messages"), ("/v1/responses", b"input"))
]
_LETTERS = 65_000
_ELEMENTS = _post(
    json.dumps(
        {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1, _LETTERS], "data": ["a"] * _LETTERS}]},
        separators=(",", ":"),
    ).encode(),
    path="/v2/models/texts/infer",
)


def _dear_message(model: str, datatype: str, shape: list[int], contents: list[bytes]) -> bytes:
    asked = _TENSOR(model_name=model)
    asked.inputs.add(name="x", datatype=datatype, shape=shape).contents.bytes_contents.extend(contents)
    return bytes(asked.SerializeToString())


_ELEMENTS_IN_CONTENTS = f"{_INFER} ".encode() + _dear_message("texts", "BYTES", [1, _LETTERS], [b"a"] * _LETTERS)
_DEAR = [
    f"{_INFER} ".encode() + _dear_message("rows", "FP32", [1] * 900_000, []),
    *(
        f"{_PREDICT} ".encode() + bytes(_INPUT(model_id="rows", input_data=text).SerializeToString())
        for text in (b"[" + b"[]," * 339_000 + b"[]]", b"[" + b"0," * 510_000 + b"0]")
    ),
]
_WINDOW_CALLS = 100


def _byte_by_byte(number: int) -> bytes:
    """Return frames of calls whose answers are read a byte at a time, ten of them in turn."""
    if number < _WINDOW_CALLS:
        begin = http2.frame(http2.SETTINGS, 1, 0) + http2.frame(http2.SETTINGS, 0, 0, b"\x00\x04" + bytes(4))
        return begin * (number == 0) + _call(number, _PREDICT, _input("w" * 7_000))
    first = 10 * number
    return b"".join(
        http2.frame(http2.WINDOW, 0, http2.stream_of(at % _WINDOW_CALLS), b"\0\0\0\1")
        for at in range(first, first + 10)
    )


_FETCH = f"GET /v1/files/{FILE_ID.decode()}/content HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {KEY.decode()}\r\n\r\n".encode()

CHEAP: dict[str, Worst] = {
    "json numbers": Worst(
        "1 MB of JSON numbers for a model of arrays", lambda n: _NUMBERS, 4, every=1.0, bound=125, worker_flags=_TEXT_ROWS[:1],
    ),
    "messages": Worst("chats and responses of 28,000 messages", lambda n: _MESSAGES[n % 2], 4, every=1.0, bound=125),
    "elements": Worst(
        "65,000 texts of one letter in JSON", lambda n: _ELEMENTS, 4, every=1.0, bound=125, worker_flags=_TEXT_ROWS[1:],
    ),
    "elements over gRPC": Worst(
        "65,000 texts of one letter in `contents`", lambda n: _ELEMENTS_IN_CONTENTS, 4, every=1.0, grpc=True, unary=True,
        bound=125, worker_flags=_TEXT_ROWS[1:],
    ),
    "dear messages": Worst(
        "a shape of 900,000 axes, 340,000 empty rows, 510,000 numbers, over gRPC", lambda n: _DEAR[n % 3], 4,
        every=1.0, grpc=True, unary=True, bound=125, worker_flags=_TEXT_ROWS[:1],
    ),
    "unread downloads": Worst(
        "930 downloads of a file that nobody reads", lambda n: _FETCH, 930, every=1.0, limited=False, waits=False, file=5_000_000,
        bound=125, newcomers=True,
    ),
    "byte windows": Worst(
        "calls of which 8 connections take a byte at a time", _byte_by_byte, 8, every=0.005, grpc=True, limited=False, bound=125,
    ),
    "joined keys": Worst(
        "2,500 new connections/s that join idempotency keys, a third of which leave",
        lambda n: _ask("joined", f"Idempotency-Key: j{n // 300}"), 300, every=0.12, limited=False, leaves=3, fresh=True, bound=125,
    ),
}  # fmt: skip
NEIGHBOURS |= CHEAP | FITTING
WORST |= CHEAP

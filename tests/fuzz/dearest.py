"""The dearest bodies of each kind: those that cost most to read of all bodies of their size.

A kind is a route, the model that is asked, and a body made of one small piece as often as it fits.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from headway.config import Settings
from headway.core.json_pages import PAGE, Steps
from headway.doors.exchange import CodecContext, Exchange
from headway.errors import RequestError
from headway.gateway.served_models import ServedModels
from headway.http.inference.inference_head import InferenceHead, read_inference_head
from headway.http.inference.routes import codecs
from headway.http.server.head import Head, RequestTarget
from headway.model import TensorSpec, ValueKind, WorkerInfo, WorkerStatus
from headway.oip.rest.bodies import LENGTH_FIELD
from headway.oip.tensors import pack
from headway.runtime.counters import GatewayCounts

MOST = 1_000_000
"""Bytes of the largest body, as `max_body_bytes` is by default, with room for what is around the pieces."""
INFER = "/v2/models/{model:path}/infer"
Specs = tuple[TensorSpec, ...]
VECTOR: Specs = (TensorSpec("x", "FP32", (-1,)),)
MATRIX: Specs = (TensorSpec("x", "FP32", (-1, -1)),)
INTEGERS: Specs = (TensorSpec("x", "INT64", (-1,)),)
BOOLEANS: Specs = (TensorSpec("x", "BOOL", (-1,)),)
HALVES: Specs = (TensorSpec("x", "FP16", (-1,)),)
SHORT: Specs = (TensorSpec("x", "BF16", (-1,)),)
TEXTS: Specs = (TensorSpec("x", "BYTES", (-1,)),)
TWO: Specs = (TensorSpec("x", "FP32", (-1,)), TensorSpec("y", "FP32", (-1,)))


class Dear(NamedTuple):
    """One dear body.

    Attributes:
        name: what it is made of.
        path: path of its route.
        body: the body.
        takes: what the model takes.
        inputs: specifications of the model's tensors.
        length: bytes of its JSON object, where binary data follow.
    """

    name: str
    path: str
    body: bytes
    takes: ValueKind = ValueKind.TEXT
    inputs: tuple[TensorSpec, ...] = ()
    length: int | None = None


def _filled(before: bytes, piece: bytes, after: bytes, size: int, between: bytes = b",") -> bytes:
    """As many equal pieces as fit into a body of a size."""
    count = max((size - len(before) - len(after)) // (len(piece) + len(between)), 1)
    return before + between.join([piece] * count) + after


def _keyed(before: bytes, after: bytes, size: int, value: bytes = b"0") -> bytes:
    """As many members of an object with names of their own as fit."""
    count = max((size - len(before) - len(after)) // (9 + len(value)), 1)
    return before + b",".join([b'"%05x":%b' % (one, value) for one in range(count)]) + after


def _native(size: int) -> Iterator[Dear]:
    path, tensors, js = "/v1/inference", ValueKind.TENSORS, ValueKind.JSON
    for name, piece in {
        "digits": b"0", "fractions": b"0.1", "long numbers": b"0.12345678901234567", "exponents": b"1e30", "huge exponents": b"1e-307",
        "negative": b"-1", "spaced": b"  1", "very long": b"1" * 300,
    }.items():  # fmt: skip
        yield Dear(f"vector of {name}", path, _filled(b'{"input":[', piece, b"]}", size), tensors, VECTOR)
        yield Dear(f"json of {name}", path, _filled(b'{"input":[', piece, b"]}", size), js)
    for name, specs in {"INT64": INTEGERS, "FP16": HALVES, "BF16": SHORT}.items():
        yield Dear(f"vector of {name}", path, _filled(b'{"input":[', b"1", b"]}", size), tensors, specs)
    yield Dear("vector of BOOL", path, _filled(b'{"input":[', b"true", b"]}", size), tensors, BOOLEANS)
    yield Dear("vector of texts", path, _filled(b'{"input":[', b'""', b"]}", size), tensors, TEXTS)
    for name, piece in {
        "one": b"[1]",
        "none": b"[]",
        "two": b"[1,2]",
        "wrong": b'[""]',
        "ragged": b"[1],[1,2]",
    }.items():
        yield Dear(f"rows of {name}", path, _filled(b'{"input":[', piece, b"]}", size), tensors, MATRIX)
        yield Dear(f"wrong rows of {name}", path, _filled(b'{"input":[', piece, b"]}", size), tensors, VECTOR)
        yield Dear(f"json of {name}", path, _filled(b'{"input":[', piece, b"]}", size), js)
        yield Dear(f"text of {name}", path, _filled(b'{"input":[', piece, b"]}", size))
    yield Dear("two vectors", path, _filled(b'{"input":{"y":[0],"x":[', b"0", b"]}}", size), tensors, TWO)
    yield Dear("vector of a late text", path, _filled(b'{"input":[', b"0", b',""]}', size), tensors, VECTOR)
    yield Dear("members of an input", path, _keyed(b'{"input":{', b"}}", size), js)
    yield Dear("members of tensors", path, _keyed(b'{"input":{', b"}}", size), tensors, TWO)
    yield Dear("members of the body", path, _keyed(b'{"input":"a",', b"}", size))
    yield Dear("members of parameters", path, _keyed(b'{"input":"a","parameters":{', b"}}", size))
    yield Dear(
        "deep parameters", path, b'{"input":"a","parameters":{"a":%b%b}}' % (b"[" * (size // 2), b"]" * (size // 2))
    )
    yield Dear("deep input", path, b'{"input":%b%b}' % (b"[" * (size // 2), b"]" * (size // 2)), js)
    yield Dear("deep rows", path, _filled(b'{"input":[', b"[" * 90 + b"]" * 90, b"]}", size), js)
    yield Dear("objects", path, _filled(b'{"input":[', b"{}", b"]}", size), js)
    yield Dear("numbers in parameters", path, _filled(b'{"input":"a","parameters":{"a":[', b"0", b"]}}", size))
    yield Dear("huge in parameters", path, _filled(b'{"input":"a","parameters":{"a":[', b"1e300", b"]}}", size))
    yield Dear("doubled members", path, _filled(b'{"input":"a",', b'"a":0', b"}", size))
    yield Dear("doubled inputs", path, _filled(b"{", b'"input":"a"', b"}", size))
    yield Dear("escapes", path, _filled(b'{"input":"', rb"\u00e9", b'"}', size, b""))
    yield Dear("pairs", path, _filled(b'{"input":"', rb"\ud83d\ude00", b'"}', size, b""))
    yield Dear("json of escapes", path, _filled(b'{"input":["', rb"\u00e9", b'"]}', size, b""), js)
    yield Dear("json of pairs", path, _filled(b'{"input":["', rb"\ud83d\ude00", b'"]}', size, b""), js)
    yield Dear("json of texts", path, _filled(b'{"input":[', rb'"\\"', b"]}", size), js)
    yield Dear("json of brackets in texts", path, _filled(b'{"input":[', b'"[["', b"]}", size), js)
    yield Dear("lone surrogate", path, _filled(b'{"input":"', rb"\u00e9", rb'\ud800"}', size, b""))
    yield Dear("beyond ASCII", path, _filled(b'{"input":"', "é".encode(), b'"}', size, b""))
    yield Dear("beyond the plane", path, _filled(b'{"input":"a', "😀".encode(), b'"}', size, b""))
    yield Dear("unfinished", path, _filled(b'{"input":[', b"0", b"", size), js)
    for name, piece in {"empty": b'""', "one": b'"a"', "numbers": b"0", "arrays": b"[0]"}.items():
        for takes in (ValueKind.TEXT, js, tensors, ValueKind.BYTES):
            specs = VECTOR if takes is tensors else ()
            yield Dear(f"inputs {name} {takes.value}", path, _filled(b'{"inputs":[', piece, b"]}", size), takes, specs)
            at_most = b",".join([piece * 1 for _ in range(1024)])
            yield Dear(f"1024 inputs {name} {takes.value}", path, b'{"inputs":[' + at_most + b"]}", takes, specs)
    wide = _filled(b"[", b"0", b"]", size // 1024 - 2)
    yield Dear("1024 vectors", path, b'{"inputs":[' + b",".join([wide] * 1024) + b"]}", tensors, VECTOR)
    yield Dear("plain text", "/api/inference", _filled(b'{"input":"', rb"\n", b'"}', size, b""))
    yield Dear(
        "predicted vector",
        "/v1/predict",
        _filled(b'{"model_id":"m","input_data":[', b"0", b"]}", size),
        tensors,
        VECTOR,
    )


def _openai(size: int) -> Iterator[Dear]:
    chat, responses = "/v1/chat/completions", "/v1/responses"
    message = b'{"role":"user","content":"a"}'
    empty = b'{"role":"","content":""}'
    yield Dear("messages", chat, _filled(b'{"model":"m","messages":[', message, b"]}", size))
    yield Dear("empty messages", chat, _filled(b'{"model":"m","messages":[', empty, b"]}", size))
    part = b'{"type":"text","text":""}'
    yield Dear("parts", chat, _filled(b'{"model":"m","messages":[{"role":"user","content":[', part, b"]}]}", size))
    parts = b'{"role":"","content":[%b]}' % part
    yield Dear("messages of parts", chat, _filled(b'{"model":"m","messages":[', parts, b"]}", size))
    yield Dear("hollow messages", chat, _filled(b'{"model":"m","messages":[', b'{"role":""}', b"]}", size))
    yield Dear("wrong messages", chat, _filled(b'{"model":"m","messages":[', b"{}", b"]}", size))
    hollow = b'{"role":"","content":[]}'
    yield Dear("messages without parts", chat, _filled(b'{"model":"m","messages":[', hollow, b"]}", size))
    yield Dear("members of a message", chat, _keyed(b'{"model":"m","messages":[{"role":"","content":"",', b"}]}", size))
    yield Dear("members of a chat", chat, _keyed(b'{"model":"m","messages":[%b],' % message, b"}", size))
    yield Dear(
        "long chat",
        chat,
        _filled(b'{"model":"m","messages":[{"role":"user","content":"', rb"\u00e9", b'"}]}', size, b""),
    )
    yield Dear(
        "chat of choices",
        chat,
        _filled(b'{"model":"m","n":128,"messages":[{"role":"user","content":"', b"a", b'"}]}', size, b""),
    )
    yield Dear("items", responses, _filled(b'{"model":"m","input":[', message, b"]}", size))
    yield Dear("empty items", responses, _filled(b'{"model":"m","input":[', empty, b"]}", size))
    yield Dear("items without parts", responses, _filled(b'{"model":"m","input":[', hollow, b"]}", size))
    yield Dear(
        "parts of items", responses, _filled(b'{"model":"m","input":[{"role":"user","content":[', part, b"]}]}", size)
    )
    yield Dear("metadata", responses, _keyed(b'{"model":"m","input":"a","metadata":{', b"}}", size, b'""'))
    yield Dear(
        "instructions", responses, _filled(b'{"model":"m","input":"a","instructions":"', rb"\u00e9", b'"}', size, b"")
    )
    yield Dear("long item", responses, _filled(b'{"model":"m","input":"', rb"\u00e9", b'"}', size, b""))
    for path, name in (("/v1/completions", b"prompt"), ("/v1/embeddings", b"input")):
        begin = b'{"model":"m","%b":[' % name
        yield Dear(f"texts of {path}", path, _filled(begin, b'""', b"]}", size))
        yield Dear(f"2048 texts of {path}", path, begin + b",".join([b'"%d"' % one for one in range(2048)]) + b"]}")
        long = b'"' + b"a" * (size // 2048 - 4) + b'"'
        yield Dear(f"2048 long texts of {path}", path, begin + b",".join([long] * 2048) + b"]}")
        yield Dear(f"tokens of {path}", path, _filled(begin, b"1", b"]}", size))
        yield Dear(f"members of {path}", path, _keyed(b'{"model":"m","%b":"a",' % name, b"}", size))
        yield Dear(f"parameters of {path}", path, _filled(b'{"model":"m","%b":"a","x":[' % name, b"0", b"]}", size))
        yield Dear(
            f"escapes of {path}", path, _filled(b'{"model":"m","%b":"' % name, rb"\ud83d\ude00", b'"}', size, b"")
        )


def _tensor(datatype: str, shape: str, data: str = "", more: str = "") -> bytes:
    return f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":{shape}{data}'.encode() + more.encode()


def _open_inference(size: int) -> Iterator[Dear]:
    tensors = ValueKind.TENSORS

    def counted(datatype: str, shape: Callable[[int], str], piece: bytes, width: int = 1) -> bytes:
        room = size - 150
        count = room // (len(piece) + 1)
        before = _tensor(datatype, shape(count * width), ',"data":[')
        return before + b",".join([piece] * count) + b"]}]}"

    for name, specs, piece in (
        ("FP32", VECTOR, b"0"), ("INT64", INTEGERS, b"0"), ("BOOL", BOOLEANS, b"true"), ("FP16", HALVES, b"0"), ("BF16", SHORT, b"0"),
        ("BYTES", TEXTS, b'""'), ("FP32", VECTOR, b"0.12345678901234567"),
    ):  # fmt: skip
        flat = counted(name, lambda count: f"[1,{count}]", piece)
        yield Dear(f"flat {name} of {piece.decode()}", INFER, flat, tensors, specs)
    yield Dear("rows", INFER, counted("FP32", lambda count: f"[1,{count},1]", b"[0]"), tensors, MATRIX)
    yield Dear("empty rows", INFER, counted("FP32", lambda count: f"[1,{count},0]", b"[]"), tensors, MATRIX)
    yield Dear("few said rows", INFER, counted("FP32", lambda count: "[1,1]", b"[]"), tensors, VECTOR)
    most = ",".join(['"a"'] * 65_000)
    yield Dear("65000 texts", INFER, _tensor("BYTES", "[1,65000]", f',"data":[{most}]}}]}}'), tensors, TEXTS)
    yield Dear("65000 texts apart", INFER, _tensor("BYTES", "[65000]", f',"data":[{most}]}}]}}'))
    most = ",".join(['["a"]'] * 1024)
    for takes in (ValueKind.TEXT, ValueKind.JSON, ValueKind.BYTES):
        yield Dear(f"1024 texts {takes.value}", INFER, _tensor("BYTES", "[1024,1]", f',"data":[{most}]}}]}}'), takes)
        yield Dear(f"texts {takes.value}", INFER, counted("BYTES", lambda count: f"[{count}]", b'""'), takes)
        yield Dear(f"nested texts {takes.value}", INFER, counted("BYTES", lambda count: f"[{count},1]", b'[""]'), takes)
        one = b'"' + rb"\u00e9" * (size // 6 - 40) + b'"'
        yield Dear(f"escapes {takes.value}", INFER, _tensor("BYTES", "[1]", ',"data":[') + one + b"]}]}", takes)
    text = json.dumps(json.dumps([0] * (size // 4))).encode()
    yield Dear("numbers in a text", INFER, _tensor("BYTES", "[1]", ',"data":[') + text + b"]}]}", ValueKind.JSON)
    huge = b"[" + b",".join([b"1"] * (size // 2 - 100)) + b"]"
    yield Dear(
        "huge shape",
        INFER,
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":%b,"data":[0]}]}' % huge,
        tensors,
        VECTOR,
    )
    yield Dear(
        "huge shape of texts", INFER, b'{"inputs":[{"name":"x","datatype":"BYTES","shape":%b,"data":[0]}]}' % huge
    )
    yield Dear("claimed rows", INFER, _tensor("FP32", "[1,999999999999]", ',"data":[0]}]}'), tensors, VECTOR)
    yield Dear("claimed empty", INFER, _tensor("FP32", "[1,65536,0]", ',"data":[]}]}'), tensors, MATRIX)
    hollow = b'{"name":"","datatype":"","shape":0}'
    yield Dear("inputs", INFER, _filled(b'{"inputs":[', hollow, b"]}", size), tensors, VECTOR)
    yield Dear("inputs of texts", INFER, _filled(b'{"inputs":[', hollow, b"]}", size))
    outputs = _filled(
        b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["a"]}],"outputs":[', b'{"name":""}', b"]}", size
    )
    yield Dear("outputs", INFER, outputs)
    members = b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["a"]}],"parameters":{'
    yield Dear("parameters", INFER, _keyed(members, b"}}", size))
    yield Dear(
        "members of a tensor",
        INFER,
        _keyed(b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["a"],', b"}]}", size),
    )
    yield Dear("members of a request", INFER, _keyed(members[:-14], b"}", size))
    behind = {
        "texts behind": (b"", tensors),
        "letters behind": (b"a", tensors),
        "1024 behind": (b"a" * (size // 1024 - 8), ValueKind.TEXT),
        "json behind": (b"[" + b"0," * (size // 2048 - 8) + b"0]", ValueKind.JSON),
    }
    for name, (element, takes) in behind.items():
        specs = TEXTS if takes is tensors else ()
        count = 65_536 if takes is tensors else 1024
        data = pack([element] * count)
        shape = f"[{count}]" if takes is not tensors else f"[1,{count}]"
        said = _tensor("BYTES", shape, f',"parameters":{{"binary_data_size":{len(data)}}}}}]}}')
        yield Dear(name, INFER, said + data, takes, specs, len(said))
    data = bytes(size // 4 * 4 - 400)
    said = _tensor("FP32", f"[1,{len(data) // 4}]", f',"parameters":{{"binary_data_size":{len(data)}}}}}]}}')
    yield Dear("numbers behind", INFER, said + data, tensors, VECTOR, len(said))
    said = _tensor("FP32", "[1,1]", f',"parameters":{{"binary_data_size":{len(data)}}}}}]}}')
    yield Dear("too many behind", INFER, said + data, tensors, VECTOR, len(said))


def bodies(size: int = MOST) -> Iterator[Dear]:
    """Dear bodies of about a size, of all kinds."""
    yield from _native(size)
    yield from _openai(size)
    yield from _open_inference(size)


SETTINGS = Settings()
_CODECS = codecs(SETTINGS)
MOST_AT_ONCE = 3 * PAGE
"""Most bytes outside strings that one step reads for the first time."""


def steps_of(dear: Dear) -> Steps[Exchange]:
    """Steps in which a body is read, as its route does."""
    asked, models = _asked(dear)
    assert asked.read_long is not None
    return asked.read_long(dear.body, asked.options, models)


def at_once(dear: Dear) -> Exchange:
    """What a body is read to if it is short."""
    asked, models = _asked(dear)
    return asked.read(dear.body, asked.options, models)


def _asked(dear: Dear) -> tuple[InferenceHead, ServedModels]:
    models = ServedModels(["m"])
    known = WorkerInfo(
        worker_id="w",
        model="m",
        status=WorkerStatus.HEALTHY,
        takes=dear.takes.value,
        gives=dear.takes.value,
        inputs=dear.inputs,
        outputs=dear.inputs,
    )
    models.learn([known])
    context = CodecContext(SETTINGS, models, GatewayCounts())
    head = Head(b"POST", b"/", "1.1", [])
    head.length = len(dear.body)
    if dear.length is not None:
        head.single[LENGTH_FIELD.lower().encode()] = b"%d" % dear.length
    return read_inference_head(_CODECS[dear.path], head, RequestTarget({"model": "m"}, b""), context, None), models


SLOW = 0.05
"""Seconds of the processor for one step: five times what is promised, as machines differ."""


def check(data: bytes) -> None:
    """No step of a dear body takes long. The first bytes say which body, and of which size."""
    size = MOST // 32 + int.from_bytes(data[2:4], "little") * MOST // (1 << 17)
    dear = next(itertools.islice(bodies(size), int.from_bytes(data[:2], "little") % _KINDS, None))
    with uncollected():
        took = longest(steps_of(dear))
    assert took < SLOW, f"{dear.name} at {dear.path}, {len(dear.body)} bytes: a step took {took * 1e3:.0f} ms"


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: that takes as long as the tests that ran before have left objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def longest(steps: Iterator[object]) -> float:
    """The longest of the steps, in seconds of the processor."""
    most = 0.0
    with contextlib.suppress(StopIteration, RequestError):
        while True:
            before = time.thread_time()
            try:
                next(steps)
            finally:
                most = max(most, time.thread_time() - before)
    return most


_KINDS = len([*bodies(1000)])
SEEDS = [bytes([kind, 0, 0, size]) for kind in range(0, _KINDS, 16) for size in (0, 128, 255)]

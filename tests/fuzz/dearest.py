"""The most expensive bodies of each kind: those that take longest to read for their size.
A kind is a route, a model, and a body that repeats one small piece as often as it fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headway.config import Settings
from headway.core.json_pages import PAGE, Steps
from headway.doors.exchange import Exchange
from headway.gateway.served_models import ServedModels
from headway.http.inference.inference_head import InferenceHead, read_inference_head
from headway.http.inference.routes import codecs
from headway.http.server.head import Head, RequestTarget
from headway.model import TensorSpec, ValueKind
from headway.oip.rest.bodies import LENGTH_FIELD
from headway.oip.tensors import pack
from tests.fuzz.models import context_of, models_of

MOST = 1_000_000
"""Bytes of the largest body, as `max_body_bytes` is by default, with room for what is around the pieces."""
INFER = "/v2/models/{model:path}/infer"
CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings", "responses")
)
MODELS: dict[str, tuple[ValueKind, tuple[TensorSpec, ...]]] = {
    "text": (ValueKind.TEXT, ()),
    "json": (ValueKind.JSON, ()),
    "bytes": (ValueKind.BYTES, ()),
    "matrix": (ValueKind.TENSORS, (TensorSpec("x", "FP32", (-1, -1)),)),
    "two": (ValueKind.TENSORS, (TensorSpec("x", "FP32", (-1,)), TensorSpec("y", "FP32", (-1,)))),
} | {
    name: (ValueKind.TENSORS, (TensorSpec("x", name, (-1,)),))
    for name in ("FP32", "INT64", "BOOL", "FP16", "BF16", "BYTES")
}
"""Models that are asked: what each takes, and the specifications of its tensors."""


class Dear(NamedTuple):
    """An expensive body. `name` says what it contains. If there is binary data, it follows `length` bytes of JSON."""

    name: str
    path: str
    body: bytes
    model: str = "text"
    length: int | None = None


def _filled(template: str, piece: str, size: int) -> bytes:
    """Fill a template up to `size`: `@` with pieces separated by commas, `~` without. A `#` in a piece is its number."""
    between = "," if "@" in template else ""
    room = len(piece.encode()) + len(between) + 4 * piece.count("#")
    count = max((size - len(template)) // room, 1)
    numbered = [piece.replace("#", f"{number:05x}") for number in range(count)] if "#" in piece else [piece] * count
    return template.replace("@" if between else "~", between.join(numbered)).encode()


ARRAYS = {
    "digits": "0",
    "fractions": "0.1",
    "long numbers": "0.12345678901234567",
    "exponents": "1e30",
    "huge exponents": "1e-307",
    "spaced numbers": "  1",
    "very long numbers": "1" * 300,
    "rows of one": "[1]",
    "rows of none": "[]",
    "wrong rows": '[""]',
    "ragged rows": "[1],[1,2]",
}
"""Elements of an input by what they are."""
MEMBER = '"#":0'
NATIVE = (
    *(("text", f"text of {name}", '{"input":[@]}', ARRAYS[name]) for name in ("rows of one", "ragged rows")),
    *((model, f"{name} for {model}", '{"input":[@]}', ARRAYS[name]) for model in ("FP32", "json") for name in ARRAYS),
    *(("matrix", f"{name} for a matrix", '{"input":[@]}', piece) for name, piece in ARRAYS.items() if "rows" in name),
    *((model, f"vector of {model}", '{"input":[@]}', "1") for model in ("INT64", "FP16", "BF16")),
    ("BOOL", "vector of BOOL", '{"input":[@]}', "true"),
    ("BYTES", "vector of texts", '{"input":[@]}', '""'),
    ("two", "two vectors", '{"input":{"y":[0],"x":[@]}}', "0"),
    ("FP32", "vector of a late text", '{"input":[@,""]}', "0"),
    ("json", "members of an input", '{"input":{@}}', MEMBER),
    ("two", "members of tensors", '{"input":{@}}', MEMBER),
    ("text", "members of the body", '{"input":"a",@}', MEMBER),
    ("text", "members of parameters", '{"input":"a","parameters":{@}}', MEMBER),
    ("json", "deep rows", '{"input":[@]}', "[" * 90 + "]" * 90),
    ("json", "objects", '{"input":[@]}', "{}"),
    ("text", "numbers in parameters", '{"input":"a","parameters":{"a":[@]}}', "0"),
    ("text", "huge in parameters", '{"input":"a","parameters":{"a":[@]}}', "1e300"),
    ("text", "doubled members", '{"input":"a",@}', '"a":0'),
    ("text", "doubled inputs", "{@}", '"input":"a"'),
    ("text", "escapes", '{"input":"~"}', r"\u00e9"),
    ("text", "pairs", '{"input":"~"}', r"\ud83d\ude00"),
    ("json", "json of escapes", '{"input":["~"]}', r"\u00e9"),
    ("json", "json of pairs", '{"input":["~"]}', r"\ud83d\ude00"),
    ("json", "json of texts", '{"input":[@]}', r'"\\"'),
    ("json", "json of brackets in texts", '{"input":[@]}', '"[["'),
    ("text", "lone surrogate", r'{"input":"~\ud800"}', r"\u00e9"),
    ("text", "beyond ASCII", '{"input":"~"}', "é"),
    ("text", "beyond the plane", '{"input":"a~"}', "😀"),
    ("text", "unfinished", '{"input":[@', "0"),
    *(
        (model, f"inputs of {name} for {model}", '{"inputs":[@]}', piece)
        for name, piece in {"empty texts": '""', "numbers": "0", "arrays": "[0]"}.items()
        for model in ("text", "json", "FP32", "bytes")
    ),
)
"""Bodies of the native route: the model, what each is made of, its template and its piece."""
MESSAGE, EMPTY, HOLLOW = ('{"role":"user","content":"a"}', '{"role":"","content":""}', '{"role":"","content":[]}')
PART = '{"type":"text","text":""}'
OPENAI = (
    (CHAT, "messages", '{"model":"m","messages":[@]}', MESSAGE),
    (CHAT, "empty messages", '{"model":"m","messages":[@]}', EMPTY),
    (CHAT, "parts", '{"model":"m","messages":[{"role":"user","content":[@]}]}', PART),
    (CHAT, "messages of parts", '{"model":"m","messages":[@]}', f'{{"role":"","content":[{PART}]}}'),
    (CHAT, "wrong messages", '{"model":"m","messages":[@]}', "{}"),
    (CHAT, "messages without parts", '{"model":"m","messages":[@]}', HOLLOW),
    (CHAT, "members of a message", '{"model":"m","messages":[{"role":"","content":"",@}]}', MEMBER),
    (CHAT, "members of a chat", f'{{"model":"m","messages":[{MESSAGE}],@}}', MEMBER),
    (CHAT, "long chat", '{"model":"m","messages":[{"role":"user","content":"~"}]}', r"\u00e9"),
    (CHAT, "chat of choices", '{"model":"m","n":128,"messages":[{"role":"user","content":"~"}]}', "a"),
    (RESPONSES, "items", '{"model":"m","input":[@]}', MESSAGE),
    (RESPONSES, "empty items", '{"model":"m","input":[@]}', EMPTY),
    (RESPONSES, "items without parts", '{"model":"m","input":[@]}', HOLLOW),
    (RESPONSES, "parts of items", '{"model":"m","input":[{"role":"user","content":[@]}]}', PART),
    (RESPONSES, "metadata", '{"model":"m","input":"a","metadata":{@}}', '"#":""'),
    (RESPONSES, "instructions", '{"model":"m","input":"a","instructions":"~"}', r"\u00e9"),
    (RESPONSES, "long item", '{"model":"m","input":"~"}', r"\u00e9"),
    *(
        (path, f"{what} of {path}", template % member, piece)
        for path, member in ((COMPLETIONS, "prompt"), (EMBEDDINGS, "input"))
        for what, template, piece in (
            ("texts", '{"model":"m","%s":[@]}', '""'),
            ("tokens", '{"model":"m","%s":[@]}', "1"),
            ("members", '{"model":"m","%s":"a",@}', MEMBER),
            ("parameters", '{"model":"m","%s":"a","x":[@]}', "0"),
            ("escapes", '{"model":"m","%s":"~"}', r"\ud83d\ude00"),
        )
    ),
)
"""Bodies of OpenAI's routes: the path, what each is made of, its template and its piece."""
ONE_TEXT = '{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["a"]'
SHAPE = '{"inputs":[{"name":"x","datatype":"%s","shape":[@],"data":[0]}]}'
UNNAMED = '{"name":"","datatype":"","shape":0}'
OPEN_INFERENCE = (
    ("FP32", "huge shape", SHAPE % "FP32", "1"),
    ("text", "huge shape of texts", SHAPE % "BYTES", "1"),
    ("FP32", "inputs", '{"inputs":[@]}', UNNAMED),
    ("text", "inputs of texts", '{"inputs":[@]}', UNNAMED),
    ("text", "outputs", ONE_TEXT + '}],"outputs":[@]}', '{"name":""}'),
    ("text", "parameters", ONE_TEXT + '}],"parameters":{@}}', MEMBER),
    ("text", "members of a tensor", ONE_TEXT + ",@}]}", MEMBER),
    ("text", "members of a request", ONE_TEXT + "}],@}", MEMBER),
    *((model, f"escapes for {model}", ONE_TEXT[:-3] + '~"]}]}', r"\u00e9") for model in ("text", "json", "bytes")),
    ("json", "numbers in a text", ONE_TEXT[:-3] + '[0~]"]}]}', ",0"),
)
"""Bodies of the Open Inference Protocol: the model, what each is made of, its template and its piece."""


def _few(size: int) -> Iterator[Dear]:
    """Yield bodies with one deep value, and with the maximum number of elements."""
    deep = "[" * (size // 2) + "]" * (size // 2)
    yield Dear("deep parameters", "/v1/inference", f'{{"input":"a","parameters":{{"a":{deep}}}}}'.encode())
    yield Dear("deep input", "/v1/inference", f'{{"input":{deep}}}'.encode(), "json")
    for model, piece in (("text", '"a"'), ("FP32", "[0]")):
        body = f'{{"inputs":[{",".join([piece] * 1024)}]}}'.encode()
        yield Dear(f"1024 inputs for {model}", "/v1/inference", body, model)
    wide = _filled("[@]", "0", size // 1024 - 2).decode()
    yield Dear("1024 vectors", "/v1/inference", f'{{"inputs":[{",".join([wide] * 1024)}]}}'.encode(), "FP32")
    yield Dear("plain text", "/api/inference", _filled('{"input":"~"}', r"\n", size))
    yield Dear("predicted vector", "/v1/predict", _filled('{"model_id":"m","input_data":[@]}', "0", size), "FP32")
    for path, member in ((COMPLETIONS, "prompt"), (EMBEDDINGS, "input")):
        for name, text in (("short", '"a"'), ("long", '"' + "a" * (size // 2048 - 4) + '"')):
            body = f'{{"model":"m","{member}":[{",".join([text] * 2048)}]}}'.encode()
            yield Dear(f"2048 {name} texts of {path}", path, body)


def _tensor(datatype: str, shape: str, more: str) -> bytes:
    return f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":{shape},{more}}}]}}'.encode()


def _tensors(size: int) -> Iterator[Dear]:
    """Yield tensors whose shapes match their number of elements, or claim to."""
    for model, datatype, shape, piece in (
        ("FP32", "FP32", "[1,{}]", "0"), ("INT64", "INT64", "[1,{}]", "0"), ("BOOL", "BOOL", "[1,{}]", "true"),
        ("FP16", "FP16", "[1,{}]", "0"), ("BF16", "BF16", "[1,{}]", "0"), ("BYTES", "BYTES", "[1,{}]", '""'),
        ("FP32", "FP32", "[1,{}]", "0.12345678901234567"), ("matrix", "FP32", "[1,{},1]", "[0]"), ("matrix", "FP32", "[1,{},0]", "[]"),
        ("text", "BYTES", "[{}]", '""'), ("json", "BYTES", "[{}]", '""'), ("text", "BYTES", "[{},1]", '[""]'),
    ):  # fmt: skip
        data = [piece] * ((size - 150) // (len(piece) + 1))
        body = _tensor(datatype, shape.format(len(data)), f'"data":[{",".join(data)}]')
        yield Dear(f"{shape} of {piece} for {model}", INFER, body, model)
    for model, shape, piece, count in (
        ("BYTES", "[1,65000]", '"a"', 65_000), ("text", "[65000]", '"a"', 65_000), ("text", "[1024,1]", '["a"]', 1024),
        ("json", "[1024,1]", '["1"]', 1024), ("bytes", "[1024,1]", '["a"]', 1024), ("FP32", "[1,999999999999]", "0", 1),
        ("matrix", "[1,65536,0]", "", 0),
    ):  # fmt: skip
        datatype = "FP32" if model in ("FP32", "matrix") else "BYTES"
        body = _tensor(datatype, shape, f'"data":[{",".join([piece] * count)}]')
        yield Dear(f"{shape} for {model}", INFER, body, model)
    yield Dear("few said rows", INFER, _tensor("FP32", "[1,1]", f'"data":[{",".join(["[]"] * (size // 3))}]'), "FP32")


def _behind(size: int) -> Iterator[Dear]:
    """Yield tensors whose data follows the JSON object."""
    numbers = bytes(size // 4 * 4 - 400)
    for name, model, shape, data in (
        ("texts", "BYTES", "[1,65536]", pack([b""] * 65_536)),
        ("letters", "BYTES", "[1,65536]", pack([b"a"] * 65_536)),
        ("1024 texts", "text", "[1024]", pack([b"a" * (size // 1024 - 8)] * 1024)),
        ("json", "json", "[1024]", pack([b"[" + b"0," * (size // 2048 - 8) + b"0]"] * 1024)),
        ("numbers", "FP32", f"[1,{len(numbers) // 4}]", numbers),
        ("too many numbers", "FP32", "[1,1]", numbers),
    ):
        datatype = "FP32" if model == "FP32" else "BYTES"
        said = _tensor(datatype, shape, f'"parameters":{{"binary_data_size":{len(data)}}}')
        yield Dear(f"{name} behind", INFER, said + data, model, len(said))


def bodies(size: int = MOST) -> Iterator[Dear]:
    """Yield expensive bodies of all kinds, of about this size."""
    for model, name, template, piece in NATIVE:
        yield Dear(name, "/v1/inference", _filled(template, piece, size), model)
    for path, name, template, piece in OPENAI:
        yield Dear(name, path, _filled(template, piece, size))
    for model, name, template, piece in OPEN_INFERENCE:
        yield Dear(name, INFER, _filled(template, piece, size), model)
    yield from _few(size)
    yield from _tensors(size)
    yield from _behind(size)


SETTINGS = Settings()
_CODECS = codecs(SETTINGS)
MOST_AT_ONCE = 3 * PAGE
"""Most bytes outside strings that one step reads for the first time."""


def steps_of(dear: Dear) -> Steps[Exchange]:
    """Return the steps in which its route reads a long body."""
    asked, models = _asked(dear)
    assert asked.read_long is not None
    return asked.read_long(dear.body, asked.options, models)


def at_once(dear: Dear) -> Exchange:
    """Read a body the way its route reads a short one."""
    asked, models = _asked(dear)
    return asked.read(dear.body, asked.options, models)


def _asked(dear: Dear) -> tuple[InferenceHead, ServedModels]:
    models = models_of(*MODELS[dear.model])
    context = context_of(SETTINGS, models)
    head = Head(b"POST", b"/", "1.1", [])
    head.length = len(dear.body)
    if dear.length is not None:
        head.single[LENGTH_FIELD.lower().encode()] = b"%d" % dear.length
    return read_inference_head(_CODECS[dear.path], head, RequestTarget({"model": "m"}, b""), context, None), models

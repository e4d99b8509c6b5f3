"""Input from Open Inference Protocol clients: bodies with tensors, in JSON and in binary form, and compressed bodies."""

from __future__ import annotations

import gzip
import json
import zlib

from headway.config import Settings
from headway.core.tensors import count_of, pack, rows_of
from headway.core.tensors import unpack as unpacked
from headway.doors.exchange import Exchange, Outcome
from headway.errors import RequestError
from headway.gateway.fan_out import MOST_INPUTS
from headway.http.inference.incoming_bodies import Unpacker
from headway.http.inference.inference_head import CODINGS, read_inference_head
from headway.http.inference.routes import codecs
from headway.http.server.head import Head, RequestTarget
from headway.model import Octets, Tensors, TensorSpec, ValueKind
from headway.oip.rest.bodies import LENGTH_FIELD
from headway.oip.tensors import element_of, unpack
from headway.oip.tensors import pack as pack_elements
from tests.fuzz.models import check_error, context_of, models_of

_SETTINGS = Settings(), Settings(max_queue=5)
_PATH = "/v2/models/{model:path}/infer"
_MARK = b"|"
"""What stands between the JSON object and the binary data; the first one counts."""


_SPECS = TensorSpec("x", "FP32", (-1,)), TensorSpec("y", "BOOL", (1,))


_CODECS = [
    (
        settings,
        kind,
        context_of(settings, models_of(kind, _SPECS if kind is ValueKind.TENSORS else ())),
        codecs(settings)[_PATH],
    )
    for settings in _SETTINGS
    for kind in (*ValueKind, None)
]


def _tensor(data: str, shape: str = "[1]", more: str = "") -> bytes:
    return f'{{"inputs":[{{"name":"INPUT","datatype":"BYTES","shape":{shape},{data}}}]{more}}}'.encode()


def _binary(elements: list[bytes], shape: str, more: str = "") -> bytes:
    octets = pack_elements(elements)
    return _tensor(f'"parameters":{{"binary_data_size":{len(octets)}}}', shape, more) + _MARK + octets


BODIES = (
    _tensor('"data":["hello"]'),
    _tensor('"data":["h\\u00e9llo","\\"quoted\\"","{\\"a\\": 1}"]', "[3]", ',"id":"","outputs":[{"name":"OUTPUT"}]'),
    _tensor('"data":[["a"],["b"]]', "[2,1]", ',"parameters":{"binary_data_output":true,"heat":0.5}'),
    _tensor('"data":["aGVsbG8="]', "[1]", ',"parameters":{"priority":2,"timeout":1500,"x":{"y":[1]}}'),
    _binary([b"hello"], "[1]", ',"id":"7","outputs":[{"name":"OUTPUT","parameters":{"binary_data":true}}]'),
    _binary([b"", "é".encode(), b'{"a": [1, 2]}', b"null"], "[4,1]", ',"parameters":{"binary_data_output":false}'),
    _binary([b"\xff\x00\xfe"], "[1]"),
    _MARK + b"one element",
    (
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2,2],"data":[[1,2.5],[-1e3,0]]},{"name":"y","datatype":"BOOL","shape":[2,1],'
        b'"parameters":{"binary_data_size":2}}],"outputs":[{"name":"y"},{"name":"x","parameters":{"binary_data":true}}]}|\0\1'
    ),
    b'{"inputs":[{"name":"x","datatype":"INT64","shape":[1,3],"data":[1,2,-3]},{"name":"z","datatype":"BYTES","shape":[1,1],"data":["a"]}]}',
    b'{"inputs":[{"name":"x","datatype":"FP16","shape":[1,2],"parameters":{"binary_data_size":4}}]}|\0\1\0\x7e',
)
BODY_WORDS = (
    b'"inputs":', b'"outputs":', b'"parameters":', b'"shape":', b'"data":', b'"binary_data_size":', b'"binary_data":true',
    b'"datatype":"FP32"', b'"datatype":"UINT8"', b'"datatype":"BF16"', b"[1]", b"[2,1]", b"[-1]", b"[0]", b"[18446744073709551616]", b"[[", b"]]", b"null", _MARK, b"\x01\0\0\0",
    b"\xff\xff\xff\xff", b"\0\0\0\x80", b'["a"],' * 40, b'"",' * 40, b"[" * 60, b"]" * 60, b"1e400", b"\\ud800", b"\\u0000", b"\x1b",
)  # fmt: skip

COMPRESSED = (
    gzip.compress(BODIES[0], mtime=0),
    zlib.compress(BODIES[1]),
    gzip.compress(bytes(100_000), mtime=0),
    zlib.compress(bytes(100_000)),
    gzip.compress(b"", mtime=0),
)
COMPRESSED_WORDS = b"\x1f\x8b\x08", b"\x78\x9c", b"\x1f\x8b\x08\x1c", b"\xff\xff", b"\0\0\xff\xff", b"\x03\0"


def check_tensor(data: bytes) -> None:
    """Accepted input has as many values as its shape says. The answer has as many elements, in the same shape."""
    left, mark, right = data.partition(_MARK)
    head = Head(b"POST", b"/", "1.1", [])
    head.length = len(data) - len(mark)
    if mark:
        head.single[LENGTH_FIELD.lower().encode()] = b"%d" % len(left)
    for settings, kind, context, codec in _CODECS:
        try:
            asked = read_inference_head(codec, head, RequestTarget({"model": "m"}, b""), context, None)
            exchange = asked.read(left + right, asked.options, context.known)
        except RequestError as exc:
            check_error(exc)
            continue
        _check_exchange(exchange, settings, kind, mark != b"" and not left)


def _check_exchange(exchange: Exchange, settings: Settings, kind: ValueKind | None, raw: bool) -> None:
    if isinstance(exchange.input, Tensors):
        assert kind in (ValueKind.TENSORS, None)
        _check_tensors(exchange, exchange.input)
        return
    inputs = exchange.input if isinstance(exchange.input, list) else [exchange.input]
    assert 1 <= len(inputs) <= min(MOST_INPUTS, settings.max_queue)
    assert all(isinstance(one, Octets if kind is ValueKind.BYTES else str) for one in inputs) or kind is ValueKind.JSON
    assert exchange.parameters == b"" or isinstance(json.loads(exchange.parameters), dict)
    assert 0 < exchange.options.timeout <= settings.request_timeout_ms / 1000
    assert 0 <= exchange.options.tier < len(settings.tier_names)
    elements = [element_of(one, kind) for one in inputs]
    try:
        fields, written = exchange.write(Outcome("req_1", inputs, 1.0, "1", [None] * len(inputs)))
        body = written if isinstance(written, bytes) else b"".join(written)
    except RequestError as exc:
        # Only now is it known what the model gives and which outputs can be requested.
        assert kind is ValueKind.BYTES or (kind is None and "there is no output" in exc.message), exc.message
        return
    length = next((int(line.split()[1]) for line in fields.split(b"\r\n") if line.startswith(b"inference-")), None)
    assert length is not None or not raw
    [output] = json.loads(body[:length])["outputs"]
    assert output["shape"] in ([len(inputs)], [len(inputs), 1])
    if length is None:
        assert [text.encode() for text in output["data"]] == elements
    else:
        assert unpack("OUTPUT", body[length:], len(inputs)) == elements


def _check_tensors(exchange: Exchange, value: Tensors) -> None:
    """Tensors are one value of a few rows. The answer is a JSON object with the data in it or after it."""
    assert 1 <= rows_of(value) <= 32
    assert pack(unpacked(value)).content == value.content
    try:
        fields, written = exchange.write(Outcome("req_1", (value,), 1.0, "1", (None,)))
        body = written if isinstance(written, bytes) else b"".join(written)
    except RequestError:
        return
    length = next((int(line.split()[1]) for line in fields.split(b"\r\n") if line.startswith(b"inference-")), None)
    behind = 0
    for output in json.loads(body[:length])["outputs"]:
        behind += output.get("parameters", {}).get("binary_data_size", 0)
        assert "data" not in output or len(output["data"]) == count_of(output["shape"])
    assert behind == (0 if length is None else len(body) - length)


def check_compressed(data: bytes) -> None:
    """Unpacking never gives more than the largest body."""
    for coding in CODINGS:
        try:
            unpacker = Unpacker(data, coding, _SETTINGS[0])
            while not unpacker.step():
                pass
        except RequestError as exc:
            check_error(exc)
            continue
        assert len(unpacker.whole()) == unpacker.size <= _SETTINGS[0].max_body_bytes

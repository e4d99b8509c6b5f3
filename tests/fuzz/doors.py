"""Input from OpenAI and gRPC clients, answers from remote APIs, chat templates and policy files."""

from __future__ import annotations

import json
from pathlib import Path

from headway import protos
from headway.config import Settings
from headway.dialects.dialect import BadMetadata, NoOutputs
from headway.dialects.table import DIALECTS, reach
from headway.doors.exchange import Exchange, Outcome
from headway.errors import BadRequest, RequestError, SettingError
from headway.gateway.fan_out import MOST_INPUTS
from headway.grpc.methods import PREDICT_READER
from headway.http.inference.inference_head import read_inference_head
from headway.http.inference.routes import codecs
from headway.http.openai.chat import Message, load_template
from headway.http.openai.members import MOST_TEXTS
from headway.http.server.head import Head, RequestTarget
from headway.input_policy import read_policy
from headway.model import Octets, RequestOptions, Tensors, ValueKind
from headway.oip import tensors
from headway.oip.grpc.infer_messages import infer_reader
from tests.fuzz.models import check_error, context_of, models_of

_SETTINGS = Settings(), Settings(max_queue=5)
_PATHS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"
_OPTIONS = RequestOptions(4.0)


_CODECS = [
    (path, settings, codecs(settings)[path], context_of(settings, models_of()))
    for settings in _SETTINGS
    for path in _PATHS
]

OPENAI = (
    b'{"model":"m","prompt":"hello","max_tokens":16,"temperature":0.5,"user":"u"}',
    b'{"model":"m","prompt":["a","b"],"n":2,"stream":true,"stream_options":{"include_usage":true},"stop":["\\n"]}',
    b'{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hello","name":"ada"}],"n":1}',
    (
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],'
        b'"tools":[],"logprobs":false,"stream":false}'
    ),
    b'{"model":"m","input":["h\\u00e9llo","b"],"encoding_format":"base64","dimensions":3}',
    b'{"model":"m","input":"hello","encoding_format":"float"}',
    b'{"model":"m","input":[{"role":"user","content":[{"type":"input_text","text":"a"}]}],"instructions":"b","metadata":{"a":"b"}}',
    b'{"model":"m","input":"hello","stream":true}',
    b'{"prompt":[1,2,3]}',
)
OPENAI_WORDS = (
    b'"model":', b'"prompt":', b'"messages":', b'"input":', b'"n":', b'"stream":true', b'"stream_options":', b'"dimensions":',
    b'"encoding_format":"base64"', b'"role":', b'"content":', b'{"type":"image_url"}', b'"logprobs":1', b'"echo":true', b'"best_of":2',
    b'"tools":[{}]', b"[1,2]", b"[[1]]", b'["a"],' * 40, b'"",' * 40, b"[" * 60, b"]" * 60, b"1e400", b"\\ud800", b"\\u0000", b"\x1b",
)  # fmt: skip


def check_openai(data: bytes) -> None:
    """Accepted input gives strings and parameters. The answer is JSON or a stream of it, and so is every error."""
    for path, settings, codec, context in _CODECS:
        head = Head(b"POST", path.encode(), "1.1", [])
        head.length = len(data)
        try:
            asked = read_inference_head(codec, head, RequestTarget({}, b""), context, None)
            exchange = asked.read(data, asked.options, context.known)
        except RequestError as exc:
            check_error(exc)
            _, body = codec.encode_error(exc, "req_1")
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
            continue
        inputs = _inputs(exchange, settings)
        outputs = ["[0.5, 1e300]" if path == "/v1/embeddings" else one for one in inputs]
        try:
            fields, written = exchange.write(Outcome("req_1", outputs, 1.0, "1", [None] * len(outputs)))
            body = written if isinstance(written, bytes) else b"".join(written)
        except RequestError as exc:
            check_error(exc)
            continue
        if b"event-stream" not in fields:
            answer = json.loads(body)
            assert len(answer.get("choices") or answer.get("output") or answer["data"]) == len(inputs)
            continue
        *events, done, rest = body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        if path == "/v1/responses":
            assert all(json.loads(event.partition(b"data: ")[2])["type"] for event in events)
            continue
        assert len(inputs) <= len(events) <= len(inputs) + 1
        assert all(json.loads(event.removeprefix(b"data: "))["object"] for event in events)


def _inputs(exchange: Exchange, settings: Settings) -> list[str]:
    inputs = exchange.input if isinstance(exchange.input, list) else [exchange.input]
    assert 1 <= len(inputs) <= min(MOST_TEXTS, settings.max_queue)
    assert exchange.parameters == b"" or isinstance(json.loads(exchange.parameters), dict)
    found = []
    for one in inputs:
        assert isinstance(one, str)
        one.encode()
        found.append(one)
    return found


_INFER = protos.message("inference.ModelInferRequest")
_PREDICT = protos.message("headway.v1.PredictRequest")


def _numbers(*, raw: bool) -> bytes:
    made = _INFER(model_name="m", outputs=[{"name": "x"}])
    for name, member in (("x", "fp32_contents"), ("y", "int_contents")):
        one = made.inputs.add(name=name, datatype="FP32" if name == "x" else "UINT8", shape=[2, 2])
        if raw:
            made.raw_input_contents.append(bytes(16 if name == "x" else 4))
        else:
            getattr(one.contents, member).extend([1, 2, 3, 4])
    return bytes(made.SerializeToString())


def _infer(elements: list[bytes], shape: list[int], raw: bool, **more: object) -> bytes:
    made = _INFER(model_name="m", id="7", **more)
    tensor = made.inputs.add(name="INPUT", datatype="BYTES", shape=shape)
    if raw:
        made.raw_input_contents.append(tensors.pack(elements))
    else:
        tensor.contents.bytes_contents.extend(elements)
    made.parameters["priority"].int64_param = 2
    made.parameters["heat"].double_param = 0.5
    return bytes(made.SerializeToString())


GRPC = (
    bytes(_PREDICT(model_id="m", input_data=b"hello").SerializeToString()),
    bytes(_PREDICT(input_data="zwölf".encode()).SerializeToString()),
    _infer([b"hello"], [1], raw=False),
    _infer([b"a", "é".encode(), b""], [3, 1], raw=True),
    _infer([b'{"a": [1, 2]}', b"null"], [2], raw=True, model_version="1"),
    _numbers(raw=True),
    _numbers(raw=False),
)
GRPC_WORDS = (
    b"INPUT", b"OUTPUT", b"BYTES", b"FP32", b"\x0a", b"\x12", b"\x1a", b"\x22", b"\x2a", b"\x3a", b"\x00", b"\x01\0\0\0", b"\xff\xff\xff\xff",
    b"\xff" * 9 + b"\x01", b"\x80" * 11, b"shared_memory_region", b"classification", b"priority", b"timeout", b"\x0b", b"\x0c",
)  # fmt: skip

_READERS = [
    (settings, read, kind, models_of(kind))
    for settings in _SETTINGS
    for kind in ValueKind
    for read in (PREDICT_READER.at_once, infer_reader(settings).at_once)
]
_REQUESTS = [
    protos.message_classes(service, method.name)[0]
    for service in protos.SERVICES
    for method in protos._POOL.FindServiceByName(service).methods
]
_TYPES = {ValueKind.TEXT: str, ValueKind.BYTES: Octets, ValueKind.TENSORS: Tensors}


def check_grpc(data: bytes) -> None:
    """Each method of each service reads or refuses a message. An accepted one can be answered."""
    for settings, read, kind, kinds in _READERS:
        try:
            exchange = read(data, _OPTIONS, kinds)
        except RequestError as exc:
            check_error(exc)
            continue
        inputs = exchange.input if isinstance(exchange.input, list) else [exchange.input]
        assert 1 <= len(inputs) <= min(MOST_INPUTS, settings.max_queue)
        if exchange.model == "m" and kind in _TYPES:
            assert all(isinstance(one, _TYPES[kind]) for one in inputs)
        assert 0 < exchange.options.timeout <= 4.0
        try:
            exchange.write(Outcome("req_1", inputs, 1.0, "1", [None] * len(inputs)))
        except BadRequest as exc:  # The output doesn't exist, but the model's outputs weren't known before.
            check_error(exc)
    for request in _REQUESTS:
        try:
            protos.read(request, data)
        except BadRequest as exc:
            check_error(exc)


ANSWERS = (
    b'["HELLO","B",null]',
    b'{"outputs":["HELLO",{"a":1},[0.5]]}',
    (
        b'{"id":"1","choices":[{"index":1,"text":"B","finish_reason":"stop"},{"index":0,"text":"A"},{"index":2,"text":"C"}],'
        b'"usage":{"total_tokens":3}}'
    ),
    b'{"object":"list","data":[{"index":0,"embedding":[0.5,-1]},{"index":2,"embedding":[1]},{"index":1,"embedding":[2e3]}]}',
    (
        b'{"model_name":"m","model_version":"1","outputs":[{"name":"OUTPUT","datatype":"BYTES","shape":[3],'
        b'"data":["A","B","C"]}]}'
    ),
    b'{"name":"m","inputs":[{"name":"I","datatype":"BYTES","shape":[-1,1]}],"outputs":[{"name":"O","datatype":"FP32","shape":[-1,2]}]}',
    b'{"model_name":"m","outputs":[{"name":"OUTPUT","datatype":"BYTES","shape":[3],"parameters":{"binary_data_size":15}}]}'
    + tensors.pack([b"A", b"B", b"C"]),
)
ANSWER_WORDS = (
    b'"outputs":', b'"choices":', b'"data":', b'"index":', b'"text":', b'"embedding":', b'"shape":', b'"datatype":"FP64"',
    b'"binary_data_size":', b"[3]", b"[-1]", b"null", b"[" * 60, b"]" * 60, b"1e400", b"\\ud800", b"NaN", b"\x01\0\0\0", b"\xff\xff\xff\xff",
)  # fmt: skip
_DIALECTS = [
    reach("grpc://a:1/m" if name == "oip-grpc" else "http://a:1/v2/models/m/infer", name, "m").dialect
    for name in DIALECTS
]


def check_answer(data: bytes) -> None:
    """An answer gives the expected number of items, or is refused."""
    for dialect in _DIALECTS:
        for expected, json_bytes in ((1, -1), (3, -1), (3, data.rfind(b"}") + 1)):
            try:
                items = dialect.decode(data, expected, json_bytes)
            except NoOutputs as exc:
                assert len(str(exc)) < 1000
                continue
            assert len(items) == expected
            assert all((one.output is None) == (one.error is not None) for one in items)
        try:
            dialect.learn(data)
        except BadMetadata as exc:
            assert len(str(exc)) < 2000


MESSAGES: list[Message] = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
MOST_QUOTING = 8
"""Times that a fuzzed template may ask for JSON."""
TEMPLATES = (
    (
        b"{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | trim }}{% endfor %}"
        b"{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    (
        b"{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{%- endif %}{{ bos_token }}"
        b"{%- for m in messages if m.role != 'tool' %}{{ m | tojson }}{% break %}{%- endfor %}"
    ),
    b"{% macro turn(m) %}{{ m.content[:10] }}{% endmacro %}{% set ns = namespace(n=0) %}{{ turn(messages[-1]) }}{{ strftime_now('%d') }}",
)
TEMPLATE_WORDS = (
    b"{{", b"}}", b"{%", b"%}", b"{#", b"#}", b"messages", b"[0]", b".content", b"| tojson", b"| upper", b"{% endfor %}", b"{% endif %}",
    b"__class__", b"self", b".format", b"{% include 'x' %}", b"{% import 'x' as y %}", b"namespace", b"loop.index", b"is defined",
)  # fmt: skip

POLICIES = (
    (
        b'[[rules]]\nname = "forms"\nnormalise = "NFKC"\n[[rules]]\nname = "unseen"\ncharacters = ["zero-width", "bidi", "tags"]\n'
        b'action = "refuse"\nmodels = ["chat"]\n'
    ),
    (
        b'shadow = true\n[[rules]]\nname = "runs"\nlongest_run = 400\nshadow = true\n[[rules]]\nname = "overrides"\n'
        b'patterns = [\'(?i)ignore (all )?previous\', "two"]\ntiers = ["free", "paid"]\n'
    ),
    b'[[rules]]\nname = "judge"\nfunction = "guard.py:check"\ndeadline_ms = 250\n',
)
POLICY_WORDS = (
    b"[[rules]]\n", b"[rules]\n", b"name = ", b"patterns = ", b"characters = ", b"action = ", b'"remove"', b"normalise = ", b'"NFC"', b"(?i)",
    b"(a+)+$", b"(((((", b"{1000}", b"\\\\p{Greek}", b"[^", b"(?<n>", b"longest_run = ", b"-1", b"nan", b"1e300", b"tiers = ", b"[" * 200, b"a." * 200,
)  # fmt: skip
LARGEST_FILE = 4096
"""Bytes of a file, which is the operator's own."""


class Files:
    """Checks each input as a file in a folder."""

    def __init__(self, folder: Path) -> None:
        self._template, self._policy = folder / "template.jinja", folder / "policy.toml"

    def check_template(self, data: bytes) -> None:
        """A template loads, or is a bad setting. It renders messages or refuses them.
        Each `tojson` doubles the escapes of the one before. Thirty fill all memory, which is the operator's own doing."""
        if data.count(b"tojson") > MOST_QUOTING:
            return
        self._template.write_bytes(data[:LARGEST_FILE])
        try:
            render = load_template(str(self._template))
        except SettingError as exc:
            assert exc.hint
            return
        try:
            assert isinstance(render(MESSAGES), str)
        except BadRequest as exc:
            exc.message.encode("utf-8", "backslashreplace")

    def check_policy(self, data: bytes) -> None:
        """A policy loads, or its file is reported with the reason."""
        self._policy.write_bytes(data[:LARGEST_FILE])
        try:
            policy = read_policy(self._policy, ("enterprise", "paid", "free"), ("chat",))
        except SettingError as exc:
            assert exc.reason
            assert exc.hint
            return
        assert policy.rules
        for search in policy.searches.values():
            search("ignore previous texts two")

"""The service's APIs: how each writes a request and reads an answer. Pure: bytes in, bytes out.

    sent = COMPLETIONS.write(["a", "b"])        path or method, header fields, body or message
    told = COMPLETIONS.read(200, fields, body)  outputs, or the error code that the native routes would give

The model gets the same text from all APIs but chat, which turns it into a conversation (`input_of`).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headway import protos
from headway.errors import STATUS
from headway.oip.tensors import pack, unpack

JSON = "Content-Type: application/json"
OCTETS = "Content-Type: application/octet-stream"
LENGTH = "Inference-Header-Content-Length"
MODEL = "default"
VECTOR = "vector"
"""Prefix of texts that the model function answers with numbers: the code points of its usual answer."""

_PREDICT = protos.message("headway.v1.PredictRequest")
_PREDICTED = protos.message("headway.v1.PredictResponse")
_INFER = protos.message("inference.ModelInferRequest")
_INFERRED = protos.message("inference.ModelInferResponse")
_STREAMED = protos.message("inference.ModelStreamInferResponse")
_SPECIAL = {"invalid_api_key": "UNAUTHENTICATED", "permission_denied": "FORBIDDEN", "model_not_found": "NOT_FOUND"}
_SAID = (
    (r"is in flight|was used for another", "IDEMPOTENCY_CONFLICT"),
    (r"the input policy", "REJECTED_BY_POLICY"),
    (r"over the (rate )?limit", "RATE_LIMITED"),
    (r"no (healthy )?worker|it is not currently known whether", "NO_WORKERS"),
    (r"deadline", "DEADLINE_EXCEEDED"),
    (r"retry budget is spent", "BACKEND_ERROR"),
    (r"rejected|poisonous|failed on this input", "REJECTED_BY_MODEL"),
)
"""Error messages of APIs without error codes, and the codes they mean."""


class Sent(NamedTuple):
    """A request to send: path or method, header fields, and the body or message."""

    path: str
    fields: tuple[str, ...]
    body: bytes


class Told(NamedTuple):
    """An answer: outputs (empty for an error), the error code (empty for none), and the version that answered."""

    outputs: list[str]
    code: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class WayIn:
    """One API.

    Attributes:
        name: its name in histories.
        wire: what carries it: `http`, `call` (a gRPC call) or `stream` (a message of a gRPC stream).
        write: turns texts, a version and a model into the request, which names those that are not empty if it can.
        outputs: gets the outputs from the body of an answer.
        said: gets the error code from the body of an error, if the API has codes.
        most: maximum number of inputs in a request.
        tasks: whether a request may become a task.
        input_of: turns a text into the input that the model gets.
        numbers: whether only texts with numeric outputs are answered.
        versions, models: whether a request can name a version, and a model.
        version: gets the version from the body of an answer, or an empty string.
        members_of: turns parameters into members of a JSON body; None if a request can't have any.
    """

    name: str
    wire: str
    write: Callable[..., Sent]
    outputs: Callable[[Mapping[str, str], bytes], list[Any]]
    said: Callable[[int, bytes], str]
    most: int = 1
    tasks: bool = False
    input_of: Callable[[str], str] = str
    numbers: bool = False
    versions: bool = False
    models: bool = True
    version: Callable[[Mapping[str, str], bytes], str] = lambda fields, body: ""
    members_of: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def with_parameters(self, body: bytes, parameters: dict[str, Any]) -> bytes:
        assert self.members_of is not None
        return json.dumps(json.loads(body) | self.members_of(parameters)).encode()

    def read(self, status: int, fields: Mapping[str, str], body: bytes) -> Told:
        if status == 200:
            outputs = [text_of_numbers(one) for one in self.outputs(fields, body)]
            return Told(outputs, version=self.version(fields, body))
        return Told([], self.said(status, body))


def text_of_numbers(output: Any) -> str:
    """Convert an output given as numbers to the text that it represents."""
    if isinstance(output, list):
        output = text_of_codes(output)
    return "".join(map(chr, json.loads(output))) if output.startswith("[") else str(output)


def text_of_codes(codes: Iterable[int]) -> str:
    return bytes(codes).rstrip(b"\0").decode()


def texts_of(datatype: str, shape: Sequence[int], data: Sequence[int] | bytes) -> list[str]:
    """Return the texts in the output of an Open Inference Protocol answer: from BYTES, or from rows of octets."""
    if datatype == "BYTES":
        return [text.decode() for text in unpack("OUTPUT", bytes(data), shape[0])]
    return [text_of_codes(data[row * shape[1] : (row + 1) * shape[1]]) for row in range(shape[0])]


def chat_input(text: str) -> str:
    """Return the model's input for a chat with one message, whose role is the first word."""
    role, _, content = text.partition(" ")
    return f"{role}: {content}\nassistant:"


def status_of_code(code: str, aborted: bool) -> int:
    return 422 if code == "IDEMPOTENCY_CONFLICT" and not aborted else STATUS[code]


def code_of_message(message: str) -> str:
    return next((code for pattern, code in _SAID if re.search(pattern, message)), "REJECTED_BY_MODEL")


def _turned_away(message: str) -> str:
    """Return the code of a 429 error of which only the message is known."""
    return "RATE_LIMITED" if code_of_message(message) == "RATE_LIMITED" else "SHED"


def _overloaded(message: str) -> str:
    """Return the code of a 503 error of which only the message is known."""
    return "NO_WORKERS" if code_of_message(message) == "NO_WORKERS" else "SERVICE_OVERLOADED"


def place_of_message(message: str) -> int:
    """Return the index of the input that an error names in a request with several, or -1."""
    found = re.search(r"input (\d+) of \d+, counted from 0", message)
    return int(found[1]) if found else -1


# Errors by API.


def _native_error(status: int, body: bytes) -> str:
    return str(json.loads(body)["error"])


def _openai_error(status: int, body: bytes) -> str:
    error = json.loads(body)["error"]
    code = error["code"]
    if code == "rate_limit_exceeded":
        return _turned_away(error["message"])
    if code == "server_is_overloaded":
        return _overloaded(error["message"])
    return _SPECIAL.get(code) or str(code).upper()


def _oip_error(status: int, body: bytes) -> str:
    found = [code for code, known in STATUS.items() if known == status]
    message = json.loads(body)["error"]
    if status == 429:
        return _turned_away(message)
    said = code_of_message(message)
    return said if said in found or status == 422 else found[0]


def _no_error(status: int, body: bytes) -> str:
    raise AssertionError("calls tell their errors in their trailers")


# HTTP.


def post(path: str, members: Mapping[str, Any], *fields: str) -> Sent:
    return Sent(path, (JSON, *fields), json.dumps(members).encode())


def of_one(
    name: str, path: str, member: str, model_member: str = "model", value: Callable[[str], Any] = str, **always: str
) -> WayIn:
    """Make an API with one input in a member of a JSON body. `value` turns a text into the member's value."""

    def write(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
        named = {"version": version, model_member: model}
        return post(path, {member: value(texts[0]), **always, **{key: value for key, value in named.items() if value}})

    return WayIn(
        name, "http", write, lambda fields, body: [json.loads(body)["output"]], _native_error, tasks=True, versions=True
    )


def several(name: str, value: Callable[[str], Any] = str) -> WayIn:
    def write(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
        named = {key: one for key, one in {"version": version, "model": model}.items() if one}
        return post("/v1/inference", {"inputs": list(map(value, texts)), **named})

    return WayIn(
        name, "http", write, lambda fields, body: json.loads(body)["outputs"], _native_error, most=64, versions=True,
        version=_version_of_metadata, members_of=_native_members,
    )  # fmt: skip


def _native_members(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": parameters}


def _of_openai(path: str, member: str) -> Callable[..., Sent]:
    def write(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
        return post(path, {"model": model or MODEL, member: list(texts)})

    return write


def _version_of_metadata(fields: Mapping[str, str], body: bytes) -> str:
    told = json.loads(body).get("metadata", {})  # A task's outcome has none.
    return str(told.get("model_version", ""))


def _head_of(fields: Mapping[str, str], body: bytes) -> Any:
    """Parse the JSON of an Open Inference Protocol answer, which a binary part may follow."""
    return json.loads(body[: int(fields.get(LENGTH.lower(), len(body)))])


def infer_path(version: str, model: str) -> str:
    path = f"/v2/models/{model or MODEL}"
    return f"{path}/versions/{version}/infer" if version else f"{path}/infer"


def _tensor(texts: Sequence[str], **members: Any) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [len(texts)], **members}


def _write_binary(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
    data = pack(text.encode() for text in texts)
    asked = {"inputs": [_tensor(texts, parameters={"binary_data_size": len(data)})]}
    head = json.dumps({**asked, "parameters": {"binary_data_output": True}}).encode()
    return Sent(infer_path(version, model), (OCTETS, f"{LENGTH}: {len(head)}"), head + data)


def _write_oip(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
    return post(infer_path(version, model), {"inputs": [_tensor(texts, data=list(texts))]})


def _write_octets(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
    named = f"&version={version}" if version else ""
    return Sent(f"/v1/predict?model_id={model or MODEL}{named}", (OCTETS,), texts[0].encode())


def _read_binary(fields: Mapping[str, str], body: bytes) -> list[str]:
    [output] = _head_of(fields, body)["outputs"]
    return texts_of(output["datatype"], output["shape"], body[int(fields[LENGTH.lower()]) :])


def _read_oip(fields: Mapping[str, str], body: bytes) -> list[str]:
    [output] = json.loads(body)["outputs"]
    data = output["data"]
    return list(data) if output["datatype"] == "BYTES" else texts_of(output["datatype"], output["shape"], data)


def _write_chat(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
    role, _, content = texts[0].partition(" ")
    return post("/v1/chat/completions", {"model": model or MODEL, "messages": [{"role": role, "content": content}]})


NATIVE = replace(of_one("native", "/v1/inference", "input"), version=_version_of_metadata, members_of=_native_members)
API = replace(of_one("api", "/api/inference", "input"), versions=False, models=False)
PREDICT = of_one("predict", "/v1/predict", "input_data", "model_id", model_id=MODEL)
OCTET_STREAM = WayIn(
    "octet-stream", "http", _write_octets, lambda fields, body: [json.loads(body)["output"]], _native_error, tasks=True,
    versions=True,
)  # fmt: skip
SEVERAL = several("several inputs")
COMPLETIONS = WayIn(
    "completions", "http", _of_openai("/v1/completions", "prompt"),
    lambda fields, body: [one["text"] for one in json.loads(body)["choices"]], _openai_error, most=64,
    members_of=dict,
)  # fmt: skip
CHAT = WayIn(
    "chat", "http", _write_chat, lambda fields, body: [json.loads(body)["choices"][0]["message"]["content"]],
    _openai_error, input_of=chat_input, members_of=dict,
)  # fmt: skip
EMBEDDINGS = WayIn(
    "embeddings", "http", _of_openai("/v1/embeddings", "input"),
    lambda fields, body: ["".join(chr(int(one)) for one in row["embedding"]) for row in json.loads(body)["data"]],
    _openai_error, most=64, numbers=True, members_of=dict,
)  # fmt: skip
OIP_JSON = WayIn(
    "OIP, JSON", "http", _write_oip, _read_oip, _oip_error, most=64,
    versions=True, version=lambda fields, body: str(_head_of(fields, body)["model_version"]),
)  # fmt: skip
OIP_BINARY = WayIn(
    "OIP, binary", "http", _write_binary, _read_binary, _oip_error, most=64,
    versions=True, version=lambda fields, body: str(_head_of(fields, body)["model_version"]),
)  # fmt: skip


# gRPC.


def call(
    name: str, octets: Callable[[str], bytes] = str.encode, output: Callable[[bytes], Any] = bytes.decode
) -> WayIn:
    """Make an API for Predict calls. `octets` turns a text into the input; `output` decodes the answer."""

    def write(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
        asked = _PREDICT(model_id=model, input_data=octets(texts[0]))
        return Sent(f"/{protos.HEADWAY}/Predict", (), bytes(asked.SerializeToString()))

    def outputs(fields: Mapping[str, str], body: bytes) -> list[Any]:
        return [output(_PREDICTED.FromString(body).output)]

    return WayIn(name, "call", write, outputs, _no_error)


def _write_infer(method: str, raw: bool) -> Callable[..., Sent]:
    def write(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
        octets = [text.encode() for text in texts]
        asked = _INFER(
            model_name=model or MODEL,
            model_version=version,
            id=texts[0],
            raw_input_contents=[pack(octets)] if raw else [],
        )
        tensor = asked.inputs.add(name="text", datatype="BYTES", shape=[len(texts)])
        if not raw:
            tensor.contents.bytes_contents.extend(octets)
        return Sent(f"/{protos.OPEN_INFERENCE}/{method}", (), bytes(asked.SerializeToString()))

    return write


def _inferred(answer: Any) -> list[str]:
    [output] = answer.outputs
    return texts_of(output.datatype, output.shape, answer.raw_output_contents[0])


class Streamed(NamedTuple):
    """A message of a stream: the request's id, its parameters, its content, and an error's message."""

    id: str
    fields: dict[str, str]
    told: Told
    error: str


def read_streamed(body: bytes) -> Streamed:
    answer = _STREAMED.FromString(body)
    made = answer.infer_response
    fields = {name: one.string_param for name, one in made.parameters.items()}
    if answer.error_message:
        return Streamed(made.id, fields, Told([], fields["x-headway-error"]), answer.error_message)
    outputs = [text_of_numbers(one) for one in _inferred(made)]
    return Streamed(made.id, fields, Told(outputs, version=made.model_version), "")


CALL = call("gRPC Predict")
INFER = WayIn(
    "gRPC ModelInfer", "call", _write_infer("ModelInfer", raw=True),
    lambda fields, body: _inferred(_INFERRED.FromString(body)), _no_error, most=64,
    versions=True, version=lambda fields, body: _INFERRED.FromString(body).model_version,
)  # fmt: skip
STREAM = WayIn(
    "gRPC ModelStreamInfer", "stream", _write_infer("ModelStreamInfer", raw=False),
    lambda fields, body: read_streamed(body).told.outputs, _no_error, most=64,
    versions=True,
)  # fmt: skip

WAYS_IN = (
    NATIVE, API, PREDICT, OCTET_STREAM, SEVERAL, COMPLETIONS, CHAT, EMBEDDINGS, OIP_JSON, OIP_BINARY, CALL, INFER, STREAM,
)  # fmt: skip
ROWS_IN = (OIP_JSON, OIP_BINARY, INFER, STREAM)
"""APIs in which several inputs are the rows of one tensor, if the model takes tensors."""
TENSORS_IN = (NATIVE, API, PREDICT, SEVERAL, *ROWS_IN)
"""APIs of a model that takes tensors of strings."""

"""Doors through which tensors go into a running service, and come out of it: the bytes of each request, and of each answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grpc
import numpy as np

from headway.client import ApiError, Client
from headway.core.tensors import join_elements
from headway.grpc import messages
from headway.oip.tensors import CONTENTS
from tests.e2e.client import Connection, request
from tests.targets.arrays import TWICE

LENGTH = "Inference-Header-Content-Length"
OCTETS = "Content-Type: application/octet-stream"
INFER = f"/{messages.OPEN_INFERENCE}/ModelInfer"
DTYPES: dict[str, Any] = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2", "INT32": "<i4",
    "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BF16": "<f4", "BYTES": object,
}  # fmt: skip
"""Dtypes as targets have them; BF16 is widened."""
_ASKED = messages.message("inference.ModelInferRequest")
_TOLD = messages.message("inference.ModelInferResponse")

Arrays = Mapping[str, Any]


class Refused(Exception):
    """Answer with an error: its status, as that of HTTP, and its text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


class Model(NamedTuple):
    """Model that is asked: its name, the datatype and shape of each input, and inputs that have one output alone."""

    name: str
    specs: Mapping[str, tuple[str, list[int]]]
    lone: list[str]

    @property
    def outputs(self) -> list[str]:
        """Names of its outputs."""
        return [f"{one}{end}" for one in self.specs for end in ("", *(TWICE,) * (one not in self.lone))]

    def datatype(self, output: str) -> str:
        """Datatype of an output, which is that of the input after which it is named."""
        return self.specs[output if output in self.specs else output[:-1]][0]


class Ask(NamedTuple):
    """Request: its arrays, the outputs that it wants, and whether it is one row that has no axis of rows where a door can have it so."""

    model: Model
    inputs: Arrays
    wanted: list[str]
    single: bool


def octets_of(array: Any, datatype: str) -> bytes:
    """Data of an array in the binary form."""
    if datatype == "BYTES":
        return join_elements(array.ravel().tolist())
    if datatype == "BF16":
        return (np.ascontiguousarray(array, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.ascontiguousarray(array, DTYPES[datatype]).tobytes()


class Doors:
    """Doors of a service, for one thread."""

    def __init__(self, port: int, grpc_port: int) -> None:
        self._port, self._connection = port, Connection(port)
        self._client = Client(f"http://127.0.0.1:{port}")
        self._channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}", [("grpc.max_receive_message_length", -1)])
        self._infer = self._channel.unary_unary(INFER)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
        self._client.close()
        self._channel.close()

    def ask_http(self, data: bytes) -> tuple[Any, bytes]:
        """Send a request over HTTP, and return the fields and the body of the answer. Raises Refused."""
        if self._connection.closed:
            self._connection = Connection(self._port)
        self._connection.send(data)
        answer = self._connection.answer()
        if answer.header["connection"] == "close":
            self._connection.close()
        if answer.status != 200:
            raise Refused(answer.status, answer.body.decode())
        return answer.header, answer.body

    def ask_grpc(self, data: bytes) -> bytes:
        """Send a request over gRPC. Raises Refused."""
        try:
            return bytes(self._infer(data, timeout=60))
        except grpc.RpcError as exc:
            raise Refused(STATUSES.get(exc.code(), 500), f"{exc.code()}: {exc.details()}") from None

    def ask_client(self, ask: Ask) -> dict[str, Any]:
        """Send arrays with the client, and return those that came. Raises Refused."""
        whole: Any = ask.inputs if len(ask.inputs) > 1 else next(iter(ask.inputs.values()))
        try:
            output = self._client.infer(whole, ask.model.name, outputs=ask.wanted or None).output
        except ApiError as exc:
            raise Refused(exc.status or 500, str(exc)) from None
        return output if isinstance(output, dict) else {told_names(ask)[0]: output}


STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400, grpc.StatusCode.NOT_FOUND: 404, grpc.StatusCode.RESOURCE_EXHAUSTED: 413,
    grpc.StatusCode.INTERNAL: 502,
}  # fmt: skip


def told_names(ask: Ask) -> list[str]:
    """Names of the outputs that are to come."""
    return ask.wanted or ask.model.outputs


# What goes in.


def listed(array: Any) -> Any:
    """Nested lists of an array, as JSON has them."""
    texts = [one.decode() if isinstance(one, bytes) else one for one in array.ravel().tolist()]
    if array.dtype != object:
        return array.tolist()
    shaped = np.empty(array.shape, object)
    shaped.ravel()[:] = texts
    return shaped.tolist()


def native(ask: Ask) -> bytes:
    values = {name: listed(one[0] if ask.single and one.ndim > 1 else one) for name, one in ask.inputs.items()}
    if ask.single:
        values = {name: value[0] if ask.inputs[name].ndim == 1 else value for name, value in values.items()}
    whole: Any = values if len(values) > 1 else next(iter(values.values()))
    return request(json.dumps({"model": ask.model.name, "input": whole}).encode(), "/v1/inference")


def _oip(ask: Ask, ways: list[str]) -> bytes:
    """Request by the Open Inference Protocol, whose inputs are `flat` or `nested` lists, or `binary`."""
    heads, behind = [], b""
    for (name, one), way in zip(ask.inputs.items(), ways, strict=True):
        datatype = ask.model.specs[name][0]
        head: dict[str, Any] = {"name": name, "datatype": datatype, "shape": one.shape}
        if way == "binary":
            data = octets_of(one, datatype)
            head["parameters"] = {"binary_data_size": len(data)}
            behind += data
        else:
            head["data"] = listed(one.ravel() if way == "flat" else one)
        heads.append(head)
    body: dict[str, Any] = {"inputs": heads}
    if behind or "binary" in ways:
        body["parameters"] = {"binary_data_output": True}
    if ask.wanted:
        body["outputs"] = [{"name": name} for name in ask.wanted]
    text = json.dumps(body).encode()
    fields = [f"{LENGTH}: {len(text)}", OCTETS] if "binary" in ways else []
    return request(text + behind, f"/v2/models/{ask.model.name}/infer", *fields)


def oip_json(ask: Ask) -> bytes:
    return _oip(ask, ["flat" if place % 2 else "nested" for place in range(len(ask.inputs))])


def oip_binary(ask: Ask) -> bytes:
    return _oip(ask, ["binary"] * len(ask.inputs))


def octets(ask: Ask) -> bytes:
    [(name, one)] = ask.inputs.items()
    data = octets_of(one, ask.model.specs[name][0])
    return request(data, f"/v1/predict?model_id={ask.model.name}", OCTETS, "Accept: application/octet-stream")


def grpc_raw(ask: Ask) -> bytes:
    return _message(ask, raw=True)


def grpc_typed(ask: Ask) -> bytes:
    return _message(ask, raw=False)


def _message(ask: Ask, *, raw: bool) -> bytes:
    asked = _ASKED(model_name=ask.model.name)
    for name, one in ask.inputs.items():
        datatype = ask.model.specs[name][0]
        tensor = asked.inputs.add(name=name, datatype=datatype, shape=one.shape)
        if raw:
            asked.raw_input_contents.append(octets_of(one, datatype))
        else:
            getattr(tensor.contents, CONTENTS[datatype][0]).extend(one.ravel().tolist())
    for name in ask.wanted:
        asked.outputs.add(name=name)
    return bytes(asked.SerializeToString())


# What comes out: of each output its shape, where the door tells one, and its data in the binary form.

Outputs = dict[str, tuple[tuple[int, ...] | None, bytes]]


def read_native(ask: Ask, fields: Mapping[str, str], body: bytes) -> Outputs:
    output, names = json.loads(body)["output"], told_names(ask)
    found = {names[0]: output} if len(names) == 1 else output
    if ask.single:
        found = {name: [one] for name, one in found.items()}
    return {name: _of_nested(one, ask.model.datatype(name)) for name, one in found.items()}


def _of_nested(nested: Any, datatype: str) -> tuple[tuple[int, ...], bytes]:
    shape, flat = [], [nested]
    while flat and isinstance(flat[0], list):
        shape.append(len(flat[0]))
        assert {len(one) for one in flat} == {shape[-1]}
        flat = [one for inner in flat for one in inner]
    return tuple(shape), _of_flat(flat, datatype)


def _of_flat(flat: list[Any], datatype: str) -> bytes:
    """Data of numbers that JSON tells; each is one that the datatype has exactly."""
    if datatype == "BYTES":
        return join_elements([one.encode() for one in flat])
    kind = {"b": bool, "f": float}.get(np.dtype(DTYPES[datatype]).kind, int)
    assert {type(one) for one in flat} <= {kind}
    array = np.array(flat, DTYPES[datatype])
    assert array.tolist() == flat
    return octets_of(array, datatype)


def read_oip(ask: Ask, fields: Mapping[str, str], body: bytes) -> Outputs:
    length = int(fields.get(LENGTH.lower()) or len(body))
    told, at = json.loads(body[:length]), length
    found: Outputs = {}
    for one in told["outputs"]:
        assert one["datatype"] == ask.model.datatype(one["name"])
        if "data" in one:
            data = _of_flat(one["data"], one["datatype"])
        else:
            size = one["parameters"]["binary_data_size"]
            data, at = body[at : at + size], at + size
        found[one["name"]] = tuple(one["shape"]), data
    assert at == len(body)
    return found


def read_octets(ask: Ask, fields: Mapping[str, str], body: bytes) -> Outputs:
    [name] = told_names(ask)
    return {name: (None, body)}


def read_grpc(ask: Ask, body: bytes) -> Outputs:
    told = _TOLD.FromString(body)
    pairs = zip(told.outputs, told.raw_output_contents, strict=True)
    return {one.name: (tuple(one.shape), bytes(data)) for one, data in pairs}


HTTP: dict[str, tuple[Callable[[Ask], bytes], Callable[[Ask, Mapping[str, str], bytes], Outputs]]] = {
    "native JSON": (native, read_native),
    "OIP JSON": (oip_json, read_oip),
    "OIP binary": (oip_binary, read_oip),
    "octets": (octets, read_octets),
}
GRPC = {"gRPC raw": grpc_raw, "gRPC typed": grpc_typed}
CLIENT = "Client.infer"
NAMES = (*HTTP, *GRPC, CLIENT)
OF_TEXT = ("native JSON", "OIP JSON")
"""Doors that have numbers as JSON."""


def through(doors: Doors, name: str, ask: Ask) -> Outputs:
    """Outputs of a request by a door. Raises Refused."""
    if name in HTTP:
        write, read = HTTP[name]
        return read(ask, *doors.ask_http(write(ask)))
    if name in GRPC:
        return read_grpc(ask, doors.ask_grpc(GRPC[name](ask)))
    found = doors.ask_client(ask)
    return {key: (one.shape, octets_of(one, ask.model.datatype(key))) for key, one in found.items()}

"""Random tensors through the reader and the writer of the Open Inference Protocol, byte for byte, and damaged ones."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Settings
from headway.core.tensors import join_elements, unpack
from headway.doors.exchange import Outcome
from headway.errors import RequestError
from headway.gateway.served_model import ServedModel
from headway.model import Tensors, TensorSpec, Value, ValueKind
from headway.oip.rest.answers import Answerer
from headway.oip.rest.requests import request_reader
from headway.oip.rest.tensor_requests import TensorsRequest
from tests.oip.arrays import DTYPES, Drawn, body_of, several

SETTINGS = Settings()
READ = request_reader(SETTINGS)
WAYS = ("nested", "flat", "binary")


def model(drawn: list[Drawn], takes: ValueKind | None = ValueKind.TENSORS, *, free: bool = False) -> ServedModel:
    """Model that takes and gives tensors such as these. `free`: the sizes of its axes are."""
    served = ServedModel(SETTINGS, lambda: 0.5, alone=True)
    served.takes = served.gives = takes
    if takes is ValueKind.TENSORS:
        heads = [one.tensor.head for one in drawn]
        served.inputs = served.outputs = tuple(
            TensorSpec(one.name, one.datatype, tuple(-1 if free else size for size in one.shape[1:])) for one in heads
        )
    return served


def written(asked: TensorsRequest, outputs: list[Value]) -> tuple[int | None, bytes]:
    """Length of the JSON object of an answer, where there is one, and the answer."""
    answerer = Answerer("m", asked.shape, asked.wishes.binary, ValueKind.TENSORS, asked.id, asked.wanted)
    fields, body = answerer.write(Outcome("req_1", outputs, 1.0, "1", [None] * len(outputs)))
    length = next((int(line.split()[1]) for line in fields.split(b"\r\n") if line.startswith(b"inference-")), None)
    return length, body if isinstance(body, bytes) else b"".join(body)


def read_back(length: int | None, body: bytes) -> dict[str, bytes]:
    """Data of the outputs of an answer in the binary form, by name."""
    at, found = length, {}
    for output in json.loads(body[:length])["outputs"]:
        if size := output.get("parameters", {}).get("binary_data_size"):
            assert at is not None
            found[output["name"]] = body[at : at + size]
            at += size
        elif "data" not in output:
            found[output["name"]] = b""
        else:
            found[output["name"]] = packed(output["data"], output["datatype"])
    assert at is None or at == len(body)
    return found


def packed(data: list[Any], datatype: str) -> bytes:
    """Data in the binary form of a flat list."""
    if datatype == "BYTES":
        return join_elements(one.encode() for one in data)
    if datatype == "BF16":
        return (np.array(data, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.array(data, DTYPES[datatype]).tobytes()


@given(several(), st.data())
def test_any_tensors_go_in_and_out_byte_for_byte(drawn: list[Drawn], data: st.DataObject) -> None:
    ways = [data.draw(st.sampled_from(WAYS)) for _ in drawn]
    takes = data.draw(st.sampled_from([ValueKind.TENSORS, None]))
    order = data.draw(st.permutations(drawn))
    wanted = order[: data.draw(st.integers(1, len(order)))] if data.draw(st.booleans()) else []
    members: dict[str, Any] = {"parameters": {"binary_data_output": data.draw(st.booleans())}} if wanted else {}
    if wanted:
        flags = st.sampled_from([{}, {"binary_data": True}, {"binary_data": False}])
        members["outputs"] = [{"name": one.tensor.head.name, "parameters": data.draw(flags)} for one in wanted]
    body, length = body_of(drawn, ways, **members)
    asked = READ(body, length, model(drawn, takes, free=data.draw(st.booleans())))
    if not isinstance(asked, TensorsRequest):
        assert takes is None and len(drawn) == 1 and drawn[0].tensor.head.datatype == "BYTES"
        return
    assert [(one.head, bytes(one.data)) for one in unpack(asked.value)] == [one.tensor for one in drawn]
    copies = data.draw(st.integers(1, 3))
    length, answer = written(asked, [asked.value] * copies)
    told = [(one["name"], tuple(one["shape"])) for one in json.loads(answer[:length])["outputs"]]
    heads = [one.tensor.head for one in wanted or drawn]
    assert told == [(head.name, (copies * head.shape[0], *head.shape[1:])) for head in heads]
    assert read_back(length, answer) == {
        one.tensor.head.name: bytes(one.tensor.data) * copies for one in wanted or drawn
    }


@given(several(), st.data())
def test_damaged_tensors_are_refused_or_read_and_nothing_else(drawn: list[Drawn], data: st.DataObject) -> None:
    ways = [data.draw(st.sampled_from(WAYS)) for _ in drawn]
    body, length = body_of(drawn, ways, outputs=[{"name": drawn[0].tensor.head.name}])
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        at, piece = data.draw(st.integers(0, len(damaged))), data.draw(PIECES)
        damaged[at : at + data.draw(st.integers(0, 3))] = piece
    if length is not None:
        length = max(0, length + data.draw(st.integers(-2, 2)))
    served = model(drawn, data.draw(st.sampled_from([ValueKind.TENSORS, None])))
    try:
        asked = READ(bytes(damaged), length, served)
        if isinstance(asked, TensorsRequest):
            assert isinstance(asked.value, Tensors)
            written(asked, [asked.value])
    except RequestError as exc:
        assert len(exc.message) < 2000
        exc.message.encode()


PIECES = st.sampled_from([b"", b"[", b"]", b",", b"null", b"1e999", b"-1", b'"', b"{}", b"0", b"true", b"\xff", b"\0", b"FP16", b"JSON", b"99999999999999999999"])  # fmt: skip
"""What damages a body."""

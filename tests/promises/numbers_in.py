"""Ways into a model that takes two tensors of numbers: the octets of a text, filled up with zeros, and their sum. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headway.grpc import messages
from tests.promises import ways_in
from tests.promises.ways_in import LENGTH, MODEL, OCTETS, Sent, WayIn

_INFER = messages.message("inference.ModelInferRequest")
CODES, SUM = "codes", "sum"


def value_of(text: str) -> dict[str, Any]:
    """JSON value of one row."""
    codes = list(text.encode())
    return {CODES: codes, SUM: sum(codes)}


def arrays_of(texts: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Datatype and array of each input of several rows."""
    rows = [text.encode() for text in texts]
    codes = np.frombuffer(b"".join(row.ljust(max(map(len, rows)), b"\0") for row in rows), "u1").reshape(len(rows), -1)
    return {CODES: ("UINT8", codes), SUM: ("INT64", codes.sum(axis=1, dtype="<i8"))}


def _write_oip(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
    inputs = [_head(name, *one, data=one[1].ravel().tolist()) for name, one in arrays_of(texts).items()]
    return ways_in.post(ways_in.infer_path(version, model), {"inputs": inputs})


def _write_binary(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
    arrays = arrays_of(texts)
    heads = [_head(name, *one, parameters={"binary_data_size": one[1].nbytes}) for name, one in arrays.items()]
    text = json.dumps({"inputs": heads, "parameters": {"binary_data_output": True}}).encode()
    data = b"".join(one.tobytes() for _, one in arrays.values())
    return Sent(ways_in.infer_path(version, model), (OCTETS, f"{LENGTH}: {len(text)}"), text + data)


def _head(name: str, datatype: str, array: Any, **members: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": array.shape, **members}


def _write_infer(method: str, raw: bool) -> Any:
    def write(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
        asked = _INFER(model_name=model or MODEL, model_version=version, id=texts[0])
        for name, (datatype, array) in arrays_of(texts).items():
            tensor = asked.inputs.add(name=name, datatype=datatype, shape=array.shape)
            if raw:
                asked.raw_input_contents.append(array.tobytes())
            else:
                member = tensor.contents.uint_contents if name == CODES else tensor.contents.int64_contents
                member.extend(array.ravel().tolist())
        return Sent(f"/{messages.OPEN_INFERENCE}/{method}", (), bytes(asked.SerializeToString()))

    return write


NATIVE = ways_in.of_one("native, numbers", "/v1/inference", "input", value=value_of)
NATIVE = replace(NATIVE, version=ways_in.NATIVE.version)
API = replace(ways_in.of_one("api, numbers", "/api/inference", "input", value=value_of), versions=False, models=False)
PREDICT = ways_in.of_one("predict, numbers", "/v1/predict", "input_data", "model_id", value=value_of, model_id=MODEL)
SEVERAL = ways_in.several("several inputs, numbers", value_of)
CALL = ways_in.call("gRPC Predict, numbers", lambda text: json.dumps(value_of(text)).encode(), json.loads)
ROWS_IN: tuple[WayIn, ...] = (
    replace(ways_in.OIP_JSON, name="OIP, JSON, numbers", write=_write_oip),
    replace(ways_in.OIP_BINARY, name="OIP, binary, numbers", write=_write_binary),
    replace(ways_in.INFER, name="gRPC ModelInfer, numbers", write=_write_infer("ModelInfer", raw=True)),
    replace(ways_in.STREAM, name="gRPC ModelStreamInfer, numbers", write=_write_infer("ModelStreamInfer", raw=False)),
)
"""Ways by which several inputs are the rows of the tensors."""
NUMBERS_IN = (NATIVE, API, PREDICT, SEVERAL, CALL, *ROWS_IN)

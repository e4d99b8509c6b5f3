"""APIs of models that take tensors of numbers: the zero-padded octets of a text, with or without their sum. Pure."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headway import protos
from tests.promises import ways_in
from tests.promises.ways_in import LENGTH, MODEL, OCTETS, Sent, WayIn, text_of_codes

_INFER = protos.message("inference.ModelInferRequest")
CODES, SUM = "codes", "sum"
Write = Callable[..., Sent]


def _value_of_both(text: str) -> dict[str, Any]:
    return {CODES: _value_of_codes(text), SUM: sum(text.encode())}


def _value_of_codes(text: str) -> list[int]:
    return list(text.encode())


def _both(texts: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Return the datatype and array of each input, for several rows."""
    rows = [text.encode() for text in texts]
    codes = np.frombuffer(b"".join(row.ljust(max(map(len, rows)), b"\0") for row in rows), "u1").reshape(len(rows), -1)
    return {CODES: ("UINT8", codes), SUM: ("INT64", codes.sum(axis=1, dtype="<i8"))}


def _codes(texts: Sequence[str]) -> dict[str, tuple[str, Any]]:
    return {CODES: _both(texts)[CODES]}


def _ways(mark: str, value_of: Callable[[str], Any], arrays_of: Callable[..., Any]) -> tuple[WayIn, ...]:
    """Return the APIs of a model, with those for ROWS last. `mark` is the suffix of their names."""

    def write_oip(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
        inputs = [_head(name, *one, data=one[1].ravel().tolist()) for name, one in arrays_of(texts).items()]
        return ways_in.post(ways_in.infer_path(version, model), {"inputs": inputs})

    def write_binary(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
        arrays = arrays_of(texts)
        heads = [_head(name, *one, parameters={"binary_data_size": one[1].nbytes}) for name, one in arrays.items()]
        text = json.dumps({"inputs": heads, "parameters": {"binary_data_output": True}}).encode()
        data = b"".join(one.tobytes() for _, one in arrays.values())
        return Sent(ways_in.infer_path(version, model), (OCTETS, f"{LENGTH}: {len(text)}"), text + data)

    def write_infer(method: str, raw: bool) -> Write:
        def write(texts: Sequence[str], version: str = "", model: str = "") -> Sent:
            asked = _INFER(model_name=model or MODEL, model_version=version, id=texts[0])
            for name, (datatype, array) in arrays_of(texts).items():
                tensor = asked.inputs.add(name=name, datatype=datatype, shape=array.shape)
                if raw:
                    asked.raw_input_contents.append(array.tobytes())
                else:
                    member = tensor.contents.uint_contents if name == CODES else tensor.contents.int64_contents
                    member.extend(array.ravel().tolist())
            return Sent(f"/{protos.OPEN_INFERENCE}/{method}", (), bytes(asked.SerializeToString()))

        return write

    one = ways_in.of_one
    native = one(f"native, {mark}", "/v1/inference", "input", value=value_of)
    api = one(f"api, {mark}", "/api/inference", "input", value=value_of)
    return (
        replace(native, version=ways_in.NATIVE.version),
        replace(api, versions=False, models=False),
        one(f"predict, {mark}", "/v1/predict", "input_data", "model_id", value=value_of, model_id=MODEL),
        ways_in.call(f"gRPC Predict, {mark}", lambda text: json.dumps(value_of(text)).encode(), json.loads),
        ways_in.several(f"several inputs, {mark}", value_of),
        replace(ways_in.OIP_JSON, name=f"OIP, JSON, {mark}", write=write_oip),
        replace(ways_in.OIP_BINARY, name=f"OIP, binary, {mark}", write=write_binary),
        replace(ways_in.INFER, name=f"gRPC ModelInfer, {mark}", write=write_infer("ModelInfer", raw=True)),
        replace(
            ways_in.STREAM, name=f"gRPC ModelStreamInfer, {mark}", write=write_infer("ModelStreamInfer", raw=False)
        ),
    )


def _head(name: str, datatype: str, array: Any, **members: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": array.shape, **members}


OCTET_STREAM = replace(
    ways_in.OCTET_STREAM, name="octet-stream, codes", outputs=lambda fields, body: [text_of_codes(body)], tasks=False
)
NUMBERS_IN = _ways("numbers", _value_of_both, _both)
"""APIs of a model that takes both."""
CODES_IN = (OCTET_STREAM, *_ways("codes", _value_of_codes, _codes))
"""APIs of a model that takes only the octets."""
LISTS = (NUMBERS_IN[-5], CODES_IN[-5])
"""APIs that take a list of inputs."""
ROWS_IN = (*NUMBERS_IN[-4:], *CODES_IN[-4:])
"""APIs in which several inputs are the rows of the tensors."""

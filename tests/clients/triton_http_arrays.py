"""What `tritonclient.http` asks of a server of arrays; its argument is the server's address."""

import json
import sys
from typing import Any

import ml_dtypes
import numpy as np
import tritonclient.http as triton  # type: ignore[import-not-found]
from tritonclient.utils import InferenceServerException  # type: ignore[import-not-found]

client = triton.InferenceServerClient(sys.argv[1], network_timeout=60.0)
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "INT8": np.int8,
    "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
}  # fmt: skip
BINARY_ALONE = ("FP16", "BF16")
"""Datatypes that the client sends and reads in binary alone."""


def given(name: str, datatype: str, array: Any, binary: bool) -> Any:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def arrays(rows: int, columns: int) -> dict[str, Any]:
    numbers = np.arange(rows * 2 * columns).reshape(rows, 2, columns)
    found = {name: (numbers % 100).astype(dtype) for name, dtype in DTYPES.items()}
    for name, dtype in DTYPES.items():
        if "INT" in name:
            found[name].flat[0], found[name].flat[1] = np.iinfo(dtype).min, np.iinfo(dtype).max
        elif name in ("FP32", "FP64"):
            found[name].flat[0] = -np.finfo(dtype).max
    found["BOOL"] = numbers % 3 == 0
    found["BYTES"] = np.array([f"é {number}".encode() for number in numbers.flat], dtype=object).reshape(numbers.shape)
    return found


def same(rows: int, columns: int, binary: bool, output: bool) -> list[str]:
    """Datatypes of which another array comes back than was sent."""
    sent = arrays(rows, columns)
    alone = {name: binary or name in BINARY_ALONE for name in sent}
    inputs = [given(f"in_{name}", name, array, alone[name]) for name, array in sent.items()]
    wanted = [
        triton.InferRequestedOutput(f"out_{name}", binary_data=output or name in BINARY_ALONE)
        for name in reversed(sent)
    ]
    answer = client.infer("same", inputs, outputs=wanted)
    return [name for name, array in sent.items() if not _equal(answer.as_numpy(f"out_{name}"), array)]


def _equal(found: Any, array: Any) -> bool:
    if found is None or found.shape != array.shape:
        return False
    if array.dtype == object:
        return [one if isinstance(one, bytes) else one.encode() for one in found.flat] == list(array.flat)
    return bool(found.astype(array.dtype).tobytes() == array.tobytes())


def sums(array: Any, binary: bool = True, **options: Any) -> Any:
    answer = client.infer("sums", [given("x", "FP32", array, binary)], **options)
    return [answer.as_numpy("sums").tolist(), answer.get_response().get("id")]


def rank(outputs: list[str] | None) -> list[str]:
    inputs = [
        given("query", "FP32", np.array([[1, 2]], np.float32), True),
        given("ids", "INT64", np.array([[3, 4, 5]]), False),
    ]
    wanted = None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs]
    return [one["name"] for one in client.infer("ranker", inputs, outputs=wanted).get_response()["outputs"]]


def refusal(call: Any) -> list[str]:
    try:
        call()
    except InferenceServerException as exc:
        return [exc.status(), exc.message()]
    raise AssertionError("no error")


FOUR = np.arange(8, dtype=np.float32).reshape(2, 4)
text = triton.InferInput("TEXT", [2], "BYTES")
text.set_data_from_numpy(np.array(["a", "bcd"], dtype=object))
json.dump(
    {
        "other": [
            same(*size, binary, output)
            for size in ((1, 1), (3, 4))
            for binary in (True, False)
            for output in (True, False)
        ],
        "sums": [sums(FOUR[:1], binary) for binary in (True, False)],
        "rows": sums(FOUR, request_id="7"),
        "any name": client.infer("sums", [given("y", "FP32", FOUR, True)]).as_numpy("sums").tolist(),
        "compressed": sums(FOUR, request_compression_algorithm="gzip"),
        "all": rank(None),
        "some": rank(["names"]),
        "embeddings": client.infer("embed", [text]).as_numpy("OUTPUT").tolist(),
        "model": client.get_model_metadata("ranker"),
        "config": client.get_model_config("ranker"),
        "refusals": {
            "datatype": refusal(lambda: client.infer("sums", [given("x", "FP64", FOUR.astype("f8"), True)])),
            "axis": refusal(lambda: sums(FOUR[:, :3])),
            "rank": refusal(lambda: sums(FOUR[0])),
            "rows": refusal(lambda: sums(np.zeros((1000, 4), np.float32))),
            "missing": refusal(lambda: client.infer("ranker", [given("query", "FP32", FOUR[:1, :2], True)])),
            "output": refusal(lambda: rank(["other"])),
        },
    },
    sys.stdout,
)

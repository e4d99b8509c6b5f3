"""NumPy arrays in requests and answers, in the binary form of the Open Inference Protocol. No I/O.

A body is a JSON object with the name, datatype and shape of each array, then the arrays' data, little-endian and row-major.
The header Inference-Header-Content-Length gives the length of the JSON. NumPy is imported only when needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from headway.client.errors import ApiError, InvalidInput
from headway.client.messages import (
    ODD,
    Answer,
    Request,
    Result,
    as_json,
    check_inputs,
    inference,
    json_parameters,
    read_result,
)

LENGTH = "Inference-Header-Content-Length"
INPUT = "INPUT"  # Name for an unnamed array. A model with a single input accepts any name.
_LENGTH_BYTES = 4
_OWN = ("priority", "timeout", "binary_data_output", "triton_enable_empty_final_response")

_DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2", "INT32": "<i4",
    "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
_DATATYPES = {dtype.lstrip("<"): name for name, dtype in _DTYPES.items()} | {"b1": "BOOL"}


def is_array(value: object) -> bool:
    """Return True for a NumPy array, or for an array of another library that NumPy can convert."""
    kind = type(value)  # NumPy scalars have no length.
    return hasattr(kind, "__array__") and hasattr(kind, "__len__") and not isinstance(value, str | bytes)


def holds_arrays(input: object) -> bool:
    """Return True if an input is an array, or a dict or list that contains an array."""
    if is_array(input):
        return True
    held = input.values() if isinstance(input, Mapping) else input if isinstance(input, list | tuple) else ()
    return any(map(is_array, held))


def several(inputs: Any) -> tuple[Iterable[Any], Callable[[Result], Result]]:
    """Return the inputs, and a function to apply to each result. If `inputs` is an array, each input is an array with one row
    of it, and the function takes the only row out of a result. Raises InvalidInput if `inputs` is not a collection."""
    if not is_array(inputs):
        return check_inputs(inputs), lambda result: result
    array = as_array("inputs", inputs)
    _check_rows("inputs", array)
    return [array[place : place + 1] for place in range(len(array))], _only_row


def _only_row(result: Result) -> Result:
    output = result.output
    row = {name: array[0] for name, array in output.items()} if isinstance(output, dict) else output[0]
    return msgspec.structs.replace(result, output=row)


def inference_of(
    input: Any, model: str | None, parameters: Mapping[str, Any] | None, key: str, outputs: Sequence[str] | None
) -> tuple[Request, Callable[[Answer], Result]]:
    """Return the request for one inference (arrays or JSON), and the function that reads its answer. Raises InvalidInput."""
    if holds_arrays(input):
        return array_inference(input, model, parameters, key, outputs), read_arrays
    if outputs is not None:
        kind = type(input).__name__
        raise InvalidInput(f"outputs = {outputs!r}: can only be given for arrays, but the input is of type {kind}.")
    return inference(input, model, parameters, key), read_result


def array_inference(
    input: Any, model: str | None, parameters: Mapping[str, Any] | None, key: str, outputs: Sequence[str] | None
) -> Request:
    """Build the request for one inference with an array, or with several arrays by name. Raises InvalidInput."""
    arrays = {name: as_array(label, value) for name, value, label in _named(input)}
    headers, data = [], []
    for name, array in arrays.items():
        datatype, content = _packed(f"input {name!r}", array)
        size = {"binary_data_size": len(content) if isinstance(content, bytes) else content.nbytes}
        headers.append({"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": size})
        data.append(content)
    own = json_parameters(parameters) if parameters is not None else {}
    if clashes := [name for name in own if name in _OWN]:
        reason = "the protocol for arrays reserves this name. Rename the parameter, or send input.tolist()."
        raise InvalidInput(f"parameters with `{clashes[0]}`: {reason}")
    body: dict[str, Any] = {"inputs": headers, "parameters": {**own, "binary_data_output": True}}
    if outputs is not None:
        if isinstance(outputs, str) or not outputs or not all(isinstance(name, str) for name in outputs):
            raise InvalidInput(f"outputs = {outputs!r}: must be a list of output names. For example ['scores'].")
        body["outputs"] = [{"name": name} for name in outputs]
    text = as_json(body)
    header = {"Content-Type": "application/octet-stream", LENGTH: str(len(text))}
    if key:
        header["Idempotency-Key"] = key
    path = f"/v2/models/{quote(model, safe='')}/infer" if model else "/v2/infer"
    return Request("POST", path, header, b"".join([text, *data]), timed=True)


def as_array(what: str, value: Any) -> Any:
    """Convert a value to a NumPy array, without copying if possible. Errors refer to it as `what`. Raises InvalidInput."""
    try:
        import numpy
    except ImportError:
        reason = "sending arrays needs numpy, which is not installed. Run pip install numpy, or send .tolist()."
        raise InvalidInput(f"{what} of type {type(value).__name__}: {reason}") from None
    try:
        return numpy.asarray(value)
    except Exception as exc:  # Libraries raise various errors, for example for a tensor on a GPU or with a gradient.
        raise InvalidInput(f"{what} of type {type(value).__name__}: numpy cannot convert it: {exc}") from None


def read_arrays(answer: Answer) -> Result:
    """Read the answer to `array_inference`. The output is a writable array, or a dict of arrays by name. Raises ApiError."""
    try:
        length = int(answer.header.get(LENGTH.lower()) or answer.header[LENGTH])
        parsed = _decode(answer.body[:length])
        arrays: dict[str, Any] = {}
        at = length
        for output in parsed.outputs:
            end = at + output.parameters.binary_data_size
            arrays[output.name] = _unpacked(output.datatype, output.shape, answer.body[at:end])
            at = end
        if at != len(answer.body) or not arrays:
            raise ValueError
    except (KeyError, ValueError, OverflowError, msgspec.DecodeError):
        raise ApiError(ODD, status=answer.status, hopeless=True) from None
    value = next(iter(arrays.values())) if len(arrays) == 1 else arrays
    id = answer.header.get("x-request-id", "")
    return Result(value, id, tokens_used=parsed.parameters.tokens_used, model_version=parsed.model_version)


class _DataSize(msgspec.Struct, gc=False):
    binary_data_size: int


class _Output(msgspec.Struct, gc=False):
    name: str
    datatype: str
    shape: list[int]
    parameters: _DataSize


class _Usage(msgspec.Struct, frozen=True, gc=False):
    tokens_used: int | None = None


class _Answer(msgspec.Struct, gc=False):
    outputs: list[_Output]
    model_version: str = ""
    parameters: _Usage = _Usage()


_decode = msgspec.json.Decoder(_Answer).decode


def _named(input: Any) -> list[tuple[str, Any, str]]:
    """Return the name of each array in an input, the array, and its label for error messages."""
    if is_array(input):
        return [(INPUT, input, "input")]
    if not isinstance(input, Mapping):
        hint = "Combine arrays of the same shape with numpy.stack, or call infer_many to send each as its own input."
        raise InvalidInput(f"input is a list with arrays, not an array. {hint}")
    for name, value in input.items():
        if not isinstance(name, str):
            raise InvalidInput(f"input with the key {name!r}: names of arrays must be strings, as in {{'x': array}}.")
        if not is_array(value):
            reason = "must be an array, because the input contains others. Convert it with numpy.asarray, with the right dtype."
            raise InvalidInput(f"input[{name!r}] of type {type(value).__name__}: {reason}")
    return [(name, value, f"input[{name!r}]") for name, value in input.items()]


def _check_rows(what: str, array: Any) -> None:
    if array.ndim == 0:
        hint = "The first axis must be the rows; send [value] for one row."
        raise InvalidInput(f"{what} has shape (), so it has no rows. {hint}")


def _packed(what: str, array: Any) -> tuple[str, bytes | memoryview]:
    """Return an array's datatype and data. The data are copied only if their memory layout differs. Raises InvalidInput."""
    import numpy

    _check_rows(what, array)
    kind = array.dtype.kind
    if kind in "OSU":
        return "BYTES", _elements(what, array)
    if array.dtype.name == "bfloat16":
        return "BF16", _octets(numpy.ascontiguousarray(array).view(numpy.uint16).astype("<u2", copy=False))
    datatype = _DATATYPES.get(f"{kind}{array.dtype.itemsize}")
    if datatype is None:
        hint = "Send bool, int8 to int64, uint8 to uint64, float16, float32, float64, strings or bytes."
        raise InvalidInput(f"{what} of dtype {array.dtype}: cannot be sent. {hint}")
    return datatype, _octets(numpy.ascontiguousarray(array, _DTYPES[datatype]))


def _octets(array: Any) -> bytes | memoryview:
    return memoryview(array.reshape(-1)).cast("B") if array.size else b""


def _elements(what: str, array: Any) -> bytes:
    """Encode an array of strings or bytes. Each element is preceded by its length."""
    pieces: list[bytes] = []
    for value in array.ravel().tolist():
        if not isinstance(value, str | bytes):
            raise InvalidInput(
                f"{what} of dtype {array.dtype} with a {type(value).__name__}: expected strings or bytes."
            )
        try:
            element = value.encode() if isinstance(value, str) else value
        except UnicodeEncodeError as exc:
            raise InvalidInput(f"{what}: is not valid Unicode: {exc}") from None
        pieces += (len(element).to_bytes(_LENGTH_BYTES, "little"), element)
    return b"".join(pieces)


def _unpacked(datatype: str, shape: Sequence[int], data: bytes) -> Any:
    """Decode the array of an output. Raises ValueError if the data don't fit the datatype and shape."""
    import numpy

    if datatype == "BYTES":
        return _texts(math.prod(shape), data).reshape(shape)
    if datatype == "BF16":
        return _brain_floats(numpy.frombuffer(data, "<u2")).reshape(shape)
    if datatype not in _DTYPES:
        raise ValueError(datatype)
    return numpy.frombuffer(data, _DTYPES[datatype]).reshape(shape).copy()


def _texts(count: int, data: bytes) -> Any:
    import numpy

    elements, at = [], 0
    while at < len(data):
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(data[at:begin], "little")
        elements.append(data[begin:at])
    if at != len(data) or len(elements) != count:
        raise ValueError("elements")
    array = numpy.empty(count, object)
    array[:] = elements
    return array


def _brain_floats(bits: Any) -> Any:
    """Return an array of bfloat16 if a library has registered this type with NumPy, or else the same values as float32."""
    import numpy

    try:
        return bits.copy().view(numpy.dtype("bfloat16"))
    except TypeError:
        return (bits.astype(numpy.uint32) << 16).view(numpy.float32)

"""Data of the inputs of a ModelInfer whose model takes tensors: typed, in `contents`, or raw, in `raw_input_contents`.

Raw data are in the binary form as they come. Of typed ones numbers of 32 and 64 bits with a fraction, and booleans, lie in the
message as they do in the binary form; integers are put into it one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from headway.core.tensor_json import PAGE
from headway.core.tensors import BYTES, SIZES, TensorHead, count_of, join_elements, quoted, shown_shape
from headway.errors import BadRequest, PayloadTooLarge
from headway.grpc import messages

Data = bytes | memoryview
"""Data of a tensor in the binary form."""

_CONTENTS = messages.message("inference.InferTensorContents").DESCRIPTOR.fields_by_name
_FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""Member of `contents` with the elements of each datatype. The protocol has none for FP16 and BF16."""
_AS_THEY_ARE = ("BOOL", "FP32", "FP64")
"""Datatypes whose elements lie in a message as they do in the binary form."""
_TYPECODES = {
    "BOOL": "B", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip


def data_of(inputs: Sequence[Any], raw: Sequence[Data], heads: Sequence[TensorHead], most: int) -> list[Data]:
    """Data of each input in the binary form.

    Arguments:
        inputs: inputs of the message.
        raw: its `raw_input_contents`.
        heads: heads of the inputs, which are checked.
        most: most bytes of the data of all inputs together. Raw data were bounded with their message.

    Raises:
        BadRequest: an input has no data, data in both forms, or other data than its datatype and shape say. Of raw data the
            size is not looked at.
        PayloadTooLarge: typed data would have more bytes than `most`.
    """
    if raw:
        return _raw(inputs, raw)
    size = sum(SIZES[head.datatype] * count_of(head.shape) for head in heads)
    if size > most:
        raise PayloadTooLarge(f"the data of the inputs take {size} bytes; at most {most} are taken (max_body_bytes)")
    return [_typed(one, head) for one, head in zip(inputs, heads, strict=True)]


def _raw(inputs: Sequence[Any], raw: Sequence[Data]) -> list[Data]:
    if len(raw) != len(inputs):
        raise BadRequest(
            f"`raw_input_contents` has {len(raw)} members, and the request has {len(inputs)} inputs; expected one for each input"
        )
    for one in inputs:
        if one.HasField("contents"):
            raise BadRequest(
                f"the input {quoted(one.name)} has `contents`, and the request has `raw_input_contents`; expected one of these forms "
                "for all inputs"
            )
    return list(raw)


def _typed(given: Any, head: TensorHead) -> Data:
    """Data of an input with `contents`. Raises BadRequest."""
    name, datatype, contents = quoted(given.name), head.datatype, given.contents
    member = _FIELDS.get(datatype)
    if member is None:
        raise BadRequest(
            f"the input {name} is {datatype}, for which the protocol has no `contents`; send its data in `raw_input_contents`"
        )
    for field, _ in contents.ListFields():
        if field.name != member:
            raise BadRequest(f"the input {name} has `{field.name}`; expected `{member}`, as its datatype is {datatype}")
    found, count = getattr(contents, member), count_of(head.shape)
    if len(found) != count:
        raise BadRequest(
            f"`{member}` of the input {name} has {len(found)} elements; {datatype} of shape {shown_shape(head.shape)} takes {count}"
        )
    if datatype == BYTES:
        return join_elements(found)
    if datatype in _AS_THEY_ARE and count:
        packed = contents.SerializeToString()
        size = SIZES[datatype] * count
        before = bytes((_CONTENTS[member].number << 3 | 2,)) + messages.varint(size)
        if packed.startswith(before):  # Members that are not known may come first.
            return memoryview(packed)[len(before) : len(before) + size]
    return _numbers(found, name, datatype)


def _numbers(found: Any, name: str, datatype: str) -> bytes:
    """Data of numbers, a page of which is looked at at a time: so it takes half as long as one by one. Raises BadRequest."""
    code, pages = _TYPECODES[datatype], list[bytes]()
    for begin in range(0, len(found), PAGE):
        page = found[begin : begin + PAGE]
        try:
            pages.append(array(code, page).tobytes())
        except OverflowError:
            bits = 8 * SIZES[datatype]
            least, most = (0, (1 << bits) - 1) if datatype[0] == "U" else (-(1 << bits - 1), (1 << bits - 1) - 1)
            place, wrong = next((at, one) for at, one in enumerate(page, begin) if not least <= one <= most)
            raise BadRequest(
                f"element {place} of the input {name} is {wrong}, which is out of the range of {datatype}"
            ) from None
    return b"".join(pages)

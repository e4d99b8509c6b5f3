"""Parts of both dialects of the Open Inference Protocol, version 2: the model's tensors, and outputs out of a tensor.

The inputs are the elements of one tensor of BYTES, in UTF-8. Outputs are

    BYTES            [n] or [n, 1]     an element for each input, a text in UTF-8
    a number's type  [n, …]            a row for each input: the JSON text of a number, or of a list of numbers
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import msgspec

from headway.core.excerpt import excerpt
from headway.core.values import octets
from headway.dialects import json_lists
from headway.dialects.dialect import BadMetadata, Dialect, NoOutputs, raw_members
from headway.model import ItemResult, Signature, Value, ValueKind
from headway.oip.metadata import TensorMetadata
from headway.oip.parameters import BINARY_OUTPUT, PRIORITY, TIMEOUT
from headway.oip.tensors import BYTES, INPUT, LENGTH_BYTES, OUTPUT, pack, split

_NEVER = frozenset((PRIORITY, TIMEOUT, BINARY_OUTPUT, "sequence_id", "sequence_start", "sequence_end"))
"""Parameters that are not sent: those by which the server orders its requests, and the form of the answer."""

NUMBERS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
"""Datatypes of numbers that are read, with the format of each."""

MOST_DIMENSIONS = 8
"""Most dimensions of an output."""


class TensorDialect(Dialect, frozen=True):
    """Base of both dialects.

    Attributes:
        input: name of the input.
        column: whether its shape is [n, 1]; else [n].
        output: name of the output; empty: whatever the only one is called.
        datatype: datatype of the output.
    """

    shared_parameters: ClassVar[bool] = True
    input: str = INPUT
    column: bool = False
    output: str = ""
    datatype: str = BYTES

    @property
    def signature(self) -> Signature:
        """Texts in; texts or JSON values out, as the output's datatype says."""
        return Signature(gives=ValueKind.TEXT if self.datatype == BYTES else ValueKind.JSON)

    def shape(self, count: int) -> list[int]:
        """Shape of an input of so many elements."""
        return [count, 1] if self.column else [count]

    def knowing(self, inputs: Sequence[TensorMetadata], outputs: Sequence[TensorMetadata]) -> Self:
        """Dialect that goes by the tensors of the model's metadata. Where it names none, nothing is known.

        Raises:
            BadMetadata: the model takes or gives something else than can be sent and read.
        """
        found: dict[str, Any] = {}
        if inputs:
            found |= _known_input(inputs)
        if outputs:
            found |= _known_output(outputs)
        return msgspec.structs.replace(self, **found)

    def check_output(self, name: str, datatype: str, shape: Sequence[int], expected: int) -> None:
        """Check what an answer says of its output.

        Raises:
            NoOutputs: it is another one, of another datatype, or not one row for each input.
        """
        if self.output and name != self.output:
            raise NoOutputs("an output of another name than the model's metadata has")
        if datatype != self.datatype:
            raise NoOutputs(f"an output of another datatype than {self.datatype}")
        if not 0 < len(shape) <= MOST_DIMENSIONS or any(size < 0 for size in shape):
            raise NoOutputs("an output of a shape that cannot be")
        if shape[0] != expected:
            raise NoOutputs(f"{shape[0]} outputs for {expected} inputs")
        if datatype == BYTES and list(shape) not in ([expected], [expected, 1]):
            raise NoOutputs(f"an output of {len(shape)} dimensions, expected [n] or [n, 1]")
        if expected and not math.prod(shape):
            raise NoOutputs("an output with an empty dimension")


def packed(inputs: Sequence[Value]) -> bytes:
    """Inputs as the elements of a tensor, in the binary form."""
    return pack([value.encode() if isinstance(value, str) else octets(value) for value in inputs])


def sent_parameters(parameters: Sequence[bytes]) -> dict[str, Any]:
    """Parameters of a request that are sent, each as its own JSON text."""
    members = raw_members(next(iter(parameters), b""))
    return {name: raw for name, raw in members.items() if name not in _NEVER}


def binary_items(datatype: str, shape: Sequence[int], octets: memoryview) -> list[ItemResult]:
    """Items of an output in the binary form, whose shape was checked.

    Raises:
        NoOutputs: the octets are another number of elements than the shape says.
    """
    if datatype == BYTES:
        return element_items(_elements(octets, shape[0]))
    code = NUMBERS[datatype]
    size = math.prod(shape) * struct.calcsize(f"<{code}")
    if len(octets) != size:
        raise NoOutputs(f"{len(octets)} bytes of numbers, and its shape says another number")
    row = struct.Struct(f"<{math.prod(shape[1:])}{code}")
    return [_row_item(numbers, shape[1:]) for numbers in row.iter_unpack(octets)]


def element_items(elements: Iterable[bytes]) -> list[ItemResult]:
    """Items of elements of BYTES."""
    return [_text_item(element) for element in elements]


def number_items(numbers: Sequence[Any], shape: Sequence[int]) -> list[ItemResult]:
    """Items of the numbers of an output in a row, whose shape was checked.

    Raises:
        NoOutputs: there are more or fewer than the shape says.
    """
    width = math.prod(shape[1:])
    if len(numbers) != shape[0] * width:
        raise NoOutputs(f"{len(numbers)} numbers, and its shape says another number")
    return [_row_item(numbers[begin : begin + width], shape[1:]) for begin in range(0, len(numbers), width)]


def _elements(octets: memoryview, count: int) -> list[bytes]:
    found, end = split(octets, count)
    left = len(octets) - end
    if len(found) < count:
        within = "binary data that ends within an output"
        raise NoOutputs(within if left >= LENGTH_BYTES else f"{len(found)} outputs for {count} inputs")
    if left:
        raise NoOutputs(f"{left} bytes of binary data more than {count} outputs")
    return found


def _text_item(element: bytes) -> ItemResult:
    try:
        return ItemResult(element.decode())
    except UnicodeDecodeError:
        return json_lists.fault("octets that are no UTF-8", "a text")


def _row_item(numbers: Sequence[Any], shape: Sequence[int]) -> ItemResult:
    if not all(map(math.isfinite, numbers)):
        return json_lists.fault("a number that is not finite", "numbers that JSON has")
    value: Any = list(numbers)
    for size in shape[:0:-1]:
        value = [value[begin : begin + size] for begin in range(0, len(value), size)]
    return ItemResult(msgspec.json.encode(value if shape else value[0]))


def _known_input(inputs: Sequence[TensorMetadata]) -> dict[str, Any]:
    if len(inputs) > 1:
        raise BadMetadata(f"the remote model takes {len(inputs)} inputs ({_names(inputs)}). {_ONE_INPUT}")
    [tensor] = inputs
    if tensor.datatype != BYTES:
        raise BadMetadata(
            f"the input {_quoted(tensor.name)} of the remote model has the datatype {_quoted(tensor.datatype)}. "
            f"{_ONE_INPUT}"
        )
    shape = tensor.shape
    if not (len(shape) in (1, 2) and shape[0] < 0 and (len(shape) == 1 or shape[1] in (-1, 1))):
        raise BadMetadata(
            f"the input {_quoted(tensor.name)} of the remote model has the shape {list(shape[:MOST_DIMENSIONS])}, "
            "which has no place for a batch of texts. Serve it there with the shape [-1] or [-1, 1]."
        )
    return {"input": tensor.name, "column": len(shape) == 2}


def _known_output(outputs: Sequence[TensorMetadata]) -> dict[str, Any]:
    readable = [one for one in outputs if one.datatype == BYTES or one.datatype in NUMBERS]
    named = [one for one in readable if one.name == OUTPUT]
    if len(readable) != 1 and len(named) != 1:
        raise BadMetadata(
            f"the remote model gives {len(outputs)} outputs ({_names(outputs)}), of which {len(readable)} can be "
            f"read, and one is needed. Serve it there with one output of {BYTES} or numbers, or call one of them {OUTPUT}."
        )
    tensor = (readable if len(readable) == 1 else named)[0]
    return {"output": tensor.name, "datatype": tensor.datatype}


_ONE_INPUT = f"Serve it there with one input, of {BYTES}, or call it from a target in Python."


def _names(tensors: Sequence[TensorMetadata]) -> str:
    more = ", …" if len(tensors) > MOST_DIMENSIONS else ""
    return ", ".join(_quoted(one.name) for one in tensors[:MOST_DIMENSIONS]) + more


def _quoted(name: str) -> str:
    return f"`{excerpt(name)}`"

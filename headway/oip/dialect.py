"""Base class of both dialects of the Open Inference Protocol. It sends tensors, and splits an answer into results.

    the model takes     one tensor of BYTES, [-1] or [-1, 1]    texts: the elements, in UTF-8
                        any other tensors                       tensors: the rows of all entries, concatenated
    the model returns   one tensor of BYTES, [-1] or [-1, 1]    texts, if the model takes texts
                        any other tensors                       tensors: each entry gets its rows

Numbers are passed through unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self

import msgspec

from headway.core.tensor_json import widened
from headway.core.tensors import (
    BYTES,
    JSON,
    MOST_AXES,
    MOST_TENSORS,
    SIZES,
    NoTensors,
    Tensor,
    TensorHead,
    count_of,
    join_elements,
    quoted,
    shown_shape,
    split_elements,
    unpack,
)
from headway.core.tensors import pack as packed_tensors
from headway.core.values import octets
from headway.dialects.dialect import BadMetadata, Dialect, NoOutputs, fault, raw_members
from headway.model import WARM_UP, ItemResult, Octets, Signature, Tensors, TensorSpec, Value, ValueKind
from headway.oip.metadata import TensorMetadata
from headway.oip.parameters import BINARY_OUTPUT, PRIORITY, TIMEOUT
from headway.oip.tensors import INPUT, LENGTH_BYTES, OUTPUT, pack, split

_NEVER = frozenset((PRIORITY, TIMEOUT, BINARY_OUTPUT, "sequence_id", "sequence_start", "sequence_end"))
"""Parameters that are never sent, because they are about the remote server's scheduling or the form of the answer."""

_LARGEST_EXAMPLE = 16 << 20


class Sent(NamedTuple):
    """A tensor of a request. The data are views of the inputs."""

    head: TensorHead
    data: Sequence[bytes | memoryview]

    @property
    def size(self) -> int:
        return sum(map(len, self.data))


class TensorDialect(Dialect, frozen=True):
    """Base class of both dialects. `input` and `output` are the names of the text tensors. If `output` is empty, the answer's
    only output is used, whatever its name. If `column`, texts have the shape [n, 1], not [n]. `inputs` and `outputs` describe
    the model's tensors; they are empty for text models, and while unknown."""

    shared_parameters: ClassVar[bool] = True
    input: str = INPUT
    column: bool = False
    output: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    @property
    def signature(self) -> Signature:
        takes, gives = (
            ValueKind.TENSORS if tensors else ValueKind.TEXT for tensors in (self.inputs, self._gives_tensors)
        )
        return Signature(takes, gives, _example(self.inputs), inputs=self.inputs, outputs=self.outputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs to request, or empty for all."""
        return tuple(spec.name for spec in self.outputs) or ((self.output,) if self.output else ())

    @property
    def _gives_tensors(self) -> bool:
        return bool(self.inputs or self.outputs)

    def adapted(self, inputs: Sequence[TensorMetadata], outputs: Sequence[TensorMetadata]) -> Self:
        """Return a copy adapted to the tensors in the model's metadata. Raises BadMetadata if that is impossible."""
        changes: dict[str, Any] = {}
        if inputs:
            changes |= _known_inputs(inputs)
        if outputs:
            changes |= _known_outputs(outputs, takes_texts="inputs" not in changes)
        return msgspec.structs.replace(self, **changes)

    def sent(self, inputs: Sequence[Value]) -> list[Sent]:
        """Return the tensors of a request. Each concatenates the rows of all inputs."""
        if not self.inputs:
            shape = (len(inputs), 1) if self.column else (len(inputs),)
            return [Sent(TensorHead(self.input, BYTES, shape), [packed(inputs)])]
        by_name = [_named(value, self.inputs) for value in inputs if isinstance(value, Octets)]
        sent: list[Sent] = []
        for spec in self.inputs:
            parts = [tensors[spec.name] for tensors in by_name]
            rows = sum(part.head.shape[0] for part in parts)
            head = TensorHead(spec.name, spec.datatype, (rows, *parts[0].head.shape[1:]))
            sent.append(Sent(head, [widened(part, spec.datatype) for part in parts]))
        return sent

    def check_outputs(self, heads: Sequence[TensorHead], expected: int, rows: Sequence[int]) -> list[int]:
        """Check the heads of an answer's outputs. Return the positions of the outputs to use, in order. Raises NoOutputs if an
        output is missing, contradicts the metadata, or has a different number of rows from the inputs."""
        if not self._gives_tensors:
            self._check_texts(heads[0], expected)
            return [0]
        count = sum(size or 1 for size in rows) if rows else expected
        places = [_place(heads, spec.name) for spec in self.outputs] or list(range(len(heads)))
        for at, place in enumerate(places):
            head = heads[place]
            _check_shape(head.shape)
            if head.shape[0] != count:
                unit = f"outputs for {expected} inputs" if count == expected else f"rows for {count} rows"
                raise NoOutputs(f"{head.shape[0]} {unit}")
            if self.outputs:
                _check_spec(head, self.outputs[at])
            elif not _readable(head.datatype):
                raise NoOutputs(f"an output of a datatype other than {_READABLE}")
        return places

    def results(self, tensors: Sequence[Tensor], expected: int, rows: Sequence[int]) -> list[ItemResult]:
        """Split checked outputs into a result for each input. For `rows` see `decode`. Raises NoOutputs for corrupt data."""
        if not self._gives_tensors:
            return element_items(_elements(memoryview(tensors[0].data), expected))
        for head, data in tensors:
            if head.datatype != BYTES and len(data) != (size := SIZES[head.datatype] * count_of(head.shape)):
                raise NoOutputs(f"{len(data)} bytes of data, but its shape requires {size}")
        cuts = [_cut(tensor, rows or (0,) * expected) for tensor in tensors]
        singles = [not size for size in rows] if rows else [True] * expected
        return [
            ItemResult(packed_tensors(parts, single=single))
            for single, parts in zip(singles, zip(*cuts, strict=True), strict=True)
        ]

    def _check_texts(self, head: TensorHead, expected: int) -> None:
        if self.output and head.name != self.output:
            raise NoOutputs("an output whose name is not in the model's metadata")
        if head.datatype != BYTES:
            raise NoOutputs(f"an output of a datatype other than {BYTES}")
        _check_shape(head.shape)
        if head.shape[0] != expected:
            raise NoOutputs(f"{head.shape[0]} outputs for {expected} inputs")
        if head.shape not in ((expected,), (expected, 1)):
            raise NoOutputs(f"an output of {len(head.shape)} dimensions, expected [n] or [n, 1]")


def packed(inputs: Sequence[Value]) -> bytes:
    """Pack inputs as the elements of a BYTES tensor."""
    return pack([value.encode() if isinstance(value, str) else octets(value) for value in inputs])


def sent_parameters(parameters: Sequence[bytes]) -> dict[str, Any]:
    """Return the parameters to send, still undecoded."""
    members = raw_members(next(iter(parameters), b""))
    return {name: raw for name, raw in members.items() if name not in _NEVER}


def element_items(elements: Iterable[bytes]) -> list[ItemResult]:
    """Decode BYTES elements as text."""
    return [_text_item(element) for element in elements]


def _named(value: Octets, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Return an input's tensors by name. If a model has only one input, any name is accepted for it."""
    tensors = unpack(value)
    return {specs[0].name: tensors[0]} if len(specs) == 1 else {tensor.head.name: tensor for tensor in tensors}


def _place(heads: Sequence[TensorHead], name: str) -> int:
    places = [place for place, head in enumerate(heads) if head.name == name]
    if len(places) > 1:
        raise NoOutputs("the same output twice")
    if not places:
        raise NoOutputs(
            "an output whose name is not in the model's metadata"
            if len(heads) == 1
            else f"no output {quoted(name)}, which is in the model's metadata"
        )
    return places[0]


def _check_shape(shape: Sequence[int]) -> None:
    if not 0 < len(shape) <= MOST_AXES or any(size < 0 for size in shape):
        raise NoOutputs("an output of an impossible shape")


def _check_spec(head: TensorHead, spec: TensorSpec) -> None:
    if head.datatype != spec.datatype:
        raise NoOutputs(f"an output of a datatype other than {spec.datatype}")
    row = head.shape[1:]
    if len(row) != len(spec.shape) or any(want not in (-1, got) for want, got in zip(spec.shape, row, strict=True)):
        raise NoOutputs(
            f"an output of shape {shown_shape(head.shape)}; the metadata says {shown_shape((-1, *spec.shape))}"
        )


def _cut(tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Split a tensor into parts. `rows` has the number of rows of each part; 0 counts as 1."""
    head, data, elements = tensor.head, memoryview(tensor.data), list[bytes]()
    if head.datatype == BYTES:
        try:
            elements = split_elements(data)
        except NoTensors:
            raise NoOutputs("binary data that ends in the middle of an output") from None
        if len(elements) != count_of(head.shape):
            raise NoOutputs(f"{len(elements)} elements, but its shape requires {count_of(head.shape)}")
    parts, begin = list[Tensor](), 0
    for count in (size or 1 for size in rows):
        end = begin + count * count_of(head.shape[1:]) * (SIZES[head.datatype] or 1)
        part = join_elements(elements[begin:end]) if head.datatype == BYTES else data[begin:end]
        parts.append(Tensor(TensorHead(head.name, head.datatype, (count, *head.shape[1:])), part))
        begin = end
    return parts


def _elements(octets: memoryview, count: int) -> list[bytes]:
    elements, end = split(octets, count)
    left = len(octets) - end
    if len(elements) < count:
        within = "binary data that ends in the middle of an output"
        raise NoOutputs(within if left >= LENGTH_BYTES else f"{len(elements)} outputs for {count} inputs")
    if left:
        raise NoOutputs(f"{left} bytes of binary data more than {count} outputs")
    return elements


def _text_item(element: bytes) -> ItemResult:
    try:
        return ItemResult(element.decode())
    except UnicodeDecodeError:
        return fault("bytes that are not UTF-8", "a string")


@lru_cache(maxsize=16)
def _example(specs: tuple[TensorSpec, ...]) -> Tensors | None:
    """Return a row of zeros for each input, or None if that is large, or an axis has no fixed size (some sizes may fail)."""
    if not specs or any(size < 0 for spec in specs for size in spec.shape):
        return None
    if sum(count_of(spec.shape) * (SIZES[spec.datatype] or len(WARM_UP)) for spec in specs) > _LARGEST_EXAMPLE:
        return None
    return packed_tensors([_zeros(spec) for spec in specs])


def _zeros(spec: TensorSpec) -> Tensor:
    count, size = count_of(spec.shape), SIZES[spec.datatype]
    data = bytes(count * size) if size else join_elements([WARM_UP.encode()] * count)
    return Tensor(TensorHead(spec.name, spec.datatype, (1, *spec.shape)), data)


_READABLE = ", ".join(datatype for datatype in SIZES if datatype != JSON)


def _readable(datatype: str) -> bool:
    return datatype in SIZES and datatype != JSON


def _known_inputs(inputs: Sequence[TensorMetadata]) -> dict[str, Any]:
    first = inputs[0]
    if len(inputs) == 1 and first.datatype == BYTES and first.shape and first.shape[0] < 0 and _is_column(first.shape):
        return {"input": first.name, "column": len(first.shape) == 2}
    if len(inputs) > MOST_TENSORS:
        raise BadMetadata(f"the remote model takes {len(inputs)} inputs; at most {MOST_TENSORS} can be sent.")
    for tensor in inputs:
        if not _readable(tensor.datatype):
            raise BadMetadata(
                f"the input {quoted(tensor.name)} of the remote model has the datatype {quoted(tensor.datatype)}, which cannot be "
                f"sent. Serve it there with one of {_READABLE}."
            )
        if not 0 < len(tensor.shape) <= MOST_AXES or tensor.shape[0] >= 0 or math.prod(tensor.shape[1:]) >= 1 << 40:
            raise BadMetadata(
                f"the input {quoted(tensor.name)} of the remote model has the shape {shown_shape(tensor.shape)}, "
                "which has no axis for the batch. Serve it there with -1 as its first axis."
            )
    return {"inputs": _specs(inputs)}


def _known_outputs(outputs: Sequence[TensorMetadata], *, takes_texts: bool) -> dict[str, Any]:
    readable = [tensor for tensor in outputs if _readable(tensor.datatype)]
    if not readable:
        names = ", ".join(quoted(tensor.name) for tensor in outputs[:8]) + (", …" if len(outputs) > 8 else "")
        raise BadMetadata(
            f"the remote model returns {len(outputs)} outputs ({names}), none of which can be read. Serve it there with "
            f"one of {_READABLE}."
        )
    named = [tensor for tensor in readable if tensor.name == OUTPUT]
    if takes_texts and len(named) == 1:
        readable = named
    if takes_texts and len(readable) == 1 and readable[0].datatype == BYTES and _is_column(readable[0].shape):
        return {"output": readable[0].name}
    return {"outputs": _specs(readable[:MOST_TENSORS])}


def _is_column(shape: Sequence[int]) -> bool:
    return len(shape) < 2 or (len(shape) == 2 and shape[1] in (-1, 1))


def _specs(tensors: Sequence[TensorMetadata]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(tensor.name, tensor.datatype, tuple(max(size, -1) for size in tensor.shape[1:]))
        for tensor in tensors
    )

"""Outputs of models that give tensors: concatenated along their rows, and reduced to those that a request asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeGuard

from headway.core import failures, tensor_json
from headway.core.tensors import (
    ALIGNED,
    BYTES,
    JSON,
    SIZES,
    NoTensors,
    Tensor,
    TensorHead,
    count_of,
    header_of,
    quoted,
    shown_heads,
    unpack,
)
from headway.errors import BACKEND_ERROR, BadRequest, RequestError
from headway.model import Octets, Tensors, TensorSpec, Value

_MOST_SHOWN = 8


class WantedOutput(NamedTuple):
    """Requested output, `binary` if in the binary form."""

    name: str
    binary: bool


class OutputTensor(NamedTuple):
    """Tensor of an answer: its head as clients see it, its data in binary, in pieces of whole rows, and whether to send them so."""

    head: TensorHead
    parts: Sequence[bytes | memoryview]
    binary: bool

    @property
    def size(self) -> int:
        """Number of data bytes in the binary form."""
        return sum(map(len, self.parts))

    def json_pieces(self) -> Iterator[bytes]:
        """Yield the data as one flat JSON array. Raises RequestError for NaN, an infinity, or octets that are not UTF-8."""
        begin = b"["
        try:
            for part in self.parts:
                separator = begin
                for piece in tensor_json.flat(Tensor(self.head, part)):
                    if inner := piece.strip(b"[]"):
                        yield separator + inner
                        separator, begin = b"", b","
        except NoTensors as exc:
            raise failures.no_json(exc, ", with `binary_data`") from None
        yield b"]" if begin == b"," else b"[]"


def check_names(names: Sequence[str], known: Iterable[str]) -> None:
    """Check the names of the requested outputs. `known` is empty while the model's outputs are not known. Raises BadRequest if an
    output is named twice or doesn't exist."""
    known = list(known)
    for name in names:
        if known and name not in known:
            shown = ", ".join(map(quoted, known[:_MOST_SHOWN])) + (", …" if len(known) > _MOST_SHOWN else "")
            raise BadRequest(f"there is no output {quoted(name)}; the model gives {shown}")
        if (count := names.count(name)) > 1:
            raise BadRequest(f"the output {quoted(name)} is asked for {count} times; name it once")


def names_of(specs: Iterable[TensorSpec]) -> list[str]:
    """Return the names of inputs or outputs."""
    return [spec.name for spec in specs]


def are_tensors(outputs: Sequence[Value]) -> TypeGuard[Sequence[Tensors]]:
    """Return True if all outputs of a request are tensors, so that they can be concatenated."""
    return all(isinstance(output, Tensors) for output in outputs)


def answer_tensors(outputs: Sequence[Tensors], wanted: Sequence[WantedOutput], *, binary: bool) -> list[OutputTensor]:
    """Concatenate the outputs of all inputs (at least one) along their rows.

    Return the `wanted` outputs in that order, or all if none are named; these are in the binary form if `binary`. Raises
    BadRequest if a wanted output doesn't exist or outputs differ in more than their rows, and RequestError if one is damaged."""
    try:
        values = list(map(unpack, outputs))
    except NoTensors as exc:
        raise RequestError(f"the model's output is damaged: {exc}", code=BACKEND_ERROR) from None
    first = [tensor.head for tensor in values[0]]
    for other in values[1:]:
        heads = [tensor.head for tensor in other]
        if list(map(_row, heads)) != list(map(_row, first)):
            raise BadRequest(
                f"the outputs differ in shape or datatype: {shown_heads(first)} and {shown_heads(heads)}; ask for each by itself"
            )
    tensors = [
        OutputTensor(_joined_head(head, values, place), [value[place].data for value in values], binary)
        for place, head in enumerate(first)
    ]
    if not wanted:
        return tensors
    by_name = {tensor.head.name: tensor for tensor in tensors}
    check_names([output.name for output in wanted], by_name)
    return [OutputTensor(by_name[name].head, by_name[name].parts, form) for name, form in wanted]


class OutputForm(NamedTuple):
    """Everything in an answer but its data, for all outputs with one header: the tensors without their data, the places of their
    data in the output's value, and the length of that value in bytes."""

    tensors: Sequence[OutputTensor]
    places: Sequence[slice]
    length: int


def form_of_output(
    opening: bytes, wanted: Sequence[WantedOutput], *, binary: bool, max_bytes: int
) -> OutputForm | None:
    """Return the form of answers with one output, or None if it holds texts, no elements, or more than `max_bytes` bytes of data.
    `opening` is the output's value up to its data. For errors see `answer_tensors`."""
    heads = header_of(Octets(opening)).heads if opening else ()
    sizes = [SIZES.get(head.datatype, 0) * count_of(head.shape) for head in heads]
    if not heads or min(sizes) <= 0 or sum(sizes) > max_bytes:
        return None
    places, end = {}, len(opening)
    for head, size in zip(heads, sizes, strict=True):
        places[head.name] = slice(end, end + size)
        end += size + -size % ALIGNED
    tensors = answer_tensors([Tensors(opening + bytes(end - len(opening)))], wanted, binary=binary)
    return OutputForm(tensors, [places[tensor.head.name] for tensor in tensors], end)


def _joined_head(head: TensorHead, values: Sequence[Sequence[Tensor]], place: int) -> TensorHead:
    """Return the head that clients see of the tensor at `place`, joined over all values."""
    if len(values) == 1 and head.datatype != JSON:
        return head
    rows = sum(value[place].head.shape[0] for value in values)
    return TensorHead(head.name, BYTES if head.datatype == JSON else head.datatype, (rows, *head.shape[1:]))


def _row(head: TensorHead) -> tuple[str, str, tuple[int, ...]]:
    return head.name, head.datatype, head.shape[1:]

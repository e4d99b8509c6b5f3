"""Outputs of a model that gives tensors, as the answer to a request tells them: joined along the rows, and only those asked for."""

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
    """Output that a request asks for.

    Attributes:
        name: its name.
        binary: whether it comes in the binary form.
    """

    name: str
    binary: bool


class OutputTensor(NamedTuple):
    """Tensor of an answer.

    Attributes:
        head: its name, datatype and shape, as clients are told them.
        parts: its data in the binary form, in pieces that are whole rows.
        binary: whether it is asked for in the binary form.
    """

    head: TensorHead
    parts: Sequence[bytes | memoryview]
    binary: bool

    @property
    def size(self) -> int:
        """Bytes of its data in the binary form."""
        return sum(map(len, self.parts))

    def json_pieces(self) -> Iterator[bytes]:
        """Pieces of its data as one flat array in JSON.

        Raises:
            RequestError: they hold NaN, an infinity or octets that are no UTF-8, none of which JSON has.
        """
        opening = b"["
        try:
            for part in self.parts:
                between = opening
                for piece in tensor_json.flat(Tensor(self.head, part)):
                    if inner := piece.strip(b"[]"):
                        yield between + inner
                        between, opening = b"", b","
        except NoTensors as exc:
            raise failures.no_json(exc, ", with `binary_data`") from None
        yield b"]" if opening == b"," else b"[]"


def check_names(names: Sequence[str], known: Iterable[str]) -> None:
    """Check the names of the outputs that a request asks for; none: all that there are.

    Arguments:
        names: the names.
        known: names of the model's outputs; empty while they are not known.

    Raises:
        BadRequest: an output is named twice, or there is none of its name.
    """
    known = list(known)
    for name in names:
        if known and name not in known:
            shown = ", ".join(map(quoted, known[:_MOST_SHOWN])) + (", …" if len(known) > _MOST_SHOWN else "")
            raise BadRequest(f"there is no output {quoted(name)}; the model gives {shown}")
        if (count := names.count(name)) > 1:
            raise BadRequest(f"the output {quoted(name)} is asked for {count} times; name it once")


def names_of(specs: Iterable[TensorSpec]) -> list[str]:
    """Names of inputs or outputs."""
    return [one.name for one in specs]


def are_tensors(outputs: Sequence[Value]) -> TypeGuard[Sequence[Tensors]]:
    """Whether all outputs of a request are tensors, so that they can be joined."""
    return all(isinstance(one, Tensors) for one in outputs)


def told(outputs: Sequence[Tensors], wanted: Sequence[WantedOutput], *, binary: bool) -> list[OutputTensor]:
    """Tensors of an answer: those of all outputs, one after the other along the axis of the rows.

    Arguments:
        outputs: output of each input, in order; at least one.
        wanted: outputs that are asked for, in the order in which they are told; none: all.
        binary: whether outputs that are not named come in the binary form.

    Raises:
        BadRequest: there is no output that is asked for, or the outputs of several inputs differ in more than their rows.
        RequestError: an output is damaged.
    """
    try:
        values = list(map(unpack, outputs))
    except NoTensors as exc:
        raise RequestError(f"the model's output is damaged: {exc}", code=BACKEND_ERROR) from None
    first = [one.head for one in values[0]]
    for other in values[1:]:
        heads = [one.head for one in other]
        if list(map(_row, heads)) != list(map(_row, first)):
            raise BadRequest(
                f"the outputs differ in shape or datatype: {shown_heads(first)} and {shown_heads(heads)}; ask for each by itself"
            )
    found = [
        OutputTensor(_told(head, values, place), [value[place].data for value in values], binary)
        for place, head in enumerate(first)
    ]
    if not wanted:
        return found
    named = {one.head.name: one for one in found}
    check_names([one.name for one in wanted], named)
    return [OutputTensor(named[name].head, named[name].parts, each) for name, each in wanted]


class OutputForm(NamedTuple):
    """Form of an answer with one output: all that its header says.

    Attributes:
        tensors: tensors of the answer, without their data.
        places: places of the data in the output's value, in their order.
        length: bytes of that value.
    """

    tensors: Sequence[OutputTensor]
    places: Sequence[slice]
    length: int


def form_of_output(opening: bytes, wanted: Sequence[WantedOutput], *, binary: bool, most: int) -> OutputForm | None:
    """Form of answers with one output; None where it has texts, no elements, or more bytes of data than `most`.

    Arguments:
        opening: bytes of the output's value before its data.
        wanted: outputs that are asked for; see `told`.
        binary: whether the others come in the binary form.
        most: see above.

    Raises:
        RequestError: see `told`.
    """
    heads = header_of(Octets(opening)).heads if opening else ()
    sizes = [SIZES.get(head.datatype, 0) * count_of(head.shape) for head in heads]
    if not heads or min(sizes) <= 0 or sum(sizes) > most:
        return None
    places, end = {}, len(opening)
    for head, size in zip(heads, sizes, strict=True):
        places[head.name] = slice(end, end + size)
        end += size + -size % ALIGNED
    tensors = told([Tensors(opening + bytes(end - len(opening)))], wanted, binary=binary)
    return OutputForm(tensors, [places[one.head.name] for one in tensors], end)


def _told(head: TensorHead, values: Sequence[Sequence[Tensor]], place: int) -> TensorHead:
    """Head of the tensor at a place of all values together, as clients are told it."""
    if len(values) == 1 and head.datatype != JSON:
        return head
    rows = sum(value[place].head.shape[0] for value in values)
    return TensorHead(head.name, BYTES if head.datatype == JSON else head.datatype, (rows, *head.shape[1:]))


def _row(head: TensorHead) -> tuple[str, str, tuple[int, ...]]:
    return head.name, head.datatype, head.shape[1:]

"""Input tensors: check and pack them. Output tensors: join and select them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeGuard

from headway.core import failures, tensor_json
from headway.core.json_pages import Steps
from headway.core.tensors import (
    ALIGNED,
    BYTES,
    JSON,
    SIZES,
    NoTensors,
    Tensor,
    TensorHead,
    check_data,
    check_heads,
    count_of,
    header_of,
    join_elements,
    length_of_elements,
    pack,
    quoted,
    shown_heads,
    shown_spec,
    shown_specs,
    unpack,
)
from headway.errors import BACKEND_ERROR, BadRequest, PayloadTooLarge, RequestError
from headway.model import Octets, Tensors, TensorSpec, Value
from headway.oip.tensors import unpack as unpack_elements

_AT_ONCE = 1 << 12


def checked_heads(heads: Sequence[TensorHead], specs: Sequence[TensorSpec], max_rows: int) -> tuple[TensorHead, ...]:
    """Check the heads of a request's inputs. Return them in the request's order, under the model's names. `specs` is empty while the
    model's inputs are unknown. Raises BadRequest if the model doesn't take the inputs, and PayloadTooLarge above `max_rows` rows."""
    try:
        checked = check_heads(heads, specs)
    except NoTensors as exc:
        raise BadRequest(str(exc)) from None
    if (rows := checked[0].shape[0]) > max_rows:
        raise PayloadTooLarge(
            f"the input {quoted(heads[0].name)} has {rows} rows; at most {max_rows} are allowed in one request (max_batch_size)"
        )
    return checked


def value_of(heads: Sequence[TensorHead], data: Sequence[bytes | memoryview]) -> Tensors:
    """Pack checked inputs into a value. This copies their data once. Raises BadRequest if data don't match their shape."""
    tensors = []
    for head, octets in zip(heads, data, strict=True):
        check_size(head, octets)
        tensors.append(Tensor(head, octets))
    return pack(tensors)


def value_in_steps(heads: Sequence[TensorHead], data: Sequence[bytes | memoryview]) -> Steps[Tensors]:
    """Pack inputs that may have many BYTES elements, in steps; see `value_of`."""
    tensors = []
    for head, octets in zip(heads, data, strict=True):
        if head.datatype == BYTES:
            yield from _check_elements(head, memoryview(octets))
        else:
            check_size(head, octets)
        tensors.append(Tensor(head, octets))
    return pack(tensors)


def _check_elements(head: TensorHead, octets: memoryview) -> Steps[None]:
    at, left = 0, count_of(head.shape)
    while left:
        count = min(left, _AT_ONCE)
        length = length_of_elements(octets[at:], count)
        if length < 0:
            unpack_elements(head.name, octets[at:], count)
        at += length
        left -= count
        yield 0
    if at < len(octets):
        raise BadRequest(
            f"{len(octets) - at} bytes of binary data remain after the {count_of(head.shape)} elements that the shape of input {quoted(head.name)} requires"
        )


def value_of_raw(body: bytes, specs: Sequence[TensorSpec], max_rows: int, *, single: bool = False) -> Tensors:
    """Return the value of a body that has only the data of the only input: numbers, or a BYTES element without its length. If
    `single`, a single row gets no row axis. Raises BadRequest, and PayloadTooLarge for more than `max_rows` rows."""
    [head] = checked_heads([head_of_raw(len(body), specs)], specs, max_rows)
    data = join_elements([body]) if head.datatype == BYTES else memoryview(body)  # A large body is a bytearray.
    return pack([Tensor(head, data)], single=single and head.shape[0] == 1)


def check_size(head: TensorHead, octets: bytes | memoryview) -> None:
    """Raise BadRequest if an input's data don't match its shape."""
    if head.datatype == BYTES:
        count = count_of(head.shape)
        if length_of_elements(octets, count) != len(octets):
            unpack_elements(head.name, octets, count)
        return
    try:
        check_data(head, len(octets))
    except NoTensors as exc:
        raise BadRequest(str(exc)) from None


def head_of_raw(size: int, specs: Sequence[TensorSpec]) -> TensorHead:
    """Return the head of a model's only input, given the size of its data in bytes. BYTES data are a single element. Other
    data are a single row if one of its axes may have any size, and otherwise one or more rows. Raises BadRequest unless the
    model has exactly one input, and the size determines the shape."""
    if len(specs) != 1:
        takes = f"the model takes {shown_specs(specs)}" if specs else "the model's inputs are not known yet"
        raise BadRequest(f"the body consists only of data, which works only for models with one input; {takes}")
    [spec] = specs
    hint = ""
    known = math.prod(axis for axis in spec.shape if axis != -1)
    free = spec.shape.count(-1)
    if spec.datatype == BYTES:
        if known == 1:
            return TensorHead(spec.name, BYTES, (1, *(abs(axis) for axis in spec.shape)))
    else:
        step = SIZES[spec.datatype] * known
        hint = "" if free or not step else f", where a row takes {step} bytes, and several rows a multiple of that"
        if free < 2 and step and size and size % step == 0:
            count = size // step
            if not free:
                return TensorHead(spec.name, spec.datatype, (count, *spec.shape))
            return TensorHead(spec.name, spec.datatype, (1, *(count if axis == -1 else axis for axis in spec.shape)))
    raise BadRequest(
        f"the body consists only of data; its size, {size} bytes, does not determine the shape; the model takes {shown_spec(spec)}{hint}"
    )


_MOST_SHOWN = 8


class WantedOutput(NamedTuple):
    """A requested output, and whether it is requested in binary form."""

    name: str
    binary: bool


class OutputTensor(NamedTuple):
    """A tensor of an answer: its head, its data (in parts of whole rows), and whether to send it in binary form."""

    head: TensorHead
    parts: Sequence[bytes | memoryview]
    binary: bool

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def json_pieces(self) -> Iterator[bytes]:
        """Yield the data as a flat JSON array. Raises RequestError for NaN, infinities, and bytes that aren't UTF-8."""
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
    """Raise BadRequest if a requested output doesn't exist or is listed twice. `known` is empty while the outputs are unknown."""
    known = list(known)
    for name in names:
        if known and name not in known:
            shown = ", ".join(map(quoted, known[:_MOST_SHOWN])) + (", …" if len(known) > _MOST_SHOWN else "")
            raise BadRequest(f"there is no output {quoted(name)}; the model returns {shown}")
        if (count := names.count(name)) > 1:
            raise BadRequest(f"the output {quoted(name)} is requested {count} times; list it only once")


def names_of(specs: Iterable[TensorSpec]) -> list[str]:
    """Return the names of inputs or outputs."""
    return [spec.name for spec in specs]


def are_tensors(outputs: Sequence[Value]) -> TypeGuard[Sequence[Tensors]]:
    """Return True if all outputs of a request are tensors."""
    return all(isinstance(output, Tensors) for output in outputs)


def answer_tensors(outputs: Sequence[Tensors], wanted: Sequence[WantedOutput], *, binary: bool) -> list[OutputTensor]:
    """Concatenate the rows of the outputs of all inputs (at least one). Return the `wanted` outputs in that order. If `wanted`
    is empty, return all outputs, in binary form if `binary`. Raises BadRequest if a wanted output doesn't exist, or if outputs
    differ in more than their rows. Raises RequestError if an output is corrupt."""
    try:
        values = list(map(unpack, outputs))
    except NoTensors as exc:
        raise RequestError(f"the model's output is corrupt: {exc}", code=BACKEND_ERROR) from None
    first = [tensor.head for tensor in values[0]]
    for other in values[1:]:
        heads = [tensor.head for tensor in other]
        if list(map(_row, heads)) != list(map(_row, first)):
            raise BadRequest(
                f"the outputs differ in shape or datatype: {shown_heads(first)} and {shown_heads(heads)}; send each input in its own request"
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
    """The form of answers. `tensors` have no real data. `places` says where their data are in the output's value, which has
    `length` bytes."""

    tensors: Sequence[OutputTensor]
    places: Sequence[slice]
    length: int


def form_of_output(
    opening: bytes, wanted: Sequence[WantedOutput], *, binary: bool, max_bytes: int
) -> OutputForm | None:
    """Return the form of answers with one output, or None if the output is text, has no elements, or has more than `max_bytes`
    bytes of data. `opening` is the output's value up to its data. Raises as `answer_tensors` does."""
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
    if len(values) == 1 and head.datatype != JSON:
        return head
    rows = sum(value[place].head.shape[0] for value in values)
    return TensorHead(head.name, BYTES if head.datatype == JSON else head.datatype, (rows, *head.shape[1:]))


def _row(head: TensorHead) -> tuple[str, str, tuple[int, ...]]:
    return head.name, head.datatype, head.shape[1:]

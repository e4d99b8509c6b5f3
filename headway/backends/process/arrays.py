"""Runs batches of arrays.

For each call of the target, the rows of several entries are joined into one array, and the outputs are split again. Rows of
different shapes go into different calls, unless they are passed as a list or need little padding. A call has at most as many rows
as a batch. A list of outputs has one item per row: a value, an exception, or an `Output` with its tokens. If a row fails, so does
its entry.

A value in the arena is copied once, into the array for a call, or not at all if its entry runs alone. Outputs are copied once, into
the arena. Targets always get read-only arrays, because views of the arena are read-only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headway.backends.process import frames
from headway.backends.process.arena import Pieces
from headway.backends.process.array_kind import (
    LENGTHS,
    LIST,
    NAMED,
    OUTPUT,
    ArrayKind,
    Column,
    Rows,
    array_of,
    column,
    cutter,
    free_axes,
    numpy,
)
from headway.backends.process.frames import Failed, Outputs
from headway.backends.process.values import NoOutput, kind_of
from headway.core.rows import MOST_PADDED, PADDED_FREELY
from headway.core.tensors import MOST_TENSORS, check_heads, fits, header_of, packed, quoted, shown_shape, unpack
from headway.core.values import as_tensors
from headway.model import Output, TensorSpec, TokenCount, Value, ValueKind, added_up


def run(
    number: int,
    inputs: Sequence[Value],
    kind: ArrayKind,
    most: int,
    call: Callable[[Any, list[int]], object],
    describe: Callable[[BaseException], str],
    keys: Mapping[int, bytes] = MappingProxyType({}),
) -> Outputs | Failed:
    """Run a batch for a target that takes arrays, in as many calls as its shapes and rows require. `call` takes the inputs,
    with at most `most` rows (0 for no limit), and for each row the place of its entry. `describe` describes an exception
    that the target returned. Only entries with the same key in `keys` share a call."""
    whole = Outputs(number, ValueKind.TENSORS, [None] * len(inputs), {}, tokens={})
    entries: list[Rows] = []
    for place, value in enumerate(inputs):
        try:
            entries.append(read(value, place, kind))
        except ValueError as exc:
            whole.errors[place] = str(exc), False
    groups = list(_groups(entries, kind, most, keys))
    for turn, group in enumerate(groups, 1):
        result = call(_argument(group, kind), [entry.place for entry in group for _ in range(entry.length)])
        if (failed := _put(whole, group, result, kind, describe)) is not None:
            return failed
        if turn < len(groups):  # The target may reuse this memory for its next outputs.
            whole.outputs[:] = [output.joined() if type(output) is Pieces else output for output in whole.outputs]
    return whole


def judge(
    number: int, expected: int, result: object, kind: ArrayKind, describe: Callable[[BaseException], str]
) -> Outputs | Failed:
    """Answer each input of a batch with one row of the returned arrays, for a target whose inputs aren't arrays."""
    whole = Outputs(number, ValueKind.TENSORS, [None] * expected, {}, tokens={})
    failed = _put(whole, [Rows(place, {}, 1, True) for place in range(expected)], result, kind, describe)
    return whole if failed is None else failed


def read(value: Value, place: int, kind: ArrayKind) -> Rows:
    """Return an entry's arrays as views of its bytes. Raises ValueError if they don't fit the target."""
    value = as_tensors(value, kind.inputs)
    unpacked = unpack(value)
    heads = check_heads([tensor.head for tensor in unpacked], kind.inputs)
    tensors = {head.name: tensor for head, tensor in zip(heads, unpacked, strict=True)}
    arrays = {spec.name: array_of(tensors[spec.name], spec.datatype) for spec in kind.inputs}
    return Rows(place, arrays, heads[0].shape[0], header_of(value).single)


def _groups(entries: Sequence[Rows], kind: ArrayKind, most: int, keys: Mapping[int, bytes]) -> Iterator[list[Rows]]:
    """Yield groups of entries that share a call, by key and shape. Only an entry on its own may have more than `most` rows."""
    of_shape: dict[tuple[bytes, tuple[tuple[int, ...], ...]], list[Rows]] = {}
    for entry in entries:
        mixed = kind.takes == LIST or kind.pad is not None
        shape = () if mixed else tuple(array.shape[1:] for array in entry.arrays.values())
        of_shape.setdefault((keys.get(entry.place, b""), shape), []).append(entry)
    groups: Iterable[list[Rows]] = of_shape.values()
    if kind.pad is not None:
        groups = [part for group in groups for part in padded_alike(group)]
    for group in groups:
        part: list[Rows] = []
        rows = 0
        for entry in group:
            if part and 0 < most < rows + entry.length:
                yield part
                part, rows = [], 0
            part.append(entry)
            rows += entry.length
        yield part


def _argument(group: Sequence[Rows], kind: ArrayKind) -> object:
    if kind.takes == LIST:
        [spec] = kind.inputs
        parts = [(entry.arrays[spec.name], entry.length) for entry in group]
        return [_handed(array[row, ...], spec, kind) for array, count in parts for row in range(count)]
    arrays: dict[str, Any] = {}
    for spec in kind.inputs:
        columns = [entry.arrays[spec.name] for entry in group]
        if kind.pad is not None and free_axes(spec):
            arrays[spec.name], arrays[spec.name + LENGTHS] = padded(columns, spec, kind.pad)
        else:
            arrays[spec.name] = columns[0] if len(columns) == 1 else numpy().concatenate(columns)
    given = {spec.name: spec for spec in kind.inputs}
    handed = {name: _handed(array, given.get(name), kind) for name, array in arrays.items()}
    return handed if kind.takes == NAMED else next(iter(handed.values()))


def _handed(array: Any, spec: TensorSpec | None, kind: ArrayKind) -> Any:
    """Return the array for the target: read-only, or a copy for torch, which has no read-only tensors."""
    if kind.library and array.dtype.kind != "O":
        import torch

        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        return tensor.to(torch.bfloat16) if spec is not None and spec.datatype == "BF16" else tensor
    array.flags.writeable = False
    return array


def _put(
    whole: Outputs, group: Sequence[Rows], result: object, kind: ArrayKind, describe: Callable[[BaseException], str]
) -> Failed | None:
    """Put the outputs of a call into the batch's answer. If they don't match the call, return the batch's failure."""
    expected = sum(entry.length for entry in group)
    try:
        if isinstance(result, list | tuple):
            if len(result) != expected:
                raise NoOutput(f"{len(result)} outputs for {expected} rows", _SEVERAL if len(kind.outputs) > 1 else "")
            _put_listed(whole, group, list(result), kind, describe)
        else:
            _put_cut(whole, group, columns_of(result, expected, kind), kind)
    except NoOutput as exc:
        return Failed(whole.number, True, f"the target returned {exc}{exc.mend}")
    return None


def columns_of(result: object, expected: int, kind: ArrayKind) -> dict[str, Column]:
    """Return the arrays that a target returned for `expected` rows, by name. Raises NoOutput if it returned anything else."""
    specs = {spec.name: spec for spec in kind.outputs}
    if isinstance(result, Mapping):
        arrays = {str(name): array for name, array in result.items()}
        if not 0 < len(arrays) <= MOST_TENSORS:
            raise NoOutput(f"a dict of {len(arrays)} arrays, expected 1 to {MOST_TENSORS}")
    elif isinstance(result, list) or hasattr(result, "__array__") or callable(getattr(result, "detach", None)):
        arrays = {kind.outputs[0].name if len(kind.outputs) == 1 else OUTPUT: result}
    else:
        raise NoOutput(f"{kind_of(result)}, expected an array with {expected} rows", _unlisted(result))
    if specs and (unknown := [name for name in arrays if name not in specs]):
        raise NoOutput(f"an array {quoted(unknown[0])}, which it does not declare")
    if missing := [name for name in specs if name not in arrays]:
        raise NoOutput(
            f"no array {quoted(missing[0])}, which it declares", "" if isinstance(result, Mapping) else _SEVERAL
        )
    columns = {}
    for name in specs or arrays:
        spec = specs.get(name)
        array = columns[name] = column(arrays[name], spec.datatype if spec is not None else "")
        if not array.array.ndim or len(array.array) != expected:
            raise NoOutput(f"an array {quoted(name)} of shape {shown_shape(array.array.shape)} for {expected} rows")
        if spec is not None and not fits(array.array.shape[1:], spec.shape):
            declared = shown_shape((-1, *spec.shape))
            raise NoOutput(f"an array {quoted(name)} of shape {shown_shape(array.array.shape)}; it declares {declared}")
    return columns


def _put_cut(whole: Outputs, group: Sequence[Rows], columns: Mapping[str, Column], kind: ArrayKind) -> None:
    cutters = [cutter(name, array) for name, array in columns.items()]
    begin = 0
    for entry in group:
        end = begin + entry.length
        pieces = Pieces(packed([cut(begin, end) for cut in cutters], single=entry.single))
        begin = end
        if len(pieces) > frames.MAX_OUTPUT:
            text = f"the target returned {len(pieces)} bytes for this input, the limit is {frames.MAX_OUTPUT}"
            whole.errors[entry.place] = text, True
        else:
            whole.outputs[entry.place] = pieces if pieces.are_large else pieces.joined()


def _put_listed(
    whole: Outputs, group: Sequence[Rows], result: list[Any], kind: ArrayKind, describe: Callable[[BaseException], str]
) -> None:
    """Give each entry its part of `result`, a list with an output or exception per row. Shapes may differ between entries."""
    answered: list[tuple[Rows, list[Any]]] = []
    begin = 0
    for entry in group:
        rows, begin = result[begin : begin + entry.length], begin + entry.length
        counts = [TokenCount(row.tokens, row.prompt_tokens) for row in rows if type(row) is Output]
        if (tokens := added_up(counts)) is not None:
            whole.tokens[entry.place] = tokens
        rows = [row.value if type(row) is Output else row for row in rows]
        wrong = next((row for row in rows if isinstance(row, BaseException)), None)
        if wrong is not None:
            whole.errors[entry.place] = describe(wrong), False
        else:
            answered.append((entry, rows))
    good = [row for _, rows in answered for row in rows]
    try:
        _put_cut(whole, [entry for entry, _ in answered], columns_of(good, len(good), kind) if answered else {}, kind)
    except NoOutput:
        for entry, rows in answered:
            try:
                _put_cut(whole, [entry], columns_of(rows, len(rows), kind), kind)
            except NoOutput as exc:
                whole.errors[entry.place] = f"the target returned {exc}{exc.mend}", True


def _unlisted(result: object) -> str:
    if result is None:
        return "; end it by returning an array"
    if hasattr(type(result), "__next__") or hasattr(type(result), "__anext__"):
        return "; return an array instead of yielding its rows, for example np.stack(rows)"
    return "; return one row for each row of its inputs"


_SEVERAL = "; return several outputs as a dict by name"


def padded_alike(entries: list[Rows]) -> list[list[Rows]]:
    """Divide entries into a few groups that need little padding. All rows of a call are padded to the longest one."""
    together = _Padding()
    if all(together.takes(entry) for entry in entries):  # The usual case.
        return [entries]
    groups: list[tuple[_Padding, list[Rows]]] = []
    for entry in sorted(entries, key=_bytes_of, reverse=True):
        for padding, group in groups:
            if padding.takes(entry):
                group.append(entry)
                break
        else:
            padding = _Padding()
            padding.takes(entry)
            groups.append((padding, [entry]))
    return [group for _, group in groups]


def padded(columns: Sequence[Any], spec: TensorSpec, pad: float) -> tuple[Any, Any]:
    """Pad rows of several shapes, and return them as one array. Strings are padded with empty strings. Also return the length
    of each row's free axis, or a list of lengths for each row if several axes are free."""
    np = numpy()
    free = free_axes(spec)
    counts = [len(array) for array in columns]
    sizes = np.array([[array.shape[axis] for axis in free] for array in columns], np.int64)
    lengths = np.repeat(sizes[:, 0] if len(free) == 1 else sizes, counts, axis=0)
    shape = tuple(max(sizes) for sizes in zip(*(array.shape[1:] for array in columns), strict=True))
    if all(array.shape[1:] == shape for array in columns):
        return columns[0] if len(columns) == 1 else np.concatenate(columns), lengths
    filler: Any = b"" if columns[0].dtype.kind == "O" else pad
    whole = np.full((sum(counts), *shape), filler, columns[0].dtype)
    begin = 0
    for array in columns:
        whole[(slice(begin, begin + len(array)), *map(slice, array.shape[1:]))] = array
        begin += len(array)
    return whole, lengths


class _Padding:
    """The memory that the rows of a call take after padding."""

    __slots__ = ("_own", "_rows", "_shapes")

    def __init__(self) -> None:
        self._own = self._rows = 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    def takes(self, entry: Rows) -> bool:
        """Add an entry, or return False if too much of the memory would be padding. The first entry is always added."""
        rows, own, size = self._rows + entry.length, self._own + _bytes_of(entry), 0
        shapes = {}
        for name, array in entry.arrays.items():
            shape = array.shape[1:]
            shapes[name] = shape = tuple(map(max, self._shapes.get(name, shape), shape))
            size += rows * math.prod(shape) * array.itemsize
        if size > max(PADDED_FREELY, MOST_PADDED * own):
            return False
        self._rows, self._own, self._shapes = rows, own, shapes
        return True


def _bytes_of(entry: Rows) -> int:
    return sum(array.nbytes for array in entry.arrays.values())

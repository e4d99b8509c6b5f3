"""Arrays of numpy: packed tensors as a target takes them, and what it gives back as packed tensors.

    form     the target takes                  and gives
    array    one array, rows along axis 0      one array
    named    a dict of such arrays by name     a dict of them
    list     a list of arrays, one for a row   a list of them

Entries whose rows have another shape, but for padded axes, run in calls of their own, and so do those that would be mostly padding. numpy is imported once a target needs it.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headway.backends.process.frames import Failed, Outputs
from headway.backends.process.values import NoOutput, kind_of
from headway.core import tensor_json
from headway.core.tensors import (
    BYTES,
    JSON,
    SIZES,
    Tensor,
    TensorHead,
    check_heads,
    header_of,
    join_elements,
    pack,
    quoted,
    shown_shape,
    split_elements,
    unpack,
)
from headway.model import Tensors, TensorSpec, Value, ValueKind

ARRAY, NAMED, LIST = "array", "named", "list"
INPUT, OUTPUT = "INPUT", "OUTPUT"
"""Names of the input and output of a target that names none, as the Open Inference Protocol's metadata has them."""
LENGTHS = "_lengths"
"""Behind the name of a padded input: name of the input that holds the lengths of its rows."""
NUMPY = "pip install numpy"
_PADDED_FREELY = 1 << 20
"""Bytes of a padded call up to which rows of any lengths run together."""
_MOST_PADDED = 4
"""Most bytes of a larger padded call, as a multiple of those of its rows."""

_DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2", "INT32": "<i4",
    "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip


class NoArrays(Exception):
    """The target cannot take or give arrays as it is. The text is a whole sentence, with its mend."""


class Rows(NamedTuple):
    """Arrays of one entry.

    Attributes:
        place: place of the entry in its batch.
        arrays: arrays by name, as many rows each.
        rows: number of rows.
        single: whether the entry is one row without an axis of rows to its reader.
    """

    place: int
    arrays: dict[str, Any]
    rows: int
    single: bool


class ArrayKind(NamedTuple):
    """Kind of arrays that a target takes and gives.

    Attributes:
        takes: form of its inputs; empty where it takes no arrays.
        gives: whether it gives arrays.
        inputs, outputs: their specifications; empty where they are not known.
        pad: value that free axes are padded with; None: batches are of rows of one shape.
    """

    takes: str
    gives: bool
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    pad: float | None = None


def form_of(annotation: Any) -> str:
    """Form of arrays that an annotation says; empty for none."""
    if _is_array(annotation):
        return ARRAY
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (dict, Mapping) and len(arguments) == 2 and _is_array(arguments[1]):
        return NAMED
    if isinstance(origin, type) and issubclass(origin, Sequence) and any(map(_is_array, arguments)):
        return LIST
    return ""


def kind_of_arrays(call: Any, hints: Mapping[str, Any], first: str) -> ArrayKind | None:
    """Kind of arrays that a target takes and gives, by its annotations and its attributes; None where it has to do with none.

    Raises:
        NoArrays: numpy is not installed, or an attribute is none that it may be.
    """
    takes, gives = form_of(hints.get(first)), bool(form_of(hints.get("return")))
    inputs, outputs = getattr(call, "inputs", None), getattr(call, "outputs", None)
    if isinstance(inputs, Mapping) and not takes:
        takes = NAMED
    gives = gives or isinstance(outputs, Mapping) or (bool(takes) and hints.get("return") is None)
    if not takes and not gives:
        return None
    _numpy()
    pad = getattr(call, "pad", None)
    given = _specs("inputs", inputs) if takes and isinstance(inputs, Mapping) else ()
    if takes and not given:
        given = _specs_of_example(getattr(call, "example", None), takes, getattr(call, "shapes", None))
    return ArrayKind(takes, gives, given, _specs("outputs", outputs) if isinstance(outputs, Mapping) else (), pad)


def example_of(call: Any, kind: ArrayKind) -> Tensors | None:
    """Example of a target's input, packed, one row; None where it has none and none can be made of its specifications."""
    np = _numpy()
    example = getattr(call, "example", None)
    if example is None or callable(example):
        if not kind.inputs:
            return None
        rows = {one.name: _zeros(one) for one in kind.inputs}
    elif isinstance(example, Mapping):
        rows = {str(name): np.asarray(one)[None] for name, one in example.items()}
    else:
        rows = {kind.inputs[0].name if kind.inputs else INPUT: np.asarray(example)[None]}
    return pack([packed(name, one) for name, one in rows.items()])


def read(value: Value, place: int, kind: ArrayKind) -> Rows:
    """Arrays of an entry; views of its bytes, where they can be. Raises ValueError with the reason."""
    if not isinstance(value, Tensors):
        value = of_json(value, kind.inputs)
    found = unpack(value)
    heads = check_heads([one.head for one in found], kind.inputs)
    arrays = {head.name: array_of(one) for head, one in zip(heads, found, strict=True)}
    return Rows(place, arrays, heads[0].shape[0], header_of(value).single)


def of_json(value: Value, specs: Sequence[TensorSpec]) -> Tensors:
    """Tensors of a JSON value that a gateway let in before it knew of what shape they are. Raises NoTensors."""
    return tensor_json.tensors_of(value, specs)


def array_of(tensor: Tensor) -> Any:
    """Array of a tensor. BYTES become an array of bytes objects; BF16, which numpy has not, FP32."""
    np = _numpy()
    head = tensor.head
    if head.datatype in (BYTES, JSON):
        found = np.empty(len(elements := split_elements(tensor.data)), object)
        found[:] = elements
    elif head.datatype == "BF16":
        found = (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        found = np.frombuffer(tensor.data, _DTYPES[head.datatype])
    return found.reshape(head.shape)


def packed(name: str, array: Any, datatype: str = "") -> Tensor:
    """Tensor of an array. Raises NoOutput for one of a dtype that does not travel."""
    np = _numpy()
    array = _as_array(array)
    found = datatype or _datatype(array.dtype)
    if not found:
        raise NoOutput(f"an array of dtype {array.dtype} for this input")
    head = TensorHead(name, found, tuple(array.shape))
    if found in (BYTES, JSON):
        return Tensor(head, join_elements(_octets(one) for one in array.ravel().tolist()))
    if found == "BF16":
        bits = np.ascontiguousarray(array, "<f4").view("<u4")
        array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    else:
        array = np.ascontiguousarray(array, _DTYPES[found])
    return Tensor(head, memoryview(array.reshape(-1)).cast("B") if array.size else b"")


def run(
    number: int, inputs: list[Any], kind: ArrayKind, most: int, call: Callable[[Any, list[int]], object]
) -> Outputs | Failed:
    """Run a batch of a target that takes arrays, in as many calls as its shapes and rows need.

    Arguments:
        number: number of the batch.
        inputs: values of its entries.
        kind: how the target takes and gives arrays.
        most: most rows of a call; 0 for no bound.
        call: calls the target with its inputs, and the places of the entries that its rows are of.
    """
    whole = Outputs(number, ValueKind.TENSORS, [None] * len(inputs), {})
    entries: list[Rows] = []
    for place, value in enumerate(inputs):
        try:
            entries.append(read(value, place, kind))
        except ValueError as exc:
            whole.errors[place] = str(exc), False
    for group in _groups(entries, kind, most):
        places = [one.place for one in group for _ in range(one.rows)]
        result = call(_argument(group, kind), places)
        if isinstance(failed := _put(whole, group, result, kind), Failed):
            return failed
    return whole


def judge(number: int, expected: int, result: object, kind: ArrayKind) -> Outputs | Failed:
    """Answer that the arrays make which a target returned for inputs that are none: one row for each."""
    whole = Outputs(number, ValueKind.TENSORS, [None] * expected, {})
    return _put(whole, [Rows(place, {}, 1, True) for place in range(expected)], result, kind) or whole


def rows_of_result(result: object, expected: int, kind: ArrayKind) -> dict[str, Any]:
    """Arrays that a target returned for so many rows, by name.

    Raises:
        NoOutput: it returned anything else.
    """
    if isinstance(result, Mapping):
        arrays = {str(name): _as_array(one) for name, one in result.items()}
    elif isinstance(result, list | tuple):
        if len(result) != expected:
            raise NoOutput(f"{len(result)} outputs for {expected} rows")
        arrays = {_output_name(kind): _stacked(result)}
    elif hasattr(result, "__array__") or callable(getattr(result, "numpy", None)):
        arrays = {_output_name(kind): _as_array(result)}
    else:
        raise NoOutput(f"{kind_of(result)}, expected an array with {expected} rows")
    for name, one in arrays.items():
        if one.ndim == 0 or one.shape[0] != expected:
            raise NoOutput(f"an array {quoted(name)} of shape {shown_shape(one.shape)} for {expected} rows")
        spec = next((known for known in kind.outputs if known.name == name), None)
        if spec is not None:
            _check_output(spec, one)
    if missing := [one.name for one in kind.outputs if one.name not in arrays]:
        raise NoOutput(f"no array {quoted(missing[0])}, which its attribute outputs names")
    return arrays


def _put(whole: Outputs, group: Sequence[Rows], result: object, kind: ArrayKind) -> Failed | None:
    expected = sum(one.rows for one in group)
    try:
        if (
            isinstance(result, list)
            and any(isinstance(one, BaseException) for one in result)
            and len(result) == expected
        ):
            _put_listed(whole, group, result, kind)
            return None
        arrays = rows_of_result(result, expected, kind)
        at = 0
        for one in group:
            cut = {name: array[at : at + one.rows] for name, array in arrays.items()}
            whole.outputs[one.place] = _content(cut, one.single, kind)
            at += one.rows
    except NoOutput as exc:
        return Failed(whole.number, True, f"the target returned {exc}{exc.mend}")
    return None


def _put_listed(whole: Outputs, group: Sequence[Rows], result: list[Any], kind: ArrayKind) -> None:
    """Put a list with an output or an exception for each row. A row that failed fails its entry."""
    at = 0
    for one in group:
        own, at = result[at : at + one.rows], at + one.rows
        wrong = next((each for each in own if isinstance(each, BaseException)), None)
        if wrong is not None:
            whole.errors[one.place] = f"{type(wrong).__name__}: {wrong}", False
        else:
            whole.outputs[one.place] = _content(rows_of_result(own, one.rows, kind), one.single, kind)


def _content(arrays: Mapping[str, Any], single: bool, kind: ArrayKind) -> bytes:
    datatypes = {one.name: one.datatype for one in kind.outputs}
    return pack([packed(name, one, datatypes.get(name, "")) for name, one in arrays.items()], single=single).content


def _groups(entries: Sequence[Rows], kind: ArrayKind, most: int) -> Iterator[list[Rows]]:
    """Entries that run together: of the same shape, but for padded axes, and no more rows than `most`, unless one has more by itself."""
    of_shape: dict[Any, list[Rows]] = {}
    for one in entries:
        key = (
            ()
            if kind.takes == LIST or kind.pad is not None
            else tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(one.arrays.items()))
        )
        of_shape.setdefault(key, []).append(one)
    groups: Iterable[list[Rows]] = of_shape.values()
    if kind.pad is not None and kind.takes != LIST:
        groups = [part for group in groups for part in _padded_alike(group)]
    for group in groups:
        part: list[Rows] = []
        rows = 0
        for one in group:
            if part and most and rows + one.rows > most:
                yield part
                part, rows = [], 0
            part.append(one)
            rows += one.rows
        yield part


def _padded_alike(entries: list[Rows]) -> list[list[Rows]]:
    """Entries in as few groups as pad little: one long row would make all rows of its call as long, and its memory without bound."""
    together = _Padding()
    if all(together.takes(one) for one in entries):  # Nearly always.
        return [entries]
    found: list[tuple[_Padding, list[Rows]]] = []
    for one in sorted(entries, key=_bytes_of, reverse=True):
        for padding, group in found:
            if padding.takes(one):
                group.append(one)
                break
        else:
            padding = _Padding()
            padding.takes(one)
            found.append((padding, [one]))
    return [group for _, group in found]


class _Padding:
    """Room that the rows of a call take when they are padded."""

    __slots__ = ("_own", "_rows", "_shapes")

    def __init__(self) -> None:
        self._own = self._rows = 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    def takes(self, one: Rows) -> bool:
        """Add an entry, unless too much of the room would be padding. The first one fits."""
        rows, own, size = self._rows + one.rows, self._own + _bytes_of(one), 0
        shapes = {}
        for name, array in one.arrays.items():
            shape = array.shape[1:]
            shapes[name] = shape = tuple(map(max, self._shapes.get(name, shape), shape))
            size += rows * math.prod(shape) * array.itemsize
        if size > max(_PADDED_FREELY, _MOST_PADDED * own):
            return False
        self._rows, self._own, self._shapes = rows, own, shapes
        return True


def _bytes_of(one: Rows) -> int:
    return sum(array.nbytes for array in one.arrays.values())


def _argument(group: Sequence[Rows], kind: ArrayKind) -> object:
    """Inputs of a call, as the target takes them."""
    np = _numpy()
    names = list(group[0].arrays)
    if kind.takes == LIST:
        return [one.arrays[names[0]][row] for one in group for row in range(one.rows)]
    arrays: dict[str, Any] = {}
    for name in names:
        parts = [one.arrays[name] for one in group]
        if kind.pad is not None and len({part.shape[1:] for part in parts}) > 1:
            arrays |= _padded(name, parts, kind.pad)
        else:
            arrays[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
            if kind.pad is not None and parts[0].ndim > 1:
                arrays[name + LENGTHS] = np.full(len(arrays[name]), parts[0].shape[1], np.int64)
    return arrays if kind.takes == NAMED else arrays[names[0]]


def _padded(name: str, parts: Sequence[Any], pad: float) -> dict[str, Any]:
    """Rows of several shapes as one array, and the lengths of their first axes."""
    np = _numpy()
    shape = tuple(max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True))
    whole = np.full((sum(len(part) for part in parts), *shape), pad, parts[0].dtype)
    at = 0
    for part in parts:
        whole[(slice(at, at + len(part)), *map(slice, part.shape[1:]))] = part
        at += len(part)
    lengths = np.concatenate([np.full(len(part), part.shape[1], np.int64) for part in parts])
    return {name: whole, name + LENGTHS: lengths}


def _specs(attribute: str, found: Mapping[Any, Any]) -> tuple[TensorSpec, ...]:
    """Specifications out of a target's attribute. Raises NoArrays."""
    specs = []
    for name, given in found.items():
        try:
            datatype, shape = given
            spec = TensorSpec(str(name), str(datatype).upper(), tuple(int(one) for one in shape))
        except (TypeError, ValueError):
            raise NoArrays(
                f'its attribute {attribute} has {given!r} for {name!r}; expected a datatype and the shape of a row, as in ("FP32", [4])'
            ) from None
        if spec.datatype not in SIZES or spec.datatype == JSON:
            known = ", ".join(one for one in SIZES if one != JSON)
            raise NoArrays(
                f"its attribute {attribute} has the datatype {datatype!r} for {name!r}; the datatypes are {known}"
            )
        if any(one < -1 for one in spec.shape):
            raise NoArrays(
                f"its attribute {attribute} has the shape {list(shape)} for {name!r}; an axis is a size, or -1 for any"
            )
        specs.append(spec)
    if not specs:
        raise NoArrays(f'its attribute {attribute} is empty; name at least one, as in {{"x": ("FP32", [4])}}')
    return tuple(specs)


def _specs_of_example(example: Any, takes: str, shapes: Any) -> tuple[TensorSpec, ...]:
    """Specifications that an example shows: an array, or several by name."""
    if example is None or callable(example):
        raise NoArrays(
            "it takes arrays, and does not say of which datatype and shape. Give it an attribute example, as in "
            'example = np.zeros(4, np.float32), or inputs, as in inputs = {"x": ("FP32", [4])}'
        )
    np = _numpy()
    named = example if isinstance(example, Mapping) else {INPUT: example}
    if takes != NAMED and isinstance(example, Mapping):
        raise NoArrays(
            "its attribute example has several arrays, and it takes one; annotate its inputs as dict[str, np.ndarray]"
        )
    specs = []
    for name, one in named.items():
        array = np.asarray(one)
        if not (datatype := _datatype(array.dtype)):
            raise NoArrays(f"its attribute example is of dtype {array.dtype}, which does not travel; give it numbers")
        row = tuple(array.shape)
        free = shapes.get(name) if isinstance(shapes, Mapping) else shapes
        if free is not None:
            row = tuple(-1 if size is None else int(size) for size in free)
        elif takes == LIST:
            row = tuple(-1 for _ in row)
        specs.append(TensorSpec(str(name), datatype, row))
    return tuple(specs)


def _zeros(spec: TensorSpec) -> Any:
    """One row of zeros of a specification; free axes are as long as 1."""
    np = _numpy()
    shape = (1, *(abs(size) for size in spec.shape))
    if spec.datatype == BYTES:
        found = np.empty(shape, object)
        found[...] = b""
        return found
    return np.zeros(shape, "<f4" if spec.datatype == "BF16" else _DTYPES[spec.datatype])


def _check_output(spec: TensorSpec, array: Any) -> None:
    fits = len(spec.shape) == array.ndim - 1 and all(
        want in (-1, got) for want, got in zip(spec.shape, array.shape[1:], strict=True)
    )
    if not fits:
        raise NoOutput(
            f"an array {quoted(spec.name)} of shape {shown_shape(array.shape)}; its attribute outputs says {shown_shape((-1, *spec.shape))}"
        )


def _output_name(kind: ArrayKind) -> str:
    return kind.outputs[0].name if len(kind.outputs) == 1 else OUTPUT


def _stacked(rows: Sequence[Any]) -> Any:
    """One array of the outputs of several rows, texts and other JSON values among them. Raises NoOutput."""
    np = _numpy()
    if any(hasattr(one, "__array__") for one in rows) or all(isinstance(one, int | float) for one in rows):
        try:
            return np.stack([_as_array(one) for one in rows])
        except ValueError:
            shapes = " and ".join(sorted({str(list(_as_array(one).shape)) for one in rows})[:3])
            raise NoOutput(f"arrays of shapes {shapes} for the rows of one request") from None
    found = np.empty(len(rows), object)
    found[:] = [one if isinstance(one, str | bytes) else _AsJson(msgspec.json.encode(one)) for one in rows]
    return found


class _AsJson(bytes):
    """JSON text among the elements of an array."""


def _as_array(value: Any) -> Any:
    """Array of numpy of an array of any library."""
    np = _numpy()
    if isinstance(value, np.ndarray):
        return value
    if callable(getattr(value, "detach", None)):  # One of torch, which may be on a GPU.
        value = value.detach().cpu()
        if "bfloat16" in str(value.dtype):
            value = value.float()
    return np.asarray(value)


def _datatype(dtype: Any) -> str:
    """Datatype of a dtype; empty where it has none."""
    if dtype.kind in "OSU":
        return BYTES
    return {"b1": "BOOL", "u1": "UINT8", "u2": "UINT16", "u4": "UINT32", "u8": "UINT64", "i1": "INT8", "i2": "INT16", "i4": "INT32",
            "i8": "INT64", "f2": "FP16", "f4": "FP32", "f8": "FP64"}.get(dtype.str[1:], "")  # fmt: skip


def _octets(element: Any) -> bytes:
    if isinstance(element, bytes | bytearray):
        return bytes(element)
    return (element if isinstance(element, str) else str(element)).encode("utf-8", "backslashreplace")


def _is_array(annotation: Any) -> bool:
    kind = typing.get_origin(annotation) or annotation
    return isinstance(kind, type) and hasattr(kind, "tolist") and hasattr(kind, "__array__")


def _numpy() -> Any:
    """Numpy. Raises NoArrays where it is not installed."""
    try:
        import numpy
    except ImportError:
        raise NoArrays(f"it takes or gives arrays, and numpy is not installed. Run {NUMPY}") from None
    return numpy

"""Conversion of tensor data to numpy arrays, and of arrays from any library to tensor data.

BYTES become arrays of bytes objects. BF16, which numpy lacks, is read as FP32. A target's output is converted to its declared
datatype. Floats of another width are rounded, integers of another width must fit, and other kinds are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headway.backends.process.values import NoArrays, NoOutput, encoder, kind_of
from headway.core.tensors import BYTES, JSON, Tensor, TensorHead, join_elements, shown_shape, split_elements
from headway.core.values import as_json
from headway.model import ValueKind

BF16 = "BF16"
DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2", "INT32": "<i4",
    "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
"""numpy's dtype for each datatype."""
_DATATYPES = {dtype.lstrip("<?") or "b1": datatype for datatype, dtype in DTYPES.items()}
_NUMPY_NAMES = {
    "BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64", BF16: "float32", BYTES: "str",
}  # fmt: skip
_LARGEST_BF16 = 3.3895313892515355e38
_encode_json = encoder(ValueKind.JSON)


class Column(NamedTuple):
    """Array of a datatype: BF16 as UINT16, JSON as JSON texts in bytes."""

    array: Any
    datatype: str


class Rows(NamedTuple):
    """Arrays of one entry by name, each with `length` rows. The client of a `single` row sees it without an axis of rows."""

    place: int
    arrays: Mapping[str, Any]
    length: int
    single: bool


def numpy() -> Any:
    """Import numpy. Raises NoArrays if it isn't installed."""
    try:
        import numpy
    except ImportError:
        raise NoArrays(
            "it takes or gives arrays, and numpy is not installed where Headway runs. Run pip install numpy there"
        ) from None
    return numpy


def array_of(tensor: Tensor, datatype: str) -> Any:
    """Return a tensor as a read-only array: a view of its data, except for BYTES, BF16 and widened tensors. `datatype` is the
    tensor's own, or a wider one that has all of its numbers. Raises NoTensors if its data is damaged."""
    np = numpy()
    head = tensor.head
    if head.datatype in (BYTES, JSON):
        elements = split_elements(tensor.data)
        array = np.empty(len(elements), object)
        array[:] = elements
    elif head.datatype == BF16:
        array = (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        array = np.frombuffer(tensor.data, DTYPES[head.datatype])
    if head.datatype != datatype:
        array = array.astype(DTYPES.get(datatype, "<f4"))
    array = array.reshape(head.shape)
    array.flags.writeable = False
    return array


def column(value: Any, datatype: str = "") -> Column:
    """Convert an array of any library, or a list of rows, that a target returned, to the declared datatype if there is one.
    Raises NoOutput if it isn't an array, or can't have that datatype."""
    if isinstance(value, list | tuple):
        return _column_of_rows(value, datatype)
    converted = _column_of_array(value)
    if converted.array.dtype.kind == "O":
        return _column_of_objects(converted.array, datatype)
    return _cast(converted, datatype) if datatype and converted.datatype != datatype else converted


def tensor_of(name: str, source: Column) -> Tensor:
    """Return the tensor of an array: a view of its data if that is contiguous."""
    np = numpy()
    array, datatype = source
    head = TensorHead(name, datatype, tuple(array.shape))
    if datatype in (BYTES, JSON):
        return Tensor(head, join_elements(_octets(element) for element in array.ravel().tolist()))
    if not array.size:
        return Tensor(head, b"")
    flat = np.ascontiguousarray(array, DTYPES["UINT16" if datatype == BF16 else datatype]).reshape(-1)
    return Tensor(head, memoryview(flat.view("u1")))


def cutter(name: str, source: Column) -> Callable[[int, int], Tensor]:
    """Return a function that returns a range of an array's rows as a tensor, which is a view."""
    array, datatype = source
    if datatype in (BYTES, JSON) or not array.size:
        return lambda begin, end: tensor_of(name, Column(array[begin:end], datatype))
    data, row = tensor_of(name, source).data, tuple(array.shape[1:])
    step = len(data) // len(array)
    return lambda begin, end: Tensor(TensorHead(name, datatype, (end - begin, *row)), data[begin * step : end * step])


def datatype_of(dtype: Any) -> str:
    """Return the datatype for a numpy dtype, or "" if there is none."""
    if dtype.kind in "SU":
        return BYTES
    return _DATATYPES.get(dtype.str[1:], "")


def _column_of_array(value: Any) -> Column:
    np = numpy()
    if callable(getattr(value, "detach", None)):  # A torch tensor, which may be on a GPU.
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            import torch

            return Column(value.contiguous().view(torch.int16).numpy().view("<u2"), BF16)
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        return Column(array.astype(array.dtype.newbyteorder("<")).view("<u2"), BF16)
    if array.dtype.kind == "O":
        return Column(array, "")
    if not (datatype := datatype_of(array.dtype)):
        raise NoOutput(
            f"an array of dtype {array.dtype}, which has no datatype",
            "; give it one that has, as by .astype(np.float32)",
        )
    return Column(array, datatype)


def _column_of_rows(rows: Sequence[Any], datatype: str) -> Column:
    """Return the column for a list of rows: arrays, numbers, lists of numbers, texts, or other JSON values."""
    np = numpy()
    if any(hasattr(row, "__array__") for row in rows) and datatype != JSON:
        columns = [_column_of_array(row) for row in rows]
        if len({row.datatype for row in columns if BF16 in (row.datatype, columns[0].datatype)}) > 1:
            raise NoOutput("arrays of BF16 and of other datatypes for its rows")
        if len({row.array.shape for row in columns}) > 1:
            shapes = " and ".join(sorted({shown_shape(row.array.shape) for row in columns})[:3])
            raise NoOutput(f"arrays of shapes {shapes} for the rows of one request")
        whole = np.stack([row.array for row in columns])
        if whole.dtype.kind == "O":
            return _column_of_objects(whole, datatype)
        stacked = Column(whole, BF16 if columns[0].datatype == BF16 else datatype_of(whole.dtype))
        return _cast(stacked, datatype) if datatype and stacked.datatype != datatype else stacked
    if datatype not in (BYTES, JSON) and (numbers := _numbers(rows)) is not None:
        family = _family(datatype)
        if family in ("float", "integer") and numbers.dtype.kind in "bi"[: 1 + (family == "float")]:
            # Ints and bools pass where floats are declared, and bools where ints are.
            numbers = numbers.astype(DTYPES.get(datatype, "<f4"))
        column_of_numbers = Column(numbers, datatype_of(numbers.dtype))
        fits = not datatype or column_of_numbers.datatype == datatype
        return column_of_numbers if fits else _cast(column_of_numbers, datatype)
    objects = np.empty(len(rows), object)
    for place, row in enumerate(rows):  # Given all rows at once, numpy would look into lists.
        objects[place] = row
    return _column_of_objects(objects, datatype)


def _numbers(rows: Sequence[Any]) -> Any:
    """Return the array of a list of numbers or nested lists, or None if it holds anything else, or lengths differ."""
    np = numpy()
    first = rows[0] if rows else None
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if not isinstance(first, int | float | list | tuple):
        return None
    try:
        array = np.asarray(rows)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype.kind in "biuf" else None


def _column_of_objects(array: Any, datatype: str) -> Column:
    """Return the column of Python objects: BYTES if all are texts or bytes, else JSON."""
    np = numpy()
    elements = array.ravel().tolist()
    wrong = next((element for element in elements if not isinstance(element, str | bytes | bytearray)), None)
    texts = all(isinstance(element, str | bytes | bytearray) for element in elements)
    if datatype in ("", BYTES) and texts:
        return Column(array, BYTES)
    if datatype not in ("", JSON):
        what = f"{kind_of(wrong)} for a row" if not texts else "a text for a row"
        raise NoOutput(f"{what}, expected {datatype}", _mend(datatype) if datatype in DTYPES else "")
    encoded = np.empty(len(elements), object)
    encoded[:] = [as_json(_encode_json(element)) for element in elements]
    return Column(encoded.reshape(array.shape), JSON)


def _cast(source: Column, datatype: str) -> Column:
    """Convert a column to a declared datatype. Raises NoOutput for another kind or a number that is out of range."""
    np = numpy()
    family = _family(source.datatype)
    if family != _family(datatype) or family not in ("float", "integer"):
        raise NoOutput(f"an array of {source.datatype}, and declares {datatype}", _mend(datatype))
    array = source.array
    if source.datatype == BF16:
        array = (array.astype("<u4") << 16).view("<f4")
    if datatype == BF16:
        fits = not (np.isfinite(array) & (abs(array) > _LARGEST_BF16)).any()
        cast = _brain(array) if fits else array
    elif family == "float":
        with np.errstate(over="ignore"):
            cast = array.astype(DTYPES[datatype])
        fits = bool((np.isinf(cast) == np.isinf(array)).all())
    else:
        limits = np.iinfo(DTYPES[datatype])
        fits = not array.size or limits.min <= int(array.min()) <= int(array.max()) <= limits.max
        cast = array.astype(DTYPES[datatype]) if fits else array
    if not fits:
        raise NoOutput(f"a number that is out of the range of {datatype}, which it declares")
    return Column(cast, datatype)


def _brain(array: Any) -> Any:
    """Return the BF16 bits of floats, rounded to nearest, ties to even. NaN stays NaN."""
    np = numpy()
    bits = np.ascontiguousarray(array, "<f4").view("<u4").reshape(array.shape)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return np.where(np.isnan(array), (bits >> 16).astype("<u2") | np.uint16(0x40), rounded)


def _family(datatype: str) -> str:
    if datatype in ("FP16", "FP32", "FP64", BF16):
        return "float"
    return "integer" if "INT" in datatype else datatype


def _mend(datatype: str) -> str:
    return f"; give it one, as by .astype(np.{_NUMPY_NAMES.get(datatype, datatype.lower())}), or declare what it is"


def _octets(element: Any) -> bytes:
    return element.encode("utf-8", "backslashreplace") if isinstance(element, str) else bytes(element)

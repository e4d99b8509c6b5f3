"""Arrays that a target takes and returns: their forms, from its annotations and attributes, and their conversion.

    form     the target takes                  and returns
    array    one array, rows along axis 0      one array
    named    a dict of such arrays by name     a dict of them
    list     a list of arrays, one per row     a list of them

    attribute   meaning
    example     one row of its inputs: an array, or a dict of arrays by name
    shapes      shape of a row with free axes, which are None or -1
    inputs      datatype and row shape of each input by name, instead of an example
    outputs     the same for its outputs, which are checked against it
    pad         number to pad free axes with, so that rows of several lengths run together

BYTES become arrays of bytes objects. BF16, which numpy lacks, becomes FP32. Outputs are converted to their declared datatype: floats
of another width are rounded, integers of another width must be in its range, and anything else is refused. Annotations may use
array classes of any library. A target annotated with torch tensors gets torch tensors; all other targets get numpy arrays.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headway.backends.process.values import (
    NoArrays,
    NoOutput,
    are_arrays,
    encoder,
    is_array,
    kind_of,
    kind_of_elements,
    members_of,
)
from headway.core.tensors import (
    BYTES,
    JSON,
    SIZES,
    NoTensors,
    Tensor,
    TensorHead,
    check_heads,
    join_elements,
    pack,
    shown_shape,
    split_elements,
)
from headway.core.values import as_json
from headway.model import RowsTogether, Tensors, TensorSpec, ValueKind

BF16 = "BF16"
DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2", "INT32": "<i4",
    "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
"""The numpy dtype for each datatype."""
_DATATYPES = {dtype.lstrip("<?") or "b1": datatype for datatype, dtype in DTYPES.items()}
_NUMPY_NAMES = {
    "BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64", BF16: "float32", BYTES: "str",
}  # fmt: skip
_LARGEST_BF16 = 3.3895313892515355e38
_encode_json = encoder(ValueKind.JSON)


class Column(NamedTuple):
    """An array with its datatype. BF16 is stored as UINT16, and JSON as bytes objects."""

    array: Any
    datatype: str


class Rows(NamedTuple):
    """An entry's arrays by name, each with `length` rows. If `single`, the client sees the only row without a row axis."""

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
            "it takes or returns arrays, but numpy is not installed where Headway runs. Run pip install numpy there"
        ) from None
    return numpy


def array_of(tensor: Tensor, datatype: str) -> Any:
    """Return a tensor as a read-only array of `datatype`, which is the tensor's own or a wider one. The array is a view of
    the data, except for BYTES, BF16 and wider datatypes. Raises NoTensors if the data is damaged."""
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
    """Convert a target's output to its declared datatype, if any. Raises NoOutput if the output is neither an array of some
    library nor a list of rows, or doesn't fit the datatype."""
    if isinstance(value, list | tuple):
        return _column_of_rows(value, datatype)
    converted = _column_of_array(value)
    if converted.array.dtype.kind == "O":
        return _column_of_objects(converted.array, datatype)
    return _cast(converted, datatype) if datatype and converted.datatype != datatype else converted


def tensor_of(name: str, source: Column) -> Tensor:
    """Return an array as a tensor, which is a view if the array is contiguous."""
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
    """Return a function that returns a range of an array's rows as a tensor, without copying numbers."""
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
            "; convert it, for example with .astype(np.float32)",
        )
    return Column(array, datatype)


def _column_of_rows(rows: Sequence[Any], datatype: str) -> Column:
    """Return the column for a list of rows: arrays, numbers, lists of numbers, strings, or other JSON values."""
    np = numpy()
    if any(hasattr(row, "__array__") for row in rows) and datatype != JSON:
        columns = [_column_of_array(row) for row in rows]
        if len({row.datatype for row in columns if BF16 in (row.datatype, columns[0].datatype)}) > 1:
            raise NoOutput("arrays of BF16 and other datatypes for its rows")
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
            # Ints and bools are accepted where floats are declared, and bools where ints are.
            numbers = numbers.astype(DTYPES.get(datatype, "<f4"))
        column_of_numbers = Column(numbers, datatype_of(numbers.dtype))
        fits = not datatype or column_of_numbers.datatype == datatype
        return column_of_numbers if fits else _cast(column_of_numbers, datatype)
    objects = np.empty(len(rows), object)
    for place, row in enumerate(rows):  # If numpy got all rows at once, it would look into lists.
        objects[place] = row
    return _column_of_objects(objects, datatype)


def _numbers(rows: Sequence[Any]) -> Any:
    """Return a list of numbers or nested lists as an array, or None if it contains anything else, or lengths differ."""
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
    """Return an array of Python objects as a column: BYTES if all are strings or bytes, or else JSON."""
    np = numpy()
    elements = array.ravel().tolist()
    wrong = next((element for element in elements if not isinstance(element, str | bytes | bytearray)), None)
    texts = all(isinstance(element, str | bytes | bytearray) for element in elements)
    if datatype in ("", BYTES) and texts:
        return Column(array, BYTES)
    if datatype not in ("", JSON):
        what = f"{kind_of(wrong)} for a row" if not texts else "a string for a row"
        raise NoOutput(f"{what}, expected {datatype}", _mend(datatype) if datatype in DTYPES else "")
    encoded = np.empty(len(elements), object)
    encoded[:] = [as_json(_encode_json(element)) for element in elements]
    return Column(encoded.reshape(array.shape), JSON)


def _cast(source: Column, datatype: str) -> Column:
    """Convert a column to a declared datatype. Raises NoOutput for another kind of data, or a number out of range."""
    np = numpy()
    family = _family(source.datatype)
    if family != _family(datatype) or family not in ("float", "integer"):
        raise NoOutput(f"an array of {source.datatype}, but declares {datatype}", _mend(datatype))
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
        raise NoOutput(f"a number that is out of range for {datatype}, which it declares")
    return Column(cast, datatype)


def _brain(array: Any) -> Any:
    """Return the BF16 bits of floats, rounded to nearest, with ties to even. NaN stays NaN."""
    np = numpy()
    bits = np.ascontiguousarray(array, "<f4").view("<u4").reshape(array.shape)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return np.where(np.isnan(array), (bits >> 16).astype("<u2") | np.uint16(0x40), rounded)


def _family(datatype: str) -> str:
    if datatype in ("FP16", "FP32", "FP64", BF16):
        return "float"
    return "integer" if "INT" in datatype else datatype


def _mend(datatype: str) -> str:
    return f"; convert it with .astype(np.{_NUMPY_NAMES.get(datatype, datatype.lower())}), or declare its datatype"


def _octets(element: Any) -> bytes:
    return element.encode("utf-8", "backslashreplace") if isinstance(element, str) else bytes(element)


ARRAY, NAMED, LIST = "array", "named", "list"
INPUT, OUTPUT = "INPUT", "OUTPUT"  # Names of unnamed arrays in the Open Inference Protocol's metadata.
LENGTHS = "_lengths"  # Suffix of the input with the lengths of a padded input's rows.
_LINE = '{"x": ("FP32", [4])}'  # Specifications as authors write them.
_LEAVES = {bool: "BOOL", int: "INT64", float: "FP64", str: BYTES, dict: JSON, Mapping: JSON}


class ArrayKind(NamedTuple):
    """Forms and specifications of a target's arrays. `takes` is the form of its inputs, or "" if they aren't arrays.
    Specifications are empty if unknown. Free axes are padded with `pad`; if it is None, all rows of a call must have the
    same shape. `library` is `torch`, or empty for numpy."""

    takes: str
    gives: bool
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    pad: float | None = None
    library: str = ""

    @property
    def together(self) -> RowsTogether:
        if self.takes in ("", LIST) or not any(map(free_axes, self.inputs)):
            return RowsTogether.ANY
        return RowsTogether.SHAPE if self.pad is None else RowsTogether.PADDED


def form_of(annotation: Any) -> str:
    """Return the form of arrays that an annotation means, or "" if none. A union has the form of its first member, provided
    that all members but None have a form."""
    members = [member for member in members_of(annotation) if member is not None and member is not type(None)]
    if members and members[0] is not annotation:
        forms = [form_of(member) for member in members]
        return forms[0] if all(forms) else ""
    if is_array(annotation):
        return ARRAY
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if not isinstance(origin, type):
        return ""
    if issubclass(origin, Mapping) and len(arguments) == 2 and is_array(arguments[1]):
        return NAMED
    members = [member for argument in arguments for member in members_of(argument)]
    return LIST if issubclass(origin, Sequence) and any(map(is_array, members)) else ""


def kind_of_arrays(call: Any, hints: Mapping[str, Any], first: str) -> ArrayKind | None:
    """Return a target's ArrayKind from its annotations and attributes, or None if it uses no arrays. If no array is annotated,
    the attributes `inputs` and `outputs` are ignored unless they are specifications, since they may mean something else. Raises
    NoArrays if numpy is missing, or an attribute is invalid."""
    input_hint, output_hint = hints.get(first), hints.get("return")
    inputs, outputs = getattr(call, "inputs", None), getattr(call, "outputs", None)
    takes = form_of(input_hint)
    if not takes and _is_unspecific(input_hint):
        takes = _form_of_attributes(call, inputs, listed=input_hint in (list, Sequence))
    gives = bool(takes or form_of(output_hint)) or (_are_specs(outputs) and _is_unspecific(output_hint))
    if not takes and not gives:
        return None
    numpy()
    wants: tuple[TensorSpec, ...] = ()
    if takes:
        wants = _specs("inputs", inputs) if isinstance(inputs, Mapping) else _specs_of_example(call, takes)
        if takes != NAMED and len(wants) > 1:
            raise NoArrays(
                f"it takes one array, but {'inputs' if isinstance(inputs, Mapping) else 'example'} names {len(wants)}; "
                f"write {first or 'inputs'}: dict[str, np.ndarray]"
            )
    declared = _specs("outputs", outputs) if isinstance(outputs, Mapping) else _specs_of_rows(output_hint)
    kind = ArrayKind(takes, gives, wants, declared, library=_library_of(input_hint))
    return kind._replace(pad=_pad(call, kind)) if takes else kind


def example_of(call: Any, kind: ArrayKind) -> Tensors:
    """Return a target's example input as one row, or zeros if there is none. Raises NoArrays if the example doesn't fit."""
    example = getattr(call, "example", None)
    if example is None or callable(example):
        return pack([_zeros(spec) for spec in kind.inputs], single=True)
    np = numpy()
    rows = example if isinstance(example, Mapping) else {kind.inputs[0].name: example}
    datatypes = {spec.name: spec.datatype for spec in kind.inputs}
    try:
        tensors = [
            tensor_of(str(name), column(np.asarray(row)[None], datatypes.get(str(name), "")))
            for name, row in rows.items()
        ]
        heads = check_heads([tensor.head for tensor in tensors], kind.inputs)
    except NoOutput as exc:
        raise NoArrays(f"its attribute example is {exc}{exc.mend}") from None
    except NoTensors as exc:
        raise NoArrays(
            f"its attribute example does not fit its attribute inputs or shapes: {str(exc).replace('the model', 'it')}"
        ) from None
    return pack([Tensor(head, tensor.data) for head, tensor in zip(heads, tensors, strict=True)], single=True)


def _form_of_attributes(call: Any, inputs: Any, *, listed: bool) -> str:
    """Return the form of inputs that a target's attributes specify, or ""."""
    if _are_specs(inputs):
        return LIST if listed else NAMED
    example = getattr(call, "example", None)
    if not are_arrays(example):
        return ""
    return LIST if listed else NAMED if isinstance(example, Mapping) else ARRAY


def free_axes(spec: TensorSpec) -> tuple[int, ...]:
    """Return the free axes of a specification, numbered like the axes of a batch."""
    return tuple(axis for axis, size in enumerate(spec.shape, 1) if size == -1)


def _is_unspecific(annotation: Any) -> bool:
    """Return True if an annotation doesn't specify the element type of a list or dict."""
    kind = typing.get_origin(annotation) or annotation
    return kind_of_elements(annotation) is None and kind in (None, Any, object, list, Sequence, dict, Mapping)


def _specs(attribute: str, given: Mapping[Any, Any]) -> tuple[TensorSpec, ...]:
    specs = []
    for name, pair in given.items():
        try:
            datatype, shape = pair
            axes = tuple(-1 if size is None else int(size) for size in shape)
            spec = TensorSpec(str(name), str(datatype).upper(), axes)
        except (TypeError, ValueError):
            raise NoArrays(
                f"its attribute {attribute} has {str(pair)[:80]} for {str(name)!r}; write a datatype and the shape of a row, for example "
                f"{attribute} = {_LINE}"
            ) from None
        if spec.datatype not in SIZES or spec.datatype == JSON:
            known = ", ".join(name for name in SIZES if name != JSON)
            raise NoArrays(
                f"its attribute {attribute} has the datatype {str(datatype)!r} for {spec.name!r}; the datatypes are {known}"
            )
        if any(size < -1 for size in spec.shape):
            raise NoArrays(
                f"its attribute {attribute} has the shape {shown_shape(spec.shape)} for {spec.name!r}; an axis is a size, or -1 for any"
            )
        specs.append(spec)
    if not specs:
        raise NoArrays(f"its attribute {attribute} is empty; name at least one, for example {attribute} = {_LINE}")
    return tuple(specs)


def _are_specs(value: Any) -> bool:
    """Return True if all values of an attribute are specifications: a datatype of the protocol and a shape."""
    return isinstance(value, Mapping) and bool(value) and all(map(_is_spec, value.values()))


def _is_spec(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and isinstance(value[0], str)
        and value[0].upper() in SIZES
        and isinstance(value[1], list | tuple)
    )


def _specs_of_example(call: Any, takes: str) -> tuple[TensorSpec, ...]:
    example = getattr(call, "example", None)
    if example is None or callable(example):
        raise NoArrays(
            "it takes arrays, but does not specify their datatype and shape. Add an attribute example, such as "
            f"example = np.zeros(4, np.float32), or inputs, such as inputs = {_LINE}"
        )
    np = numpy()
    named = example if isinstance(example, Mapping) else {INPUT: example}
    shapes = getattr(call, "shapes", None)
    if isinstance(shapes, Mapping) and (unknown := [str(name) for name in shapes if name not in named]):
        raise NoArrays(f"its attribute shapes names {unknown[0]!r}, which its attribute example does not have")
    specs = []
    for name, value in named.items():
        try:
            array = np.asarray(value)
            known = column(array[None]).datatype
        except (NoOutput, ValueError) as exc:
            mend = getattr(exc, "mend", "")
            raise NoArrays(
                f"its attribute example is {exc if mend else kind_of(value)}{mend or '; set it to an array'}"
            ) from None
        if known == JSON:
            raise NoArrays("its attribute example is an array of objects; set it to an array of numbers or strings")
        row = tuple(array.shape)
        free = shapes.get(name) if isinstance(shapes, Mapping) else shapes
        if free is not None:
            row = _with_free_axes(free, row)
        elif takes == LIST:
            row = tuple(-1 for _ in row)
        specs.append(TensorSpec(str(name), known, row))
    if not specs:
        raise NoArrays(
            "its attribute example is empty; add an array by name, for example {'x': np.zeros(4, np.float32)}"
        )
    return tuple(specs)


def _with_free_axes(given: Any, row: tuple[int, ...]) -> tuple[int, ...]:
    try:
        shape = tuple(-1 if size is None else int(size) for size in given)
    except (TypeError, ValueError):
        shape = (-2,)
    if len(shape) != len(row) or any(want not in (-1, got) for want, got in zip(shape, row, strict=False)):
        line = ", ".join(["None", *map(str, row[1:])]) if row else ""
        raise NoArrays(
            f"its attribute shapes is {str(given)[:80]}, but its example has shape {shown_shape(row)}; write the sizes, with None "
            f"for an axis of any size, for example shapes = [{line}]"
        )
    return shape


def _specs_of_rows(annotation: Any) -> tuple[TensorSpec, ...]:
    """Return the specification of an output annotated as a list of strings, numbers or objects, or () for other annotations."""
    axes = -1
    while isinstance(origin := typing.get_origin(annotation), type) and issubclass(origin, Sequence):
        arguments = [argument for argument in typing.get_args(annotation) if argument is not Ellipsis]
        members = [member for argument in arguments for member in members_of(argument)]
        if len(members) != 1:
            return ()
        annotation, axes = members[0], axes + 1
    kind = typing.get_origin(annotation) or annotation
    if axes < 0 or not isinstance(kind, type):
        return ()
    if typing.is_typeddict(kind):
        kind = dict
    datatype = _LEAVES.get(kind, "")
    if not datatype or (axes and datatype in (BYTES, JSON)):
        return ()
    return (TensorSpec(OUTPUT, datatype, (-1,) * axes),)


def _pad(call: Any, kind: ArrayKind) -> float | None:
    pad = getattr(call, "pad", None)
    if pad is None or callable(pad):
        return None
    if kind.takes != NAMED:
        raise NoArrays(
            "its attribute pad fills up rows of several lengths, but it takes one array, which has no place for the lengths. Write "
            f"dict[str, np.ndarray] to get the lengths of an input `x` as `x{LENGTHS}`, or leave out pad"
        )
    if isinstance(pad, bool) or not isinstance(pad, int | float):
        raise NoArrays(f"its attribute pad is of type {kind_of(pad)}; write a number, for example pad = 0")
    free = [spec for spec in kind.inputs if free_axes(spec)]
    if not free:
        raise NoArrays(
            "its attribute pad fills up free axes, but its inputs have none; leave it out, or write -1 for an axis"
        )
    names = {spec.name for spec in kind.inputs}
    for spec in free:
        if spec.name + LENGTHS in names:
            raise NoArrays(
                f"its input {spec.name + LENGTHS!r} has the name that pad uses for the lengths of {spec.name!r}; rename it"
            )
        if spec.datatype in DTYPES and not _can_hold(spec.datatype, pad):
            raise NoArrays(
                f"its attribute pad is {pad}, which does not fit the {spec.datatype} of {spec.name!r}; write pad = 0"
            )
    return pad


def _can_hold(datatype: str, number: float) -> bool:
    np = numpy()
    if datatype[:2] == "FP":
        return True
    if datatype == "BOOL":
        return number in (0, 1)
    limits = np.iinfo(DTYPES[datatype])
    return number == number and limits.min <= number <= limits.max and number == int(number)


def _zeros(spec: TensorSpec) -> Tensor:
    """Return one row of zeros for a specification. Free axes get length 1."""
    shape = (1, *(abs(size) for size in spec.shape))
    count = 1
    for size in shape:
        count *= size
    return Tensor(TensorHead(spec.name, spec.datatype, shape), bytes((SIZES[spec.datatype] or 4) * count))


def _library_of(annotation: Any) -> str:
    for member in (annotation, *typing.get_args(annotation)):
        kind = typing.get_origin(member) or member
        if is_array(kind) and kind.__module__.partition(".")[0] == "torch":
            return "torch"
    return ""

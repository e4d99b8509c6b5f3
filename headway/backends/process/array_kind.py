"""How a target takes and gives arrays, by its annotations and attributes.

    form     the target takes                  and gives
    array    one array, rows along axis 0      one array
    named    a dict of such arrays by name     a dict of them
    list     a list of arrays, one per row     a list of them

    attribute   meaning
    example     one row of its inputs: an array, or a dict of them by name
    shapes      shape of a row with free axes, which are None or -1
    inputs      datatype and shape of a row of each input by name, instead of an example
    outputs     the same for its outputs, which are checked against it
    pad         number to pad free axes with, so that rows of several lengths run together

Arrays of other libraries are annotated by their own classes. A target gets torch tensors as such, all others as numpy arrays.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headway.backends.process.array_data import DTYPES, column, numpy, tensor_of
from headway.backends.process.values import (
    NoArrays,
    NoOutput,
    are_arrays,
    is_array,
    kind_of,
    kind_of_elements,
    members_of,
)
from headway.core.tensors import BYTES, JSON, SIZES, NoTensors, Tensor, TensorHead, check_heads, pack, shown_shape
from headway.model import RowsTogether, Tensors, TensorSpec

ARRAY, NAMED, LIST = "array", "named", "list"
INPUT, OUTPUT = "INPUT", "OUTPUT"
"""Names of an unnamed input and output in the Open Inference Protocol's metadata."""
LENGTHS = "_lengths"
"""Suffix of the input that holds the lengths of a padded input's rows."""
_LINE = '{"x": ("FP32", [4])}'
"""Specifications as authors write them."""
_LEAVES = {bool: "BOOL", int: "INT64", float: "FP64", str: BYTES, dict: JSON, Mapping: JSON}


class ArrayKind(NamedTuple):
    """How a target takes and gives arrays. `takes` is the form of its inputs, or "" if it takes no arrays.

    Specifications are empty if unknown. Free axes are padded with `pad`. If that is None, all rows of a call must have one
    shape. `library` is `torch`, or empty for numpy.
    """

    takes: str
    gives: bool
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    pad: float | None = None
    library: str = ""

    @property
    def together(self) -> RowsTogether:
        """Rows that may share a call."""
        if self.takes in ("", LIST) or not any(map(free_axes, self.inputs)):
            return RowsTogether.ANY
        return RowsTogether.SHAPE if self.pad is None else RowsTogether.PADDED


def form_of(annotation: Any) -> str:
    """Return the form of arrays that an annotation means, or "" for none. A union has the form of its first member if all
    members but None have a form."""
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
    """Return how a target takes and gives arrays, by its annotations and attributes, or None if it doesn't.

    Attributes `inputs` and `outputs` that aren't specifications count only if an annotation has arrays, because a target
    that takes texts may use these names for something else. Raises NoArrays if numpy isn't installed, or an attribute is
    invalid.
    """
    taken, given = hints.get(first), hints.get("return")
    inputs, outputs = getattr(call, "inputs", None), getattr(call, "outputs", None)
    takes = form_of(taken)
    if not takes and _says_nothing(taken):
        takes = _form_of_attributes(call, inputs, listed=taken in (list, Sequence))
    gives = bool(takes or form_of(given)) or (_are_specs(outputs) and _says_nothing(given))
    if not takes and not gives:
        return None
    numpy()
    wants: tuple[TensorSpec, ...] = ()
    if takes:
        wants = _specs("inputs", inputs) if isinstance(inputs, Mapping) else _specs_of_example(call, takes)
        if takes != NAMED and len(wants) > 1:
            raise NoArrays(
                f"it takes one array, and {'inputs' if isinstance(inputs, Mapping) else 'example'} names {len(wants)}; "
                f"write {first or 'inputs'}: dict[str, np.ndarray]"
            )
    said = _specs("outputs", outputs) if isinstance(outputs, Mapping) else _specs_of_rows(given)
    kind = ArrayKind(takes, gives, wants, said, library=_library_of(taken))
    return kind._replace(pad=_pad(call, kind)) if takes else kind


def example_of(call: Any, kind: ArrayKind) -> Tensors:
    """Return a target's example input as one row, or zeros. Raises NoArrays if it doesn't fit the specifications."""
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
    """Return the form of arrays that a target's attributes say it takes, without an annotation, or "" if they say nothing."""
    if _are_specs(inputs):
        return LIST if listed else NAMED
    example = getattr(call, "example", None)
    if not are_arrays(example):
        return ""
    return LIST if listed else NAMED if isinstance(example, Mapping) else ARRAY


def free_axes(spec: TensorSpec) -> tuple[int, ...]:
    """Return the free axes of a specification, numbered as axes of a batch."""
    return tuple(axis for axis, size in enumerate(spec.shape, 1) if size == -1)


def _says_nothing(annotation: Any) -> bool:
    """Return True if an annotation doesn't say what is in a list or dict."""
    kind = typing.get_origin(annotation) or annotation
    return kind_of_elements(annotation) is None and kind in (None, Any, object, list, Sequence, dict, Mapping)


def _specs(attribute: str, given: Mapping[Any, Any]) -> tuple[TensorSpec, ...]:
    """Read specifications from a target's attribute. Raises NoArrays."""
    specs = []
    for name, pair in given.items():
        try:
            datatype, shape = pair
            axes = tuple(-1 if size is None else int(size) for size in shape)
            spec = TensorSpec(str(name), str(datatype).upper(), axes)
        except (TypeError, ValueError):
            raise NoArrays(
                f"its attribute {attribute} has {str(pair)[:80]} for {str(name)!r}; write a datatype and the shape of a row, as in "
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
        raise NoArrays(f"its attribute {attribute} is empty; name at least one, as in {attribute} = {_LINE}")
    return tuple(specs)


def _are_specs(value: Any) -> bool:
    """Return True if an attribute surely holds specifications: each a datatype of the protocol and a shape."""
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
    """Return the specifications of an example: an array, or several by name. Raises NoArrays."""
    example = getattr(call, "example", None)
    if example is None or callable(example):
        raise NoArrays(
            "it takes arrays, and does not say of which datatype and shape. Give it an attribute example, as in "
            f"example = np.zeros(4, np.float32), or inputs, as in inputs = {_LINE}"
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
                f"its attribute example is {exc if mend else kind_of(value)}{mend or '; give it an array'}"
            ) from None
        if known == JSON:
            raise NoArrays("its attribute example is an array of objects; give it an array of numbers or of texts")
        row = tuple(array.shape)
        free = shapes.get(name) if isinstance(shapes, Mapping) else shapes
        if free is not None:
            row = _with_free_axes(free, row)
        elif takes == LIST:
            row = tuple(-1 for _ in row)
        specs.append(TensorSpec(str(name), known, row))
    if not specs:
        raise NoArrays("its attribute example is empty; give it an array by name, as in {'x': np.zeros(4, np.float32)}")
    return tuple(specs)


def _with_free_axes(given: Any, row: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a row with its free axes, from the attribute and the example. Raises NoArrays."""
    try:
        shape = tuple(-1 if size is None else int(size) for size in given)
    except (TypeError, ValueError):
        shape = (-2,)
    if len(shape) != len(row) or any(want not in (-1, got) for want, got in zip(shape, row, strict=False)):
        line = ", ".join(["None", *map(str, row[1:])]) if row else ""
        raise NoArrays(
            f"its attribute shapes is {str(given)[:80]}, but its example has shape {shown_shape(row)}; write the sizes, with None "
            f"for an axis of any size, as in shapes = [{line}]"
        )
    return shape


def _specs_of_rows(annotation: Any) -> tuple[TensorSpec, ...]:
    """Return the specification of an output annotated as a list of texts, numbers or objects, or else ()."""
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
    """Return the number that a target's free axes are padded with. Raises NoArrays."""
    pad = getattr(call, "pad", None)
    if pad is None or callable(pad):
        return None
    if kind.takes != NAMED:
        raise NoArrays(
            "its attribute pad fills up rows of several lengths, and it takes one array, without a place for the lengths. Write "
            f"dict[str, np.ndarray], which has the lengths of an input `x` as `x{LENGTHS}`, or leave pad out"
        )
    if isinstance(pad, bool) or not isinstance(pad, int | float):
        raise NoArrays(f"its attribute pad is of type {kind_of(pad)}; write a number, as in pad = 0")
    free = [spec for spec in kind.inputs if free_axes(spec)]
    if not free:
        raise NoArrays(
            "its attribute pad fills up free axes, and its inputs have none; leave it out, or write -1 for an axis"
        )
    names = {spec.name for spec in kind.inputs}
    for spec in free:
        if spec.name + LENGTHS in names:
            raise NoArrays(
                f"its input {spec.name + LENGTHS!r} has the name under which pad gives the lengths of {spec.name!r}; name it otherwise"
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
    """Return one row of zeros of a specification. Free axes get length 1."""
    shape = (1, *(abs(size) for size in spec.shape))
    count = 1
    for size in shape:
        count *= size
    return Tensor(TensorHead(spec.name, spec.datatype, shape), bytes((SIZES[spec.datatype] or 4) * count))


def _library_of(annotation: Any) -> str:
    """Return `torch` if an annotation has its arrays, or "" for numpy and other libraries."""
    for member in (annotation, *typing.get_args(annotation)):
        kind = typing.get_origin(member) or member
        if is_array(kind) and kind.__module__.partition(".")[0] == "torch":
            return "torch"
    return ""

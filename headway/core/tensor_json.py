"""Tensors in JSON: from nested arrays to bytes and back. To check a text's shape, all its brackets and commas are compared at
once. The numbers between them are read PAGE at a time, so that there is never more than a page of Python numbers."""

from __future__ import annotations

import math
import re
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from headway.core.json_pages import SHORT, Pages, Steps, drop_strings, find_strings, finish, members
from headway.core.tensors import (
    BYTES,
    JSON,
    MOST_ELEMENTS,
    MOST_TENSORS,
    SIZES,
    NoTensors,
    Tensor,
    TensorHead,
    check_heads,
    count_of,
    header_of,
    join_elements,
    pages_of_elements,
    quoted,
    shown_shape,
    shown_specs,
    split_elements,
)
from headway.core.tensors import pack as packed_value
from headway.core.tensors import unpack as unpacked
from headway.model import Octets, Tensors, TensorSpec, Value

PAGE = 1024  # Numbers read or written at a time.
_TYPECODES = {
    "BOOL": "B", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip
_RANGES = {
    name: (0, 2 ** (8 * SIZES[name]) - 1)
    if name[0] == "U"
    else (-(2 ** (8 * SIZES[name] - 1)), 2 ** (8 * SIZES[name] - 1) - 1)
    for name in SIZES
    if "INT" in name
}
_LARGEST = {
    "FP16": math.nextafter(65520.0, 0),
    "BF16": 2.0**128 - 2.0**119 - 2.0**104,
    "FP32": math.nextafter(2.0**128 - 2.0**103, 0),
    "FP64": 1.7976931348623157e308,
}  # For each datatype with a fraction, the largest number that rounds to a finite one.
BOUNDS = {**_RANGES, **{name: (-most, most) for name, most in _LARGEST.items()}}  # Range of each datatype.
_HALVES = ("FP16", "BF16")  # Two-byte datatypes with a fraction.
_MOST_WITH_EMPTY = 1 << 16  # Limit in bytes on a text that contains empty arrays.
_MOST_DIGITS = 40  # Number of characters of a wrong element that a message shows.
_OTHERS = bytes(set(range(256)) - set(b"[],"))
_BRACKETS = bytes.maketrans(b"[]", b"  ")
# JSON types by their first byte. Any other byte begins a number.
_NAMES = {b"{": "object", b'"': "str", b"t": "bool", b"f": "bool", b"n": "null"}
_BLANK = b" \t\r\n"
_read_floats = msgspec.json.Decoder(list[float]).decode
_read_integers = msgspec.json.Decoder(list[int]).decode
_read_booleans = msgspec.json.Decoder(list[bool]).decode
_READERS: dict[str, tuple[Callable[[bytes], list[Any]], Callable[[bytes], list[list[Any]]]]] = {
    name: (reader, nested)
    for names, reader, nested in (
        (_LARGEST, _read_floats, msgspec.json.Decoder(list[list[float]]).decode),
        (_RANGES, _read_integers, msgspec.json.Decoder(list[list[int]]).decode),
        (("BOOL",), _read_booleans, msgspec.json.Decoder(list[list[bool]]).decode),
    )
    for name in names
}  # Decoders for a vector and for several vectors, by datatype.
_read_texts = msgspec.json.Decoder(list[str]).decode
_read_any = msgspec.json.Decoder(list[Any]).decode
_encode = msgspec.json.Encoder().encode


class NoNumber(NoTensors):
    """The tensors contain NaN or an infinity, which JSON can't represent."""


def read(text: bytes, name: str, datatype: str, shape: Sequence[int]) -> bytes:
    """Return a tensor's data from nested arrays, or from a flat array of all elements, which the protocol allows. Raises NoTensors,
    naming the input, if the text isn't such an array or doesn't have this shape."""
    if datatype in (BYTES, JSON):
        return _read_elements(text, name, shape)
    bare = text.translate(None, _OTHERS)
    count = count_of(shape)
    if not (count and _is_skeleton(bare, (count,))):
        _check_shape(text, bare, name, shape)
    return b"".join(_numbers(text, name, datatype)) if count else b""


def read_in_steps(text: bytes, name: str, datatype: str, shape: Sequence[int]) -> Steps[bytes]:
    """Return a tensor's data from a long text that is valid JSON; see `read`."""
    if len(text) <= SHORT:
        return read(text, name, datatype, shape)
    if datatype in (BYTES, JSON):
        return (yield from _elements_in_steps(text, name, shape))
    pages: list[bytes] = []
    count = count_of(shape)
    bare = text.translate(None, _OTHERS)
    if not (count and _is_skeleton(bare, (count,))):
        if len(text) > _MOST_WITH_EMPTY:
            _refuse_empty(text, name)
        yield 0
        _check_shape(text, bare, name, shape)
    for page in _numbers(text, name, datatype) if count else ():
        pages.append(page)
        yield 0
    return b"".join(pages)


def _check_shape(text: bytes, bare: bytes, name: str, shape: Sequence[int]) -> None:
    """Check the shape of nested arrays. `bare` contains their brackets and commas."""
    if not _matches(text, bare, shape):
        sent = shape_of(text)
        described = f"of shape {shown_shape(sent)}" if sent else "not an array of numbers"
        raise NoTensors(f"the data of the input {quoted(name)} are {described}; expected shape {shown_shape(shape)}")


def shape_of(text: bytes) -> tuple[int, ...]:
    """Return the shape of nested arrays, or () if they have none. Only the first row at each level is looked at."""
    bare = text.translate(None, _OTHERS)
    axes = len(bare) - len(bare.lstrip(b"["))
    if not axes or _has_empty(text):
        return _small_shape(text) if axes else ()
    shape: list[int] = []
    size = 0
    for depth in range(1, axes + 1):
        end = bare.find(b"]" * depth)
        if end < 0:
            return ()
        begin = axes - depth
        inner = end + depth - begin - 2  # Without the surrounding brackets.
        if depth == 1:
            shape.insert(0, inner + 1)
        else:
            if (inner + 1) % (size + 1):
                return ()
            shape.insert(0, (inner + 1) // (size + 1))
        size = inner + 2
    return tuple(shape)


def write(value: Octets, *, strict: bool = True) -> bytes:
    """Return packed tensors as JSON: a single one as nested arrays, several as an object with such arrays by name. Raises
    NoTensors if they are damaged. JSON has no NaN or infinity: these raise NoTensors if `strict`, and otherwise become null."""
    return b"".join(pieces(value, strict=strict))


def pieces(value: Octets, *, strict: bool = True) -> Iterator[bytes]:
    """Yield packed tensors as JSON, in pieces; see `write`."""
    single = header_of(value).single
    tensors = unpacked(value)
    if len(tensors) == 1:
        yield from nested(tensors[0], single=single, strict=strict)
        return
    opening = b"{"
    for tensor in tensors:
        yield opening + _encode(tensor.head.name) + b":"
        yield from nested(tensor, single=single, strict=strict)
        opening = b","
    yield b"}" if tensors else b"{}"


def nested(tensor: Tensor, *, single: bool = False, strict: bool = True) -> Iterator[bytes]:
    """Yield a tensor's nested arrays in pieces. If `single`, leave out the row axis. If `strict`, NaN and infinities raise NoTensors."""
    head = tensor.head
    shape = head.shape[1:] if single else head.shape
    if not count_of(shape):
        yield _encode(_hollow(shape))
    elif SIZES[head.datatype]:
        yield from _nested_numbers(memoryview(tensor.data), head, shape, strict)
    else:
        texts = _texts(split_elements(tensor.data), head, strict)
        for size in reversed(shape):
            texts = [b"[%b]" % b",".join(texts[at : at + size]) for at in range(0, len(texts), size)]
        yield texts[0]


def flat(tensor: Tensor, *, strict: bool = True) -> Iterator[bytes]:
    """Yield a tensor's elements as one flat JSON array, in pieces. Raises NoTensors."""
    head = tensor.head
    opening = b"["
    if not SIZES[head.datatype]:
        for elements in pages_of_elements(tensor.data, PAGE):
            yield opening + b",".join(_texts(elements, head, strict))
            opening = b","
        yield b"]" if opening == b"," else b"[]"
        return
    step = PAGE * SIZES[head.datatype]
    for begin in range(0, len(tensor.data), step):
        page = memoryview(tensor.data)[begin : begin + step]
        yield opening + _encoded(page, head, (len(page) // SIZES[head.datatype],), strict)[1:-1]
        opening = b","
    yield b"]" if opening == b"," else b"[]"


def as_fp32(tensor: Tensor) -> bytes | memoryview:
    """Return a tensor's numbers as FP32. Raises NoTensors if a number is out of range."""
    if tensor.head.datatype == "FP32":
        return tensor.data
    numbers = _numbers_of(tensor)
    try:
        return struct.pack(f"<{len(numbers)}f", *numbers)
    except OverflowError:
        raise NoTensors(
            f"the output {quoted(tensor.head.name)} contains a number that four bytes cannot hold"
        ) from None


def widened(tensor: Tensor, datatype: str) -> bytes | memoryview:
    """Return a tensor's data in a datatype that can hold all its numbers; see `headway.core.tensors.check_head`."""
    if tensor.head.datatype == datatype:
        return tensor.data
    numbers = _numbers_of(tensor)
    if datatype in _HALVES:
        return _packed(list(numbers), datatype)
    return array(_TYPECODES[datatype], numbers).tobytes()


def _numbers_of(tensor: Tensor) -> Sequence[Any]:
    data: Any = memoryview(tensor.data)
    datatype = tensor.head.datatype
    return _halves(data, datatype) if datatype in _HALVES else data.cast("B").cast(_TYPECODES[datatype])


def _nested_numbers(data: memoryview, head: TensorHead, shape: Sequence[int], strict: bool) -> Iterator[bytes]:
    if len(shape) < 2 or len(data) <= PAGE * SIZES[head.datatype]:
        if len(shape) == 1 and len(data) > PAGE * SIZES[head.datatype]:
            yield from flat(Tensor(head, data), strict=strict)
        else:
            yield _encoded(data, head, shape, strict)
        return
    step = len(data) // shape[0]
    together = max(PAGE * SIZES[head.datatype] // step, 1)
    for place in range(0, shape[0], together):
        end = min(place + together, shape[0])
        rows = data[place * step : end * step]
        opening = b"," if place else b"["
        if together > 1:
            yield opening + _encoded(rows, head, (end - place, *shape[1:]), strict)[1:-1]
        else:
            pieces = _nested_numbers(rows, head, shape[1:], strict)
            yield opening + next(pieces)
            yield from pieces
    yield b"]"


def _encoded(data: memoryview, head: TensorHead, shape: Sequence[int], strict: bool) -> bytes:
    datatype = head.datatype
    if datatype in _HALVES:
        data, datatype = memoryview(array("d", _halves(data, datatype))), "FP64"
    code = "?" if datatype == "BOOL" else _TYPECODES[datatype]
    numbers: Any = data.cast("B")
    nested = numbers.cast(code, tuple(shape)).tolist() if shape else numbers.cast(code)[0]
    text = _encode(nested)
    if strict and b"null" in text:
        raise NoNumber(
            f"the output {quoted(head.name)} contains NaN or an infinity, which JSON cannot represent; request it in binary"
        )
    return text


def _halves(data: memoryview, datatype: str) -> Sequence[float]:
    if datatype == "FP16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    return array("f", array("I", [bits << 16 for bits in array("H", bytes(data))]).tobytes())


def _texts(elements: list[bytes], head: TensorHead, strict: bool) -> list[bytes]:
    return elements if head.datatype == JSON else [_text(element, head.name, strict) for element in elements]


def _text(element: bytes, name: str, strict: bool) -> bytes:
    """Return an element of BYTES as JSON text. Raises NoTensors if it isn't UTF-8."""
    try:
        return _encode(element.decode("utf-8", "strict" if strict else "backslashreplace"))
    except UnicodeDecodeError:
        raise NoTensors(
            f"the output {quoted(name)} contains bytes that are not valid UTF-8 and cannot be sent in JSON; request it in binary"
        ) from None


def _matches(text: bytes, bare: bytes, shape: Sequence[int]) -> bool:
    """Return True if nested arrays have a shape, judging by the brackets and commas of their text."""
    if count_of(shape) == 0 or _has_empty(text):
        bare = text.translate(None, _BLANK)  # An empty axis hides the axes inside it.
        return 0 in shape and (bare == b"[]" or _is_skeleton(bare, shape[: list(shape).index(0) + 1]))
    return _is_skeleton(bare, shape)


def _is_skeleton(bare: bytes, shape: Sequence[int]) -> bool:
    """Return True if a text has a shape's brackets and commas. Lengths are compared first, because a shape may be of any size."""
    arrays = sum(math.prod(shape[:axis]) for axis in range(len(shape)))
    commas = sum(math.prod(shape[:axis]) * max(shape[axis] - 1, 0) for axis in range(len(shape)))
    return len(bare) == 2 * arrays + commas and bare == _skeleton(shape)


def _refuse_empty(text: bytes, name: str) -> None:
    if _has_empty(text):
        raise NoTensors(
            f"the input {quoted(name)} has arrays without elements, which are accepted in at most {_MOST_WITH_EMPTY} bytes of JSON; leave them out"
        )


def _has_empty(text: bytes) -> bool:
    return b"[]" in text.translate(None, _BLANK)


def _skeleton(shape: Sequence[int]) -> bytes:
    skeleton = b""
    for size in reversed(shape):
        skeleton = b"[" + (skeleton + b",") * (size - 1) + skeleton + b"]"
    return skeleton


def _small_shape(text: bytes) -> tuple[int, ...]:
    """Return the shape of nested arrays with an empty axis, or () if they have none."""
    if len(text) > PAGE:  # When they are read later, it will turn out whether all of them are empty.
        return (*shape_of(text.translate(None, _BLANK).replace(b"[]", b"0")), 0)
    try:
        layer: list[Any] = _read_any(text)
    except msgspec.MsgspecError:
        return ()
    shape = [len(layer)]
    while layer and all(isinstance(part, list) for part in layer):
        lengths = {len(part) for part in layer}
        if len(lengths) > 1:
            return ()
        shape.append(lengths.pop())
        layer = [part for outer in layer for part in outer]
    return () if layer else tuple(shape)


def _numbers(text: bytes, name: str, datatype: str) -> Iterator[bytes]:
    """Yield the numbers in a text as bytes of a tensor, a page at a time. The brackets must have been checked."""
    place = 0
    for page in _pages(text.translate(_BRACKETS)):
        try:
            numbers = _READERS[datatype][0](b"[" + page + b"]")
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise NoTensors(f"the data of the input {quoted(name)} are not {datatype}: {_placed(exc, place)}") from None
        try:
            yield _packed(numbers, datatype)
        except OverflowError:
            least, most = BOUNDS[datatype]
            wrong = next(at for at, number in enumerate(numbers) if not least <= number <= most)
            raise NoTensors(
                f"element {place + wrong} of the input {quoted(name)} is {_beginning(numbers[wrong])}, which is out of the range of {datatype}"
            ) from None
        place += len(numbers)


def _pages(text: bytes) -> Iterator[bytes]:
    begin, end = 0, len(text)
    while begin < end:
        cut = begin + PAGE * 8
        cut = end if cut >= end else text.find(b",", cut)
        if cut < 0:
            cut = end
        yield text[begin:cut]
        begin = cut + 1


def _placed(exc: Exception, place: int) -> str:
    """Return a decoder's message, with an element's position in the page replaced by its position in the whole data. `place` is
    where the page begins."""
    return re.sub(r" - at `\$\[(\d+)\]`", lambda match: f", at element {place + int(match[1])}", str(exc))


def _packed(numbers: list[Any], datatype: str) -> bytes:
    """Pack numbers into the bytes of a tensor. Raises OverflowError if one is out of range."""
    if (
        datatype in ("FP32", "BF16")
        and numbers
        and (max(numbers) > _LARGEST[datatype] or min(numbers) < -_LARGEST[datatype])
    ):
        raise OverflowError
    if datatype == "FP16":
        return struct.pack(f"<{len(numbers)}e", *numbers)
    if datatype == "BF16":  # Rounded to the nearest, ties to even.
        bits = array("I", array("f", numbers).tobytes())
        return array("H", [(number + 0x7FFF + (number >> 16 & 1)) >> 16 for number in bits]).tobytes()
    return array(_TYPECODES[datatype], numbers).tobytes()


def _beginning(element: object) -> str:
    text = _encode(element).decode()
    return text if len(text) <= _MOST_DIGITS else f"{text[:_MOST_DIGITS]}…"


def _read_elements(text: bytes, name: str, shape: Sequence[int]) -> bytes:
    try:
        layer: list[Any] = _read_any(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise NoTensors(f"the data of the input {quoted(name)} are not an array of strings: {exc}") from None
    sizes = [len(layer)]
    while layer and isinstance(layer[0], list):
        if not all(isinstance(part, list) and len(part) == len(layer[0]) for part in layer):
            raise NoTensors(f"the data of the input {quoted(name)} are nested arrays of unequal lengths")
        sizes.append(len(layer[0]))
        layer = [part for outer in layer for part in outer]
    shown = tuple(shape[: list(shape).index(0) + 1] if 0 in shape else shape)  # An empty axis hides the axes inside it.
    if tuple(sizes) not in (shown, (count_of(shape),)):
        raise NoTensors(
            f"the data of the input {quoted(name)} are of shape {shown_shape(sizes)}; expected shape {shown_shape(shape)}"
        )
    if len(layer) > MOST_ELEMENTS:
        raise NoTensors(
            f"the input {quoted(name)} has {len(layer)} elements of {BYTES}; at most {MOST_ELEMENTS} are allowed"
        )
    if wrong := next(((place, element) for place, element in enumerate(layer) if not isinstance(element, str)), None):
        raise NoTensors(f"element {wrong[0]} of the input {quoted(name)} is {_beginning(wrong[1])}; expected a string")
    return join_elements(element.encode() for element in layer)


def _elements_in_steps(text: bytes, name: str, shape: Sequence[int]) -> Steps[bytes]:
    count, pages = count_of(shape), Pages(text, known=True, reach=PAGE * 4)
    bare, data, known = [], [], 0
    for page in pages:
        texts = find_strings(page)
        if (known := known + len(texts)) > MOST_ELEMENTS:
            raise NoTensors(
                f"the input {quoted(name)} has more than {MOST_ELEMENTS} elements of {BYTES}; at most {MOST_ELEMENTS} are allowed"
            )
        try:
            data.append(join_elements([element.encode() for element in _read_texts(b"[%b]" % b",".join(texts))]))
        except msgspec.MsgspecError as exc:
            raise NoTensors(f"the data of the input {quoted(name)} are not an array of strings: {exc}") from None
        bare.append(drop_strings(b"", page))
        yield 0
    skeleton = b",".join(bare).translate(None, _BLANK)
    if skeleton.translate(None, b"[],"):
        raise NoTensors(f"the data of the input {quoted(name)} are not an array of strings; expected only strings")
    if known != count or (not _is_skeleton(skeleton, (count,)) and not _is_skeleton(skeleton, shape)):
        raise NoTensors(
            f"the data of the input {quoted(name)} are {known} strings, which don't match its shape {shown_shape(shape)}"
        )
    return b"".join(data)


def _hollow(shape: Sequence[int]) -> list[Any]:
    return [_hollow(shape[1:]) for _ in range(shape[0])] if shape else []


def tensors_of(value: Value, specs: Sequence[TensorSpec]) -> Tensors:
    """Return the tensors of a JSON value: one or several rows as nested arrays, or an object with such arrays by name. Raises
    NoTensors if the value has none, or doesn't fit the model's inputs `specs`, or if these are unknown (empty)."""
    return finish(tensors_in_steps(value, specs))


def tensors_in_steps(value: Value, specs: Sequence[TensorSpec]) -> Steps[Tensors]:
    """Return the tensors of a JSON value that may be long; see `tensors_of`."""
    if isinstance(value, Octets):
        if isinstance(value, Tensors):
            return value
        raise NoTensors("the input is octets; expected an array")
    text = _encode(value) if isinstance(value, str) else bytes(value)
    if not specs:
        raise NoTensors(
            "it is not known which arrays the model takes: give its target an `example` or `inputs`, or specify datatype and shape with "
            "the Open Inference Protocol (/v2)"
        )
    tensors = []
    single = None
    for spec, array_text in (yield from _given(text, specs)):
        small = _read_small(array_text, spec) if len(array_text) <= PAGE else None
        if small is None and len(array_text) > _MOST_WITH_EMPTY:
            _refuse_empty(array_text, spec.name)
            yield 0
        shape, alone = _shape_for(array_text, spec) if small is None else small[:2]
        yield 0
        if single is not None and alone is not single:
            raise NoTensors(
                f"the input {quoted(spec.name)} has {'no' if alone else 'an'} axis of rows, unlike those before it"
            )
        single = alone
        full = (1, *shape) if alone else shape
        if small is not None:
            data = small[2]
        else:
            numbers = array_text if shape else b"[" + array_text + b"]"
            data = yield from read_in_steps(numbers, spec.name, spec.datatype, shape or (1,))
        tensors.append(Tensor(TensorHead(spec.name, spec.datatype, full), data))
        yield 0
    check_heads([tensor.head for tensor in tensors], specs)
    return packed_value(tensors, single=bool(single))


def _given(text: bytes, specs: Sequence[TensorSpec]) -> Steps[list[tuple[TensorSpec, bytes]]]:
    if text[:1] != b"{" or (len(specs) == 1 and not specs[0].shape):
        if len(specs) != 1:
            raise NoTensors(f"expected an object with arrays by name; the model takes {shown_specs(specs)}")
        return [(specs[0], text)]
    arrays = yield from members(text, MOST_TENSORS)
    if arrays is None:
        raise NoTensors(
            f"the input has more than {MOST_TENSORS} members, which is the limit; the model takes {shown_specs(specs)}"
        )
    if missing := [spec for spec in specs if spec.name not in arrays]:
        raise NoTensors(f"the input {quoted(missing[0].name)} is missing; the model takes {shown_specs(specs)}")
    if unknown := [name for name in arrays if all(spec.name != name for spec in specs)]:
        raise NoTensors(f"there is no input {quoted(unknown[0])}; the model takes {shown_specs(specs)}")
    return [(spec, arrays[spec.name]) for spec in specs]


def _read_small(text: bytes, spec: TensorSpec) -> tuple[tuple[int, ...], bool, bytes] | None:
    """Parse a short vector, or a few short rows. Returns the shape, True if it is a single row, and the data. Returns None for
    any other text."""
    if len(spec.shape) != 1 or spec.datatype not in _TYPECODES:
        return None
    reader, nested = _READERS[spec.datatype]
    try:
        if text[:2] != b"[[":
            numbers: list[Any] = reader(text)
            return (len(numbers),), True, _packed(numbers, spec.datatype)
        rows = nested(text)
        if len(set(map(len, rows))) != 1:
            return None
        return (len(rows), len(rows[0])), False, _packed(list(chain.from_iterable(rows)), spec.datatype)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
        return None


def _shape_for(text: bytes, spec: TensorSpec) -> tuple[tuple[int, ...], bool]:
    """Return the shape of nested arrays, and True if they are a single row without a row axis. Raises NoTensors."""
    shape = shape_of(text) if text[:1] == b"[" else ()
    if len(shape) == len(spec.shape) and (shape or text[:1] not in b"[{"):
        return shape, True
    if len(shape) == len(spec.shape) + 1:
        return shape, False
    if shape:
        described = f"have {len(shape)} {'axis' if len(shape) == 1 else 'axes'}"
    else:
        described = "are arrays of unequal lengths" if text[:1] == b"[" else f"are `{_NAMES.get(text[:1], 'number')}`"
    raise NoTensors(
        f"the data of the input {quoted(spec.name)} {described}; expected one row, {spec.datatype} of shape {shown_shape(spec.shape)}, or an "
        "array of rows"
    )

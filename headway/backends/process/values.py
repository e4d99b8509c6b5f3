"""Values passed to and from user code: the kinds that a target takes and returns, and how they are encoded.

User code may return any object, and inspecting it may raise any exception.
"""

from __future__ import annotations

import base64
import binascii
import gc
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from headway.backends.process import frames
from headway.core import values
from headway.model import Octets, Output, Tensors, Value, ValueKind

Encode = Callable[[object], Value]  # Function that encodes an output for sending, or raises NoOutput.

_JSON_NAMES: Sequence[tuple[tuple[type, ...], str, str]] = (
    ((str,), "str", "a string"),
    ((dict, Mapping), "object", "an object"),
    ((list, tuple, Sequence), "array", "an array"),
    ((bool,), "bool", "true or false"),
    ((int, float), "number", "a number"),
    ((type(None),), "null", "null"),
)
"""Python types, each with the name and a description of its JSON type."""
_JSON_TYPES = (dict, list, tuple, int, float, Mapping, Sequence)
_SINGLE = (str, bytes, bytearray, int, float, complex, dict)
_OCTETS = (bytes, bytearray, memoryview)
_NUMPY_NAMES = ("np", "numpy")
_MOST_SHOWN = 500
_LARGE = 1 << 16  # Size in bytes of JSON above which the garbage collector is paused.


class NoOutput(Exception):
    """The output can't be sent. The message follows "the target returned", and `mend` tells the author what to write."""

    def __init__(self, text: str, mend: str = "") -> None:
        super().__init__(text)
        self.mend = mend


class NoArrays(Exception):
    """The target can't take or return arrays. The message gives the reason and the remedy, without a final full stop."""


def kind_of(value: object) -> str:
    """Return the name of a value's type, even if its metaclass raises."""
    try:
        return str.__str__(type(value).__name__)[:_MOST_SHOWN]
    except BaseException:
        return "something without a name"


def annotations_of(call: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations of a target's parameters and output, by name, or {} if they can't be resolved."""
    function = call if isinstance(call, types.FunctionType | types.MethodType) else type(call).__call__
    try:
        return typing.get_type_hints(function)
    except NameError as exc:  # The name may be imported only for type checkers.
        return _with_numpy(function) if exc.name in _NUMPY_NAMES else {}
    except BaseException:  # User code may raise anything.
        return {}


def _with_numpy(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations of a function whose module imports numpy only for type checkers."""
    try:
        import inspect

        import numpy

        known = dict.fromkeys(_NUMPY_NAMES, numpy) | inspect.unwrap(function).__globals__
        return typing.get_type_hints(function, known)
    except BaseException:
        return {}


def single_input(call: Callable[..., Any], annotation: Any) -> str:
    """Return the name of an annotated type if it means one input instead of a list of inputs, otherwise ""."""
    if hasattr(call, "__wrapped__"):  # This is the wrapped function's annotation, and the decorator may take a list.
        return ""
    kind = typing.get_origin(annotation) or annotation
    if not _is(kind, _SINGLE):
        return ""
    return str(kind.__name__) if annotation is kind else str(annotation)


def kinds_of(hints: Mapping[str, Any], first: str, example: object = None) -> tuple[ValueKind, ValueKind]:
    """Return the kinds that a target takes and returns, from its annotations or else its example. `first` names its inputs."""
    takes = kind_of_elements(hints.get(first)) or _kind_of_value(example)
    gives = kind_of_elements(hints.get("return"))
    if gives is None:
        gives = ValueKind.TEXT if takes is ValueKind.TEXT else ValueKind.JSON
    return takes, gives


def are_one_mapping(annotation: Any) -> bool:
    """Return True if the annotation of `parameters` means one mapping for all inputs."""
    return any(_is(typing.get_origin(member) or member, (Mapping,)) for member in members_of(annotation))


def is_array(annotation: Any) -> bool:
    """Return True if an annotation is an array type, from numpy or another library."""
    kind = typing.get_origin(annotation) or annotation
    return isinstance(kind, type) and hasattr(kind, "tolist") and hasattr(kind, "__array__")


def has_arrays(annotation: Any) -> bool:
    """Return True if an annotation is an array type, or contains one."""
    return is_array(annotation) or any(map(has_arrays, typing.get_args(annotation)))


def are_arrays(example: object) -> bool:
    """Return True if an example is an array, or a mapping that contains only arrays. A numpy scalar isn't an array."""
    arrays = list(example.values()) if isinstance(example, Mapping) else [example]
    return bool(arrays) and all(is_array(type(array)) and hasattr(array, "__setitem__") for array in arrays)


def list_of(value: object) -> str:
    """Return the annotation that an author would write for a list of values like this, or ""."""
    if isinstance(value, list | tuple):
        inner = list_of(value[0]) if value else ""
        return f"list[{inner or 'list'}]"
    if callable(getattr(value, "tolist", None)):
        return "list[list[float]]"
    kinds = (bool, int, float, dict, str, bytes, bytearray, memoryview)
    return next((f"list[{kind.__name__}]" for kind in kinds if isinstance(value, kind)), "")


def octets_type(annotation: Any) -> type:
    """Return the type in which a target takes bytes, by the annotation of its inputs: bytes, bytearray or memoryview."""
    elements = typing.get_args(annotation)[:1]
    return elements[0] if elements and elements[0] in _OCTETS else bytes


def json_types(annotation: Any) -> Mapping[str, str]:
    """Return the JSON types that a list annotation allows, each with a description ("an object"), or {} if it allows all."""
    allowed: dict[str, str] = {}
    for element in typing.get_args(annotation):
        for member in members_of(element) if element is not Ellipsis else ():
            kind = typing.get_origin(member) or member
            json_type = next(((name, words) for of, name, words in _JSON_NAMES if _is(kind, of)), None)
            if json_type is None:
                return {}
            allowed.update([json_type])
    return allowed


def decoder(
    takes: ValueKind, octets: type = bytes, types: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Value], object]:
    """Return a function that converts an input for user code. It raises ValueError if the input doesn't fit. `octets` is
    the type that the target expects for bytes. `types` are the JSON types that it allows, from `json_types`."""
    if takes is ValueKind.BYTES:
        return partial(_octets_in, octets)
    return _text_in if takes is ValueKind.TEXT else partial(_json_in, types)


def encoder(gives: ValueKind) -> Encode:
    """Return the function that encodes outputs of this kind."""
    return {ValueKind.TEXT: _text_out, ValueKind.JSON: _json_out, ValueKind.BYTES: _octets_out}[gives]


def listed(result: object, gives: ValueKind) -> object:
    """Return the outputs of a batch as a list if they are JSON values in one array of numpy, torch or a similar library. Return
    any other result unchanged."""
    if gives is ValueKind.JSON and not isinstance(result, list | tuple) and callable(getattr(result, "tolist", None)):
        return result.tolist()  # type: ignore[attr-defined]
    return result


def kind_of_elements(annotation: Any) -> ValueKind | None:
    """Return the kind of an annotated list's elements, or None if the annotation doesn't specify it."""
    if hasattr(annotation, "tolist"):
        return ValueKind.JSON
    elements = [element for element in typing.get_args(annotation) if element is not Ellipsis]
    if not elements or not _is(typing.get_origin(annotation), (Sequence,)):
        return None
    kinds = {_kind_of_member(member) for element in elements for member in members_of(element)} - {None}
    return kinds.pop() if len(kinds) == 1 else ValueKind.JSON if kinds else None


def _kind_of_value(value: object) -> ValueKind:
    if value is None or isinstance(value, str):
        return ValueKind.TEXT
    return ValueKind.BYTES if isinstance(value, _OCTETS) else ValueKind.JSON


def members_of(annotation: Any) -> Sequence[Any]:
    """Return the members of a union; of any other annotation, a list with only itself. An Output counts as its value's type.
    Exceptions are left out, because they may replace any output."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if not _is(member, (BaseException,))]
        return [inner for member in members for inner in members_of(member)]
    if typing.get_origin(annotation) is Output:
        return members_of(typing.get_args(annotation)[0])
    return [annotation]


def _kind_of_member(annotation: Any) -> ValueKind | None:
    if _is(annotation, _OCTETS):
        return ValueKind.BYTES
    if _is(annotation, (str,)):
        return ValueKind.TEXT
    plain = annotation in (Any, object, None, type(None))
    if plain or hasattr(annotation, "tolist") or _is(typing.get_origin(annotation) or annotation, _JSON_TYPES):
        return ValueKind.JSON
    return None


def _is(annotation: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, kinds)


def _text_in(value: Value) -> object:
    if isinstance(value, str):
        return value
    raise ValueError(f"this model takes text, but the input is of type {values.name_of(value)}")


_JSON_AS_TEXT = (
    ". It is a string that looks like JSON. Predict and application/octet-stream bodies pass strings on as they are; to send JSON, "
    "use /v1/inference, or ModelInfer over gRPC"
)


def _json_in(types: Mapping[str, str], value: Value) -> object:
    if types and isinstance(value, str | bytes) and values.name_of(value) not in types:
        expected = " or ".join(types.values())
        hint = _JSON_AS_TEXT if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") else ""
        raise ValueError(
            f"this model takes {expected} as an input, but this one is of type {values.name_of(value)}{hint}"
        )
    paused = len(value) > _LARGE and gc.isenabled()
    if paused:  # Otherwise, scanning the growing value repeatedly would take half of the time.
        gc.disable()
    try:
        return values.build(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as exc:
        raise ValueError(f"the input cannot be read as JSON: {exc}") from None
    finally:
        if paused:
            gc.enable()


def _octets_in(octets: type, value: Value) -> object:
    if isinstance(value, Tensors):
        raise ValueError("this model takes bytes, but the input is a set of tensors")
    try:
        if isinstance(value, Octets | str):
            content = value.content if isinstance(value, Octets) else base64.b64decode(value, validate=True)
            return content if isinstance(content, octets) else octets(content)
    except (binascii.Error, ValueError):
        pass
    raise ValueError("this model takes bytes, but the input is not base64")


def _text_out(output: object) -> Value:
    if not isinstance(output, str):
        raise NoOutput(f"{kind_of(output)} for this input, expected str", _annotated(output))
    try:
        size = len(str.encode(output))
    except UnicodeEncodeError:
        raise NoOutput("a lone surrogate for this input, expected proper Unicode") from None
    return _bounded(str.__str__(output), size)


def _annotated(output: object) -> str:
    annotation = list_of(output)
    return annotation and f"; if that is intended, annotate it: write -> {annotation} after its parameters"


def _octets_out(output: object) -> Value:
    if not isinstance(output, _OCTETS):
        raise NoOutput(f"{kind_of(output)} for this input, expected bytes", _annotated(output))
    return _bounded(Octets(bytes(output)), memoryview(output).nbytes)


def _json_out(output: object) -> Value:
    if isinstance(output, str):
        return _text_out(output)
    try:
        text = _encode(output)
        value = values.read(text) if text[:1] == b'"' else _checked(text)
    except UnicodeEncodeError:
        raise NoOutput("a lone surrogate for this input, expected proper Unicode") from None
    except (values.NoValue, msgspec.MsgspecError, UnicodeDecodeError):
        raise NoOutput("msgspec.Raw for this input that is not JSON") from None
    except RecursionError:
        raise NoOutput("something for this input that is nested too deeply") from None
    except (TypeError, ValueError, OverflowError) as exc:
        problem = f"{kind_of(output)} for this input, which is not a JSON value"
        raise NoOutput(f"{problem}: {str(exc)[:_MOST_SHOWN]}") from None
    if b"null" in text and _endless(output):
        raise NoOutput("NaN or an infinity for this input, which are not JSON values")
    return _bounded(value, len(text))


def _checked(text: bytes) -> bytes:
    if not text.isascii():
        text.decode()
    _raw(text)
    return text


def _endless(output: object) -> bool:
    """Return True if an output contains NaN or infinities, which become null in JSON."""
    layer = [msgspec.to_builtins(output, enc_hook=_plain)]
    while layer:
        below: list[object] = []
        for item in layer:
            if isinstance(item, float):
                if not math.isfinite(item):
                    return True
            elif isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                below.extend(item)
        layer = below
    return False


def _plain(value: Any) -> object:
    convert = getattr(value, "tolist", None)
    if not callable(convert):
        raise TypeError(f"it contains {kind_of(value)}")
    return convert()


def _bounded(value: Value, size: int) -> Value:
    if size > frames.MAX_OUTPUT:
        raise NoOutput(f"{size} bytes for this input, but the limit is {frames.MAX_OUTPUT}")
    return value


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
_raw = msgspec.json.Decoder(msgspec.Raw).decode

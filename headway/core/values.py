"""Values, from their JSON text and back; see `headway.model.Value`. A JSON text is validated, but only the worker that runs the input
builds objects: a text of 1 MB may contain half a million of them, and creating and freeing these would block everybody else."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import islice

import msgspec

from headway.core import parameters, tensor_json, tensors
from headway.core.json_pages import PAGE, Pages, Steps, TooDeep, levels_of
from headway.model import Tensors, TensorSpec, Value, kind_of

MAX_DEPTH = 100  # Deepest nesting of a value. A worker must be able to build whatever was accepted.

_NAMES = {"{": "object", "[": "array", "t": "bool", "f": "bool", "n": "null"}
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_SUSPECT = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)")  # Escape of U+0000, or perhaps of half a surrogate pair.
_GOOD = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F]|0000).{4}|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+", re.DOTALL
)  # Valid JSON up to the first escape of U+0000, or of half of a surrogate pair.
_LONGEST_ESCAPE = 12
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_LONG = b"0" * 200  # A number with this many digits may be out of range even if its exponent has only two digits.
# Number without its sign that may be out of range.
_EXTREME = re.compile(rb"(?<![0-9.])(?:[0-9.]{200,}+(?:[eE][+-]?[0-9]++)?+|[0-9.]++[eE]\+?[0-9]{3,}+)")
MOST_DIGITS = 4300  # Limit on the digits of an integer that Python parses.
MOST_EXTREME = 1000  # Limit on the extreme numbers of a value checked on admission. The worker checks the rest.
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))

_check = msgspec.json.Decoder(msgspec.Raw).decode
_read_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_text = msgspec.json.Decoder(str).decode


class NoValue(ValueError):
    """The JSON text isn't an acceptable value. The message says why."""


_LONE_REASON = "contains a lone surrogate, which is not text"
_NUL_REASON = "contains U+0000, which not every model can handle"


def read(text: bytes) -> Value:
    """Return the value of a JSON text. Raises msgspec.MsgspecError or UnicodeDecodeError if it isn't valid JSON, and NoValue if it
    contains U+0000, half of a surrogate pair, a number out of range, or more than MAX_DEPTH levels. (Hundreds of brackets in its
    strings may count as levels, too.)"""
    text = text.strip(b" \t\r\n")
    _check(text)
    if text[:1] == b'"':
        return _proper(text)
    if not text.isascii():
        text.decode()
    if _SUSPECT.search(text) is not None:
        _check_escapes(text)
    _check_numbers(text)
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _depth(text, MAX_DEPTH) > MAX_DEPTH:
        raise NoValue(f"is nested deeper than {MAX_DEPTH} levels")
    return text


def read_in_steps(text: bytes, *, known: bool = False) -> Steps[Value]:
    """Read a long JSON text, as `read` does. If `known`, the text is valid JSON, without white space around it."""
    if not known:
        text = text.strip(b" \t\r\n")
    if text[:1] == b'"':
        yield 0  # Decoded in one go.
        return _proper(text)
    if not text.isascii():
        text.decode()
    yield from check_in_steps(text, MAX_DEPTH, known=known)
    if b"\\u" in text:
        yield from _check_escapes_in_steps(text)
    return text


def check_in_steps(text: bytes, deepest: int, *, known: bool = True) -> Steps[int]:
    """Check the nesting and numbers of a long JSON text. Returns how many numbers may be out of range. Raises like `read`."""
    pages, extreme = Pages(text, known=known), 0
    try:
        for page in pages:
            if pages.deepest > deepest:
                raise TooDeep
            if extreme <= MOST_EXTREME:
                extreme += _check_numbers(page)
            yield 0 if known else pages.size
    except TooDeep:
        raise NoValue(f"is nested deeper than {deepest} levels") from None
    return extreme


def read_members(text: bytes, deepest: int) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object without decoding them. Raises msgspec.MsgspecError if the text isn't an object, and
    NoValue if it has a number out of range, over MOST_EXTREME extreme numbers, or more levels than `deepest`."""
    members = _read_members(text)
    if _check_numbers(text) > MOST_EXTREME:
        raise NoValue(f"contains more than {MOST_EXTREME} numbers so large or long that each needs a check")
    if text.count(b"[") + text.count(b"{") > deepest and _depth(text, deepest) > deepest:
        raise NoValue(f"is nested deeper than {deepest} levels")
    return members


def build(value: Value) -> object:
    """Build a Python object: a base64 string from octets, nested lists from tensors. Raises MsgspecError for a number out of range."""
    if isinstance(value, Tensors):
        return msgspec.json.decode(as_json(value))
    return parameters.decode(value) if isinstance(value, bytes) else shown(value)


def name_of(value: Value) -> str:
    """Return the name of a value's type for messages."""
    if isinstance(value, bytes):
        return _NAMES.get(chr(value[0]), "number")
    return "str" if isinstance(value, str) else kind_of(value).noun


def as_json(value: Value) -> bytes:
    """Return a value as JSON: base64 for octets, and nested arrays for tensors, with null for NaN and infinities. Raises
    UnicodeEncodeError if a string contains a lone surrogate, and NoTensors if the tensors are damaged."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Tensors):
        return tensor_json.write(value, strict=False)
    return msgspec.json.encode(value if isinstance(value, str) else value.content)


def of_json(text: bytes) -> Value:
    """Return the value of a valid JSON text."""
    if text[:1] != b'"':
        return text
    value: str = _read_text(text)
    return value


def embedded(value: Value) -> str | msgspec.Raw:
    """Return a value in a form that a JSON encoder accepts."""
    if isinstance(value, str):
        return value
    return msgspec.Raw(value if isinstance(value, bytes) else as_json(value))


def shown(value: Value) -> str:
    """Return a value for people to read: a string as it is, octets in base64, tensors by their shapes, others as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Tensors):
        return tensors.shown(value)
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else as_json(value)[1:-1].decode()


def as_tensors(value: Value, specs: Sequence[TensorSpec]) -> Tensors:
    """Return the tensors in a value that was accepted before the model was known to take tensors. Raises NoTensors if it
    doesn't fit. A string may be tensors as JSON or, if the model's only input is a single string, plain text; `Predict` over
    gRPC sends either."""
    takes_text = len(specs) == 1 and specs[0].datatype == tensors.BYTES and not specs[0].shape
    parsed = value
    if isinstance(value, str) and not takes_text:
        try:
            parsed = read(value.encode())
        except (ValueError, RecursionError):
            parsed = value  # It will be refused as a string.
    return tensor_json.tensors_of(parsed, specs)


def octets(value: Value) -> bytes:
    """Return the bytes of a value."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return value if isinstance(value, bytes) else value.content


def canonical(value: Value) -> bytes:
    """Return bytes that are the same for values that mean the same, and differ for others. A JSON text isn't changed if it is long
    or contains a number out of range. Octets are the same as their base64 string."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, Tensors):
        return b"\0\1" + tensors.canonical(
            value
        )  # Strings have no U+0000 and JSON can't start with it, so neither begins like this.
    if not isinstance(value, bytes):
        return octets(shown(value))
    try:
        return b"\0" + parameters.canonical(value)
    except msgspec.MsgspecError:
        return b"\0" + value


def room(value: Value) -> int:
    """Return an upper bound on a value's bytes in memory: four bytes per character for strings that aren't ASCII."""
    return 4 * len(value) if isinstance(value, str) and not value.isascii() else len(value)


def _proper(string: bytes) -> str:
    try:
        text: str = _read_text(string)
    except msgspec.MsgspecError:
        raise NoValue(_LONE_REASON) from None
    if "\0" in text:
        raise NoValue(_NUL_REASON)
    return text


def _check_escapes(text: bytes) -> None:
    good = _GOOD.match(text)
    end = good.end() if good is not None else 0
    if end < len(text):
        raise NoValue(_NUL_REASON if text[end : end + 6] == b"\\u0000" else _LONE_REASON)


def _check_escapes_in_steps(text: bytes) -> Steps[None]:
    at, size = 0, len(text)
    while at < size:
        reach = min(at + PAGE, size)
        match = _GOOD.match(text, at, reach)
        end = match.end() if match is not None else at
        if end < reach - _LONGEST_ESCAPE or (reach == size and end < size):  # It isn't an escape cut by the page.
            raise NoValue(_NUL_REASON if text[end : end + 6] == b"\\u0000" else _LONE_REASON)
        at = end
        yield 0


def _check_numbers(text: bytes) -> int:
    """Count the extreme numbers, up to MOST_EXTREME + 1. Raises NoValue if one of the first MOST_EXTREME is out of range."""
    digits = text.translate(_DIGITS)
    if b"e000" not in digits and b"e+000" not in digits and _LONG not in digits:
        return 0
    if b'"' in text:
        text = _STRING.sub(b'""', text)
    count = 0
    for count, match in enumerate(islice(_EXTREME.finditer(text), MOST_EXTREME + 1), 1):
        number = match[0]
        if count <= MOST_EXTREME and (len(number) > MOST_DIGITS if number.isdigit() else math.isinf(float(number))):
            raise NoValue(f"holds {parameters.out_of_range(number.decode())}")
    return count


def _depth(text: bytes, most: int) -> int:
    """Return the nesting depth of a JSON text. Brackets in strings are excluded only if the result might otherwise exceed `most`."""
    levels = _levels(text)
    return levels if levels <= most or b'"' not in text else _levels(_STRING.sub(b"", text))


def _levels(text: bytes) -> int:
    return levels_of(text.translate(None, _NO_BRACKET))

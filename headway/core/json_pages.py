"""Parsing of long JSON texts, a page at a time, because a megabyte in one go would block the event loop for up to 0.25 s.
The generators yield, after every page, the number of bytes read outside strings; strings cost next to nothing. Deeply nested
brackets are handled one by one, and count as more bytes. No values are built. msgspec checks each page as a JSON text:
    page             [3, 4], [5
    checked    {"": [0, [3, 4], [5, 0]]}
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from itertools import accumulate
from typing import TypeVar

import msgspec

T = TypeVar("T")
Steps = Generator[int, None, T]  # Work that yields whenever other tasks may run, and finally returns its result.

PAGE = 1 << 14  # Bytes in a page. A string is never cut, so a page with a long one is longer.
SHORT = 1 << 13  # Size in bytes up to which a JSON text is parsed in one go.
MAX_LEVELS = 102  # Deepest nesting of a text: 100 levels in a value, which is inside the members of a body.
_LONGEST = 1 << 17  # Limit on bytes outside strings without a comma. They could only be a single number or white space.
_TOKENS = 1 << 9  # Limit on brackets and commas handled one by one between two yields.
_TOKEN_BYTES = 24  # Bytes of flat JSON that take as long as one of these.

# Python 3.11 before 3.11.5 handles possessive repeats of groups wrongly, so only single characters have them here.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*"'
STRING = re.compile(_STRING, re.DOTALL)
drop_strings, find_strings = STRING.sub, STRING.findall
_CUT = re.compile(
    rb'(?:[^",]*+(?:%b[^",]*+)*,)+' % _STRING, re.DOTALL
)  # Everything up to the last comma outside strings.
# Everything up to a comma, or up to a string that ends after the page.
_LONG = re.compile(rb'[^",]*+(?:%b[^",]*+)*' % _STRING, re.DOTALL)
_FLAT = rb'(?:[^\[\]{}"]++|%b)' % _STRING
for _ in range(2):
    _FLAT = rb"(?:%b|\[%b*\]|\{%b*\})" % (_FLAT, _FLAT, _FLAT)
_INNER = re.compile(_FLAT + rb"*", re.DOTALL)  # Content of brackets, including up to two levels of nested brackets.
_OUTER = re.compile(rb'[^\[\]{}",]*+(?:%b[^\[\]{}",]*+)*' % _STRING, re.DOTALL)
_MEMBER = re.compile(rb"(%b)[ \t\r\n]*:[ \t\r\n]*" % _STRING, re.DOTALL)
_BYTE = re.compile(r"\(byte (\d+)\)")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_LEVELS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")
_CLOSING = bytes.maketrans(b"[{", b"]}")
_BLANK = b" \t\r\n"
_ZERO = {b"[": b"0", b"{": b'"":0'}  # What may come before or after a comma, by enclosing bracket.
_COMMA, _QUOTE = b',"'
_OPENING = frozenset(b"[{")

_check = msgspec.json.Decoder(msgspec.Raw).decode
_read_name = msgspec.json.Decoder(str).decode


class TooDeep(ValueError):
    """The text is nested deeper than MAX_LEVELS."""


def finish(steps: Steps[T]) -> T:
    """Do all steps, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


class Pages(Iterator[bytes]):
    """Pages of about `reach` bytes of a JSON text, cut at commas outside strings, and checked unless `known` to be valid. Raises
    msgspec.DecodeError if the text isn't valid JSON, and TooDeep if it is nested too deeply."""

    def __init__(self, text: bytes, *, known: bool = False, reach: int = PAGE) -> None:
        self._text, self._known, self._reach = text, known, reach
        self._at = 0
        self._opened = b""  # Brackets that are open at the start of the next page.
        self.deepest = 0  # Deepest nesting in the pages so far.
        self.size = 0  # Bytes of the last page outside its strings.
        self.commas = 0  # Commas outside strings so far.

    def __next__(self) -> bytes:
        text, begin = self._text, self._at
        if begin >= len(text) and begin:
            raise StopIteration
        end, bare = self._cut(begin)
        page = text[begin:end]
        opened, self.size = self._opened, len(bare)
        self.commas += bare.count(b",") + 1  # Including the one at the end of the page.
        brackets = bare.translate(None, _NO_BRACKET)
        self.deepest = max(self.deepest, len(opened) + levels_of(brackets))
        if self.deepest > MAX_LEVELS:
            raise TooDeep
        self._opened = _folded(opened + brackets)
        if not self._known:
            self._verify(page, begin, end, opened)
        self._at = end + 1 if end < len(text) else max(end, 1)
        return page

    def _cut(self, at: int) -> tuple[int, bytes]:
        """Return where the page from `at` ends (at a comma, or the end of the text), and its content without strings."""
        text, size = self._text, len(self._text)
        bare, length, brackets = [], 0, 0
        while True:
            reach = min(at + self._reach, size)
            match = None if reach == size else _CUT.match(text, at, reach)
            if reach == size:
                end = size
            elif match is not None:
                end = match.end() - 1
            else:
                end = _end_of(_LONG, text, at, reach)
            bare.append(drop_strings(b"", text[at:end]))
            if match is not None or end == size:
                return end, b"".join(bare)
            length += len(bare[-1])
            if length > _LONGEST:
                raise msgspec.DecodeError(f"more than {_LONGEST} bytes without a comma outside strings")
            brackets += len(bare[-1].translate(None, _NO_BRACKET))
            if brackets > 4 * MAX_LEVELS:  # Without a comma in between, so many are nested too deeply.
                raise TooDeep
            if text[end] == _QUOTE:
                end = _end_of_string(text, end)
            at = end

    def _verify(self, page: bytes, begin: int, end: int, opened: bytes) -> None:
        """Raise msgspec.DecodeError if a page isn't valid JSON. For the check, the page is put into the brackets that are open
        there, with a 0 in place of the text before it, and another in place of the text after it."""
        before = after = b""
        if begin:
            before = opened[:-1].replace(b"{", b'{"":') + opened[-1:] + _ZERO.get(opened[-1:], b"") + b","
        if end < len(self._text):
            after = b"," + _ZERO.get(self._opened[-1:], b"") + self._opened[::-1].translate(_CLOSING)
        try:
            _check(b"%b%b%b" % (before, page, after))
        except msgspec.DecodeError as exc:
            raise msgspec.DecodeError(_moved(str(exc), begin - len(before))) from None


def _end_of(pattern: re.Pattern[bytes], text: bytes, begin: int, end: int) -> int:
    match = pattern.match(text, begin, end)
    return begin if match is None else match.end()


def _end_of_string(text: bytes, begin: int) -> int:
    """Return the end of a long string that begins at `begin`, or the end of the text if the string doesn't end."""
    at = begin
    for _ in range(_TOKENS):
        if (at := text.find(b'"', at + 1)) < 0:
            return len(text)
        before = text[max(at - 64, begin) : at]
        slashes = len(before) - len(before.rstrip(b"\\"))
        if slashes == len(before):
            break
        if slashes % 2 == 0:
            return at + 1
    match = STRING.match(text, begin)
    return match.end() if match is not None else len(text)


def _moved(message: str, by: int) -> str:
    return _BYTE.sub(lambda match: f"(byte {max(int(match[1]) + by, 0)})", message)


def levels_of(brackets: bytes) -> int:
    """Return how many levels deep brackets reach, relative to their start."""
    return max(accumulate(memoryview(brackets.translate(_LEVELS)).cast("b")), default=0)


def _folded(brackets: bytes) -> bytes:
    for _ in range(MAX_LEVELS + 1):
        shorter = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(shorter) == len(brackets):
            return shorter
        brackets = shorter
    raise TooDeep


def split(text: bytes, most: int) -> Steps[list[bytes] | None]:
    """Return the elements of a JSON array or the members of an object, each as text, or None if there are more than `most`. The
    text must be valid, and have no white space around it."""
    parts: list[bytes] = []
    at = since = begin = 1
    last, level, looked = len(text) - 1, 0, 0
    while at < last:
        at = _end_of(_INNER if level else _OUTER, text, at, min(at + PAGE, last))
        looked += 1
        if looked == _TOKENS or at - since > PAGE:
            yield looked * _TOKEN_BYTES if looked == _TOKENS else 0
            since, looked = at, 0
        byte = text[at]
        if byte == _QUOTE:  # The string ends after the page.
            since += (end := _end_of_string(text, at)) - at
            at = end
        elif byte in _OPENING:
            level += 1
            at += 1
        elif byte == _COMMA and not level:
            parts.append(text[begin:at].strip(_BLANK))
            if len(parts) >= most:
                return None
            begin = at = at + 1
        elif level and byte in b"]}":
            level -= 1
            at += 1
    part = text[begin:last].strip(_BLANK)
    return [*parts, part] if part or parts else []


def members(text: bytes, most: int) -> Steps[dict[str, bytes] | None]:
    """Return the members of a JSON object, or None if there are more than `most`. Later duplicates win. See `split`."""
    parts = yield from split(text, most)
    if parts is None:
        return None
    by_name: dict[str, bytes] = {}
    for part in parts:
        if (name := _MEMBER.match(part)) is None:  # Impossible in valid JSON.
            raise msgspec.DecodeError("JSON is malformed")
        by_name[_read_name(name[1])] = part[name.end() :]
    return by_name

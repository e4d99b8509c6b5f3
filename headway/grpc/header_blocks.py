"""Blocks of header fields: HPACK for a server that has few fields to write, and reads the same ones again and again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpack import Decoder

_STATUS_OK = b"\x88"
"""`:status: 200`, as the table of HPACK has it."""
_TABLE_OF_NOTHING = b"\x20"
"""Word to the other side that its table for this side's fields may be empty."""
_INDEXED = bytes(range(0x81, 0xFF))
"""Octets that stand for a whole field each, and change no table."""
_MOST_KNOWN = 8


class HeaderWriter:
    """Encoder that puts no field into the client's table, and so remembers nothing of a connection.

    Attributes:
        header_table_size: size that the client allows for its table.
    """

    def __init__(self) -> None:
        self.header_table_size = 0
        self._first = _TABLE_OF_NOTHING

    def encode(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Block of some fields."""
        parts, self._first = [self._first], b""
        for name, value in headers:
            parts.append(_STATUS_OK if name == b":status" and value == b"200" else _field(name, value))
        return b"".join(parts)


class HeaderReader(Decoder):
    """Decoder that knows blocks which came before and of which each octet stands for a field in the table."""

    def __init__(self, most: int) -> None:
        super().__init__(max_header_list_size=most)
        self._known: dict[bytes, Any] = {}

    def decode(self, data: bytes | memoryview, raw: bool = False) -> Any:
        """Fields of a block."""
        block = bytes(data)
        found = self._known.get(block)
        if found is None:
            found = super().decode(block, raw)
            if block.translate(None, _INDEXED) or len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            else:
                self._known[block] = found
        return found


def _field(name: bytes, value: bytes) -> bytes:
    return b"\0%b%b%b%b" % (_length(len(name)), name, _length(len(value)), value)


def _length(number: int) -> bytes:
    """Length with seven bits in its first octet."""
    if number < 127:
        return bytes((number,))
    rest, found = number - 127, bytearray((127,))
    while rest >= 128:
        found.append(rest % 128 | 128)
        rest //= 128
    found.append(rest)
    return bytes(found)

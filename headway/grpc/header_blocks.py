"""Blocks of header fields: HPACK for a server that has few fields to write, and reads the same ones again and again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpack import Decoder

_STATUS_OK = b"\x88"
"""`:status: 200`, as the table of HPACK has it."""
_OK = (":status", "200")
_INDEXED = bytes(range(0x81, 0xFF))
"""Octets that stand for a whole field each, and change no table."""
_MOST_KNOWN = 8


def block_of(headers: Iterable[tuple[str, str]]) -> bytes:
    """Block of some fields, none of which the client puts into its table."""
    return b"".join([_STATUS_OK if field == _OK else _field(*field) for field in headers])


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


def _field(name: str, value: str) -> bytes:
    key, octets = name.encode(), value.encode()
    return b"\0%b%b%b%b" % (_length(len(key)), key, _length(len(octets)), octets)


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

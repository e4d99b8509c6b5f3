"""Damaged variants of valid inputs, which attackers make but random bytes rarely match."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MOST = 16_384
"""Largest input that is made, in bytes."""

_ODD = (
    b"", b"\x00", b"\xff", b"\x7f", b"\x80", b"\r\n", b"\n", b"\r", b" ", b"\t", b",", b";", b"=", b'"', b"\\", b"\\u0000",
    b"\\ud800", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\xc5\xbf", "İ".encode(), "٣".encode(), "\u2028".encode(),
    b"0", b"-1", b"1e999", b"NaN", b"Infinity", b"0x10", b"99999999999999999999", b"9" * 400, b"2147483648", b"null",
    b"true", b"[", b"{", b"]", b"}", b'{"a":', b"[[", b"%00", b"%", b"..", b"/", b"'", b"#", b"\x1b[31m", b"\x91", b"\x90", b"\xdc\xff\xff",
    b"\x7f\xf0\x00\x00\x00\x00\x00\x00", b"\x00\x00\x00\x00\x00\x00\xf0\x7f", b"\x00\x00\x00\x00\x00\x00\xf8\x7f",
)  # fmt: skip


_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, -(2**63), 1.5, 1e308, float("inf"), float("nan"), "", "x", "x" * 129, "a\x00b",
    "\x1b[31m", "\u2028", "é" * 100, [], {}, [[]], {"": None}, ["x"], [None, 1, "a"], b"", b"\xff" * 9,
)  # fmt: skip


@dataclass(frozen=True)
class Codec:
    """Converts between bytes and trees of values."""

    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]


class Mutator:
    """Makes inputs from valid ones and from words that the parser knows. The same seed gives the same inputs.
    With a codec, it also changes values in the decoded trees."""

    def __init__(self, seeds: Sequence[bytes], words: Sequence[bytes], seed: str, codec: Codec | None = None) -> None:
        self._random = random.Random(seed)
        self._seeds = seeds
        self._codec = codec
        self._words = [*words, *_ODD]
        self._changes = (
            self._flip, self._put, self._cut, self._insert, self._insert, self._replace, self._repeat, self._splice,
            self._move, self._truncate, self._noise,
        )  # fmt: skip

    def next(self) -> bytes:
        """Return a valid input after a few changes, or rarely none."""
        good = self._random.choice(self._seeds)
        if self._codec is not None and self._random.random() < 0.7:
            tree = self._codec.read(good)
            for _ in range(1 + int(self._random.expovariate(0.7))):
                tree = self._changed(tree)
            with contextlib.suppress(TypeError, ValueError, OverflowError):  # Some formats can't hold such a value.
                good = self._codec.write(tree)
            if self._random.random() < 0.8:
                return good
        data = bytearray(good)
        for _ in range(min(int(self._random.expovariate(0.5)), 12)):
            data = self._random.choice(self._changes)(data)
        return bytes(data[:MOST])

    def _changed(self, tree: Any) -> Any:
        """Return a copy with one value changed."""
        if not isinstance(tree, dict | list) or not tree or self._random.random() < 0.05:
            return self._random.choice(_VALUES)
        changed = tree.copy()
        place = self._random.choice(list(tree)) if isinstance(tree, dict) else self._random.randrange(len(tree))
        lot = self._random.random()
        if lot < 0.2:
            del changed[place]
        elif lot < 0.3 and isinstance(changed, list):
            changed.append(self._random.choice(changed))
        elif lot < 0.4:
            changed[place] = self._random.choice(list(tree.values()) if isinstance(tree, dict) else tree)
        else:
            changed[place] = self._changed(tree[place])
        return changed

    def _span(self, data: bytearray) -> tuple[int, int]:
        begin = self._random.randint(0, len(data))
        return begin, min(len(data), begin + int(self._random.expovariate(0.1)))

    def _flip(self, data: bytearray) -> bytearray:
        if data:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return data

    def _put(self, data: bytearray) -> bytearray:
        if data:
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        return data

    def _cut(self, data: bytearray) -> bytearray:
        begin, end = self._span(data)
        del data[begin:end]
        return data

    def _insert(self, data: bytearray) -> bytearray:
        at = self._random.randint(0, len(data))
        data[at:at] = self._random.choice(self._words)
        return data

    def _replace(self, data: bytearray) -> bytearray:
        begin, end = self._span(data)
        data[begin:end] = self._random.choice(self._words)
        return data

    def _repeat(self, data: bytearray) -> bytearray:
        """Repeat a piece or a word many times."""
        begin, end = self._span(data)
        piece = bytes(data[begin:end]) if self._random.random() < 0.5 else self._random.choice(self._words)
        times = 2 ** self._random.randrange(1, 12)
        data[end:end] = piece * min(times, MOST // max(1, len(piece)))
        return data

    def _splice(self, data: bytearray) -> bytearray:
        other = self._random.choice(self._seeds)
        return data[: self._random.randint(0, len(data))] + other[self._random.randint(0, len(other)) :]

    def _move(self, data: bytearray) -> bytearray:
        begin, end = self._span(data)
        piece = data[begin:end]
        del data[begin:end]
        at = self._random.randint(0, len(data))
        data[at:at] = piece
        return data

    def _truncate(self, data: bytearray) -> bytearray:
        return data[: self._random.randint(0, len(data))]

    def _noise(self, data: bytearray) -> bytearray:
        begin, end = self._span(data)
        data[begin:end] = self._random.randbytes(end - begin)
        return data

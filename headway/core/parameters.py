"""The `parameters` of a request, parsed from JSON in time linear in their length."""

from __future__ import annotations

import math
import re

import msgspec

CANONICAL = 1 << 16  # Limit in bytes up to which parameters are compared by meaning rather than spelling.


def out_of_range(number: str) -> str:
    """Return the error message for a number that doesn't fit into a double."""
    shown = number if len(number) <= _SHOWN else f"{number[:_SHOWN]}... ({len(number)} characters)"
    return f"a number out of range: {shown}"


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(out_of_range(text))
    return value


_SHOWN = 24  # Number of characters of a number that an error message shows.
_HUGE = re.compile(rb"[eE][+-]?[0-9]{3}")  # Exponent of an extreme number, which msgspec is slow to parse.

_decode = msgspec.json.Decoder().decode
_decode_huge = msgspec.json.Decoder(float_hook=_number).decode


def decode(text: bytes) -> object:
    """Parse a JSON text. Raises msgspec.MsgspecError if it isn't valid JSON, or has a number out of range."""
    return _decode(text) if _HUGE.search(text) is None else _decode_huge(text)


def canonical(text: bytes) -> bytes:
    """Return a text that is the same for all parameters that mean the same. A text longer than CANONICAL isn't changed."""
    if not text or len(text) > CANONICAL:
        return text
    return msgspec.json.encode(decode(text), order="deterministic")

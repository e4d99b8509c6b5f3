"""The `parameters` of a request, read from JSON in time linear in their length."""

from __future__ import annotations

import math
import re

import msgspec

CANONICAL = 1 << 16  # Limit in bytes on texts that are compared by meaning rather than spelling.


def out_of_range(number: str) -> str:
    """Return the error text for a number that no double holds."""
    shown = number if len(number) <= _SHOWN else f"{number[:_SHOWN]}... ({len(number)} characters)"
    return f"a number out of range: {shown}"


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(out_of_range(text))
    return value


_SHOWN = 24  # Characters of a number that an error shows.
# Exponent of an extreme number. msgspec takes up to 40 µs to read 1e308. A hook in Python takes 1 µs, but for every number.
_HUGE = re.compile(rb"[eE][+-]?[0-9]{3}")

_decode = msgspec.json.Decoder().decode
_decode_huge = msgspec.json.Decoder(float_hook=_number).decode


def decode(text: bytes) -> object:
    """Return the value of a JSON text. Raises msgspec.MsgspecError if it is not valid JSON, or has a number out of range."""
    return _decode(text) if _HUGE.search(text) is None else _decode_huge(text)


def canonical(text: bytes) -> bytes:
    """Return a text that is equal for all parameters that mean the same. A text longer than CANONICAL stays as it is."""
    if not text or len(text) > CANONICAL:
        return text
    return msgspec.json.encode(decode(text), order="deterministic")

"""The `parameters` of a request, read from their JSON text at a cost that its length bounds."""

from __future__ import annotations

import math
import re

import msgspec

CANONICAL = 1 << 16
"""Most bytes of a text whose meaning counts and not its spelling."""


def out_of_range(number: str) -> str:
    """Reason why no double holds a number."""
    shown = number if len(number) <= _SHOWN else f"{number[:_SHOWN]}... ({len(number)} characters)"
    return f"a number out of range: {shown}"


def _number(text: str) -> float:
    """Read a number with a fraction or an exponent."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(out_of_range(text))
    return value


_SHOWN = 24
"""Characters of a number that an error shows."""
_HUGE = re.compile(rb"[eE][+-]?[0-9]{3}")
"""Exponent of an extreme number. msgspec's own reading of 1e308 takes up to 40 µs, so that 1 MB would take seconds; a
hook in Python takes 1 µs, but takes that for every number."""

_decode = msgspec.json.Decoder().decode
_decode_huge = msgspec.json.Decoder(float_hook=_number).decode


def decode(text: bytes) -> object:
    """Return the value of a JSON text.

    Raises:
        msgspec.MsgspecError: it is not valid JSON, or a number is out of range.
    """
    return _decode(text) if _HUGE.search(text) is None else _decode_huge(text)


def canonical(text: bytes) -> bytes:
    """Return the canonical text of parameters: it is equal for parameters that mean the same.

    A text longer than CANONICAL stays as it is.
    """
    if not text or len(text) > CANONICAL:
        return text
    return msgspec.json.encode(decode(text), order="deterministic")

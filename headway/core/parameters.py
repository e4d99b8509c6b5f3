"""The `parameters` of a request, read from their JSON text at a cost that its length bounds."""

from __future__ import annotations

import math

import msgspec

CANONICAL = 1 << 16
"""Most bytes of a text whose meaning counts and not its spelling."""


def _number(text: str) -> float:
    """Read a number with a fraction or an exponent.

    msgspec's own reading of extreme numbers (1e308) costs up to 14 µs each, so that a body of 1 MB would take seconds.
    """
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is out of range")
    return value


_decode = msgspec.json.Decoder(float_hook=_number).decode


def decode(text: bytes) -> object:
    """The value of a JSON text.

    Raises:
        msgspec.MsgspecError: it is not valid JSON, or a number is out of range.
    """
    return _decode(text)


def canonical(text: bytes) -> bytes:
    """Canonical text of parameters: it is equal for parameters that mean the same.

    A text longer than CANONICAL stays as it is.
    """
    if not text or len(text) > CANONICAL:
        return text
    return msgspec.json.encode(decode(text), order="deterministic")

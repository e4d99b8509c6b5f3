"""Values of inputs and outputs, and what a target says of those that it takes and gives."""

from __future__ import annotations

import enum

import msgspec


class Octets(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Octets as a value: bytes that stand for themselves, and for no JSON."""

    content: bytes

    def __len__(self) -> int:
        """Return the number of octets."""
        return len(self.content)


Value = str | bytes | Octets
"""Input or output of one entry. A text is itself; any other JSON value is its JSON text, in UTF-8; octets are Octets. So a value
needs no label: whoever holds one can show it."""


class ValueKind(enum.Enum):
    """Kinds of values that a target takes or gives."""

    TEXT = "text"
    """Texts."""
    JSON = "json"
    """Any JSON values, texts among them."""
    BYTES = "bytes"
    """Octets; as a text they are in base64."""


class WeightLine(msgspec.Struct, frozen=True, array_like=True):
    """Line by which the weight of an input follows from its length: `fixed`, and `by_octet` for each octet of it."""

    fixed: float
    by_octet: float


class Signature(msgspec.Struct, frozen=True):
    """Signature of a target, as its annotations and its attribute `example` tell.

    Attributes:
        takes: kind of its inputs.
        gives: kind of its outputs.
        example: its example of an input; None for none.
        weight: line by which its weight function follows from the length of an input, as far as known; None without one.
    """

    takes: ValueKind = ValueKind.TEXT
    gives: ValueKind = ValueKind.TEXT
    example: Value | None = None
    weight: WeightLine | None = None

    @property
    def warm_up_input(self) -> Value | None:
        """Input of the batch that the target must pass before it gets real ones; None when none is known to fit."""
        if self.example is None and self.takes is ValueKind.TEXT:
            return WARM_UP
        return self.example


WARM_UP = "warm-up"
"""Warm-up input of a target that takes any text. Later probes of the target run it again."""

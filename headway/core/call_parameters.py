"""Parameters that a call of a target has once: requests ride together only where these are equal.

They are compared by value: what is absent equals what is absent, 1 equals 1.0, and the order of an object's members does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from math import inf

import msgspec

from headway.core.parameters import CANONICAL
from headway.core.rows import NUMBER_BYTES
from headway.model import ALL_PARAMETERS, PerCall, WorkerInfo

_WHOLE = 1 << 63
"""Numbers with a fraction or an exponent below this are written as integers, if they are."""


def _number(text: str) -> float:
    value = float(text)
    if abs(value) == inf:
        raise ValueError("a number is out of range")
    return int(value) if abs(value) < _WHOLE and value.is_integer() else value


_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder(float_hook=_number).decode


def per_call(workers: Iterable[WorkerInfo]) -> PerCall:
    """Parameters that a call has once, by what workers of one model tell: all that any of them names."""
    names = set[str]()
    for worker in workers:
        if worker.per_call == ALL_PARAMETERS:
            return ALL_PARAMETERS
        names.update(worker.per_call)
    return tuple(sorted(names))


def values_of(parameters: bytes, names: PerCall) -> bytes:
    """Text that is equal for parameters whose values under these names are; empty where they have none of them.

    Of values longer than CANONICAL, or out of range, the spelling counts.
    """
    if not parameters:
        return b""
    if names != ALL_PARAMETERS:
        members = _members(parameters)
        parameters = msgspec.json.encode({name: members[name] for name in names if name in members})
    if len(parameters) <= CANONICAL:
        try:
            parameters = msgspec.json.encode(_decode(parameters), order="deterministic")
        except (ValueError, msgspec.MsgspecError):
            return parameters
    return b"" if parameters == b"{}" else parameters


def shape_number(parameters: bytes, names: PerCall, shape: int) -> int:
    """Number that requests have in common whose parameters may be those of one call, and whose rows, which have the number `shape`, may run in it.

    A client may well find parameters that have a number in common with others. The process that runs a batch compares what they are.
    """
    values = values_of(parameters, names)
    if not values:
        return shape
    digest = blake2b(values, digest_size=NUMBER_BYTES, salt=shape.to_bytes(NUMBER_BYTES, "little")).digest()
    return int.from_bytes(digest, "little")

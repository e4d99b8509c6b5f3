"""Parameters that a call of a target has once: requests ride together only where these are equal.

They are compared by their normal form, which is also what the call gets, so that no answer depends on who rides beside: 5.0 is 5,
-0.0 is 0, and the members of objects are in order. What is absent equals what is absent. From 2⁵³ on, where two integers may be the
same number with a fraction, 2⁵³ and 2⁵³.0 stay what they are, and are not equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from math import inf

import msgspec

from headway.core.parameters import CANONICAL, out_of_range
from headway.core.rows import NUMBER_BYTES
from headway.model import ALL_PARAMETERS, PerCall, WorkerInfo

_INPUTS = frozenset(("messages",))
"""Members of parameters that are the input itself, as a chat's target gets them. They are none of "all"."""

_EXACT = 1 << 53
"""Numbers with a fraction or an exponent below this are exact. They become integers, if they are."""


def _number(text: str) -> float:
    value = float(text)
    if abs(value) == inf:
        raise ValueError(out_of_range(text))
    return int(value) if abs(value) < _EXACT and value.is_integer() else value


_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder(float_hook=_number).decode


def per_call(workers: Iterable[WorkerInfo]) -> PerCall:
    """Return the parameters that a call has once, by what workers of one model tell: all that any of them names."""
    names = set[str]()
    for worker in workers:
        if worker.per_call == ALL_PARAMETERS:
            return ALL_PARAMETERS
        names.update(worker.per_call)
    return tuple(sorted(names))


def seen(workers: Iterable[WorkerInfo]) -> PerCall:
    """Return the parameters that the targets of all workers of one model get."""
    some = [set(worker.sees) for worker in workers if worker.sees != ALL_PARAMETERS]
    return tuple(sorted(set.intersection(*some))) if some else ALL_PARAMETERS


def unseen(parameters: bytes, sees: PerCall) -> list[str]:
    """Return the names of parameters that a target which gets these never sees."""
    return [name for name in _members(parameters or b"{}") if sees != ALL_PARAMETERS and name not in sees]


def values_of(parameters: bytes, names: PerCall) -> bytes:
    """Return the normal form, as text, of what parameters have under these names; empty where they have none of them.

    Values longer than CANONICAL, or out of range, stay as they are written.
    """
    if not parameters:
        return b""
    members = _members(parameters)
    asked = members.keys() - _INPUTS if names == ALL_PARAMETERS else members.keys() & set(names)
    values = msgspec.json.encode({name: members[name] for name in sorted(asked)})
    if len(values) <= CANONICAL:
        try:
            values = msgspec.json.encode(_decode(values), order="deterministic")
        except (ValueError, msgspec.MsgspecError):
            return values
    return b"" if values == b"{}" else values


def shape_number(parameters: bytes, names: PerCall, shape: int) -> int:
    """Return the number that requests have in common whose parameters may be those of one call, and whose rows, which have the number `shape`, may run in it.

    A client may well find parameters that have a number in common with others. The process that runs a batch compares what they are.
    """
    values = values_of(parameters, names)
    if not values:
        return shape
    digest = blake2b(values, digest_size=NUMBER_BYTES, salt=shape.to_bytes(NUMBER_BYTES, "little")).digest()
    return int.from_bytes(digest, "little")

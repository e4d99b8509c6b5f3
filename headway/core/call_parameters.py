"""Parameters that apply to a whole call of a target. Only requests with the same values can share a call.

Values are compared in a normal form, and the call gets that form, so that no answer depends on which requests share the call: 5.0
is 5, -0.0 is 0, and object members are sorted. Requests that leave out a parameter have the same value for it. From 2⁵³ on, an
integer and a number with a fraction may be the same double, so 2⁵³ and 2⁵³.0 count as different."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from math import inf

import msgspec

from headway.core.parameters import CANONICAL, out_of_range
from headway.core.rows import NUMBER_BYTES
from headway.model import ALL_PARAMETERS, PerCall, WorkerInfo

_INPUTS = frozenset(("messages",))  # Parameters that are the input itself, as for a chat model. "all" excludes them.

_EXACT = 1 << 53  # Below this, numbers with a fraction or an exponent are exact, and whole ones become integers.


def _number(text: str) -> float:
    value = float(text)
    if abs(value) == inf:
        raise ValueError(out_of_range(text))
    return int(value) if abs(value) < _EXACT and value.is_integer() else value


_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder(float_hook=_number).decode


def per_call(workers: Iterable[WorkerInfo]) -> PerCall:
    """Return the parameters that apply to a whole call: those that at least one of the model's workers names."""
    names = set[str]()
    for worker in workers:
        if worker.per_call == ALL_PARAMETERS:
            return ALL_PARAMETERS
        names.update(worker.per_call)
    return tuple(sorted(names))


def seen(workers: Iterable[WorkerInfo]) -> PerCall:
    """Return the parameters that every target receives, given the workers of one model."""
    some = [set(worker.sees) for worker in workers if worker.sees != ALL_PARAMETERS]
    return tuple(sorted(set.intersection(*some))) if some else ALL_PARAMETERS


def unseen(parameters: bytes, sees: PerCall) -> list[str]:
    """Return the names of the parameters that a target never sees if it receives only `sees`."""
    return [name for name in _members(parameters or b"{}") if sees != ALL_PARAMETERS and name not in sees]


def values_of(parameters: bytes, names: PerCall) -> bytes:
    """Return the parameters with these names in normal form, if any. Long (see CANONICAL) and extreme values stay as written."""
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
    """Return a number that requests share if they may run in one call. `shape` is the shape number of their rows. Other
    requests may have this number by chance or by intent, so the process that runs a batch compares the values."""
    values = values_of(parameters, names)
    if not values:
        return shape
    digest = blake2b(values, digest_size=NUMBER_BYTES, salt=shape.to_bytes(NUMBER_BYTES, "little")).digest()
    return int.from_bytes(digest, "little")

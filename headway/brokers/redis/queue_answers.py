"""Answers of one queue in the server, as its caller reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headway.core.departure import Load
from headway.model import Failure, Lease


class Granted(msgspec.Struct, frozen=True):
    """Lease from the server, with the seconds that each entry has waited."""

    lease: Lease
    waited: Sequence[float]
    unreadable: str = ""


class Moved(msgspec.Struct, frozen=True):
    """Verdict on an entry that has something in common with another, which is in the queue of another version or zone."""

    version: str
    zone: str


Verdict = Failure | Moved | None
"""Verdict of a queue on an entry: None for an admitted one."""


class QueueGlance(NamedTuple):
    """Short look at a queue, for slots that are at home elsewhere.

    Attributes:
        depth: size of what waits.
        slots: slots at home.
        waited: seconds for which the oldest fresh entry has waited; 0 without one.
        batch_seconds: expected run time in seconds of a full batch; 0 while that is not known.
    """

    depth: int
    slots: int
    waited: float
    batch_seconds: float


class Look(msgspec.Struct):
    """Load of a queue, and by tier its depth and the seconds that its oldest entry has waited."""

    load: Load
    tiers: list[tuple[int, float]]

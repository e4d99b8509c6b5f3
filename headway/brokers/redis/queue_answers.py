"""Answers of one queue in the server, as its caller reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.departure import Load
from headway.model import Failure, Lease


@dataclass(frozen=True, slots=True)
class Granted:
    """Lease from the server, with the seconds that each entry has waited."""

    lease: Lease
    waited: Sequence[float]
    unreadable: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """Verdict on an entry that has something in common with another, which is in the queue of another version."""

    version: str


Verdict = Failure | Moved | None
"""Verdict of a queue on an entry: None for an admitted one."""


@dataclass(slots=True)
class Look:
    """Load of a queue, and by tier its depth and the seconds that its oldest entry has waited."""

    load: Load
    tiers: list[tuple[int, float]]

"""Departure policies and their names. To add a policy, write a file and add a line here."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from headway.core.departure import Policy
from headway.core.policies.paced import DEFAULT_WINDOW, Paced, Pid, Table, Window


class Kind(msgspec.Struct, frozen=True):
    """Facts about a policy for settings, banner and documentation."""

    make: Callable[[float], Policy]  # Builds it for a wait in seconds.
    wait: float = math.inf  # Default for that wait in seconds; infinite: as long as the policy likes.
    aims: bool = False  # True if the wait is a target rather than a limit.
    own_waits: bool = False  # True if the policy has waits of its own, so that none can be configured.


POLICIES: dict[str, Kind] = {
    "paced": Kind(Paced),
    "window": Kind(Window, wait=DEFAULT_WINDOW),
    "table": Kind(lambda wait: Table(), own_waits=True),
    "pid": Kind(Pid, wait=DEFAULT_WINDOW, aims=True),
}  # Policies by their names for users.

NAMES = tuple(POLICIES)


def build(name: str, max_wait: float | None) -> Policy:
    """Build a fresh policy with the longest wait for others in seconds; None for its default."""
    kind = POLICIES[name]
    return kind.make(kind.wait if max_wait is None else max_wait)

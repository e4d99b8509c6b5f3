"""Departure policies and their names. To add a policy, write a file and add a line here."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from headway.core.departure import Policy
from headway.core.policies.paced import DEFAULT_WINDOW, Paced, Pid, Table, Window


class Kind(msgspec.Struct, frozen=True):
    """A policy, as the settings, the banner and the documentation describe it."""

    make: Callable[[float], Policy]  # Builds the policy for a wait in seconds.
    wait: float = math.inf  # Default wait in seconds. If infinite, the policy decides.
    aims: bool = False  # True if the wait is a target rather than a limit.
    own_waits: bool = False  # True if the policy has waits of its own, so that none can be configured.


POLICIES: dict[str, Kind] = {
    "paced": Kind(Paced),
    "window": Kind(Window, wait=DEFAULT_WINDOW),
    "table": Kind(lambda wait: Table(), own_waits=True),
    "pid": Kind(Pid, wait=DEFAULT_WINDOW, aims=True),
}  # Policies by the names that users know.

NAMES = tuple(POLICIES)


def build(name: str, max_wait: float | None) -> Policy:
    """Build a policy that waits at most `max_wait` seconds for further entries. None means its default."""
    kind = POLICIES[name]
    return kind.make(kind.wait if max_wait is None else max_wait)

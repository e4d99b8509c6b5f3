"""The departure policies, one file each, and the table of their names. A new policy is one file and one line here."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from headway.core.departure import Policy
from headway.core.policies.paced import Paced
from headway.core.policies.pid import Pid
from headway.core.policies.table import Table
from headway.core.policies.window import DEFAULT_WINDOW, Window


class Kind(msgspec.Struct, frozen=True):
    """A policy as settings, banner and documents need to know it.

    Attributes:
        make: builds it for a wait in seconds.
        wait: seconds of that wait when none is configured; infinite: as long as the policy likes.
        aims: whether it aims at that wait, which is no bound then.
        own_waits: whether it has waits of its own, so that none can be configured.
    """

    make: Callable[[float], Policy]
    wait: float = math.inf
    aims: bool = False
    own_waits: bool = False


POLICIES: dict[str, Kind] = {
    "paced": Kind(Paced),
    "window": Kind(Window, wait=DEFAULT_WINDOW),
    "table": Kind(lambda wait: Table(), own_waits=True),
    "pid": Kind(Pid, wait=DEFAULT_WINDOW, aims=True),
}
"""Policies by the names that users write."""

NAMES = tuple(POLICIES)


def build(name: str, max_wait: float | None) -> Policy:
    """Build a fresh policy.

    Arguments:
        name: one of NAMES.
        max_wait: longest wait for batch-mates in seconds; None for the policy's own.
    """
    kind = POLICIES[name]
    return kind.make(kind.wait if max_wait is None else max_wait)

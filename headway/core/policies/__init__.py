"""The departure policies, one file each. `build` makes one by name; a new policy is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from headway.core.departure import Policy
from headway.core.policies.paced import Paced
from headway.core.policies.pid import Pid
from headway.core.policies.table import Table
from headway.core.policies.window import Window

DEFAULT_WINDOW = 0.040
"""Seconds the policy `window` waits, and `pid` aims at, when no wait is configured."""

_MAKERS: dict[str, Callable[[float | None], Policy]] = {
    "paced": Paced,
    "window": lambda wait: Window(DEFAULT_WINDOW if wait is None else wait),
    "table": lambda wait: Table(),
    "pid": lambda wait: Pid(DEFAULT_WINDOW if wait is None else wait),
}
NAMES = tuple(_MAKERS)


def build(name: str, max_wait: float | None) -> Policy:
    """A fresh policy.

    Arguments:
        name: one of NAMES.
        max_wait: longest wait for batch-mates in seconds, or None for the policy's own.
    """
    return _MAKERS[name](max_wait)

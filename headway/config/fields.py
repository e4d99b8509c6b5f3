"""Field of the table of settings, and words of its helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any

from headway.core.policies import POLICIES


def setting(
    default: Any,
    group: str,
    help_text: str,
    unit: str = "",
    show: Callable[[str], str] | None = None,
    has_flag: bool = True,
) -> Any:
    """Field of Settings. `show` turns a text that holds a secret into what may be printed."""
    metadata = {"help": help_text, "unit": unit, "group": group, "show": show, "has_flag": has_flag}
    return field(default=default, repr=show is None, metadata=metadata)


def hidden(text: str) -> str:
    """Words in the place of a secret."""
    return "…"


def joined(words: Iterable[str], last: str) -> str:
    """`words` as a list in a sentence, with `last` before the last one."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def unset_wait() -> str:
    """Wait of each policy when none is configured; policies of one wait together."""
    named: dict[str, list[str]] = {}
    for name, policy in POLICIES.items():
        if not policy.own_waits:
            named.setdefault("none" if math.isinf(policy.wait) else f"{policy.wait * 1000:g}", []).append(name)
    return ", ".join(f"{wait} for {joined(named[wait], 'and')}" for wait in sorted(named))

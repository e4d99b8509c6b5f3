"""Deadlines that suit the time a model's batches take: for a batch, for the wait in the queue, and for the whole request."""

from __future__ import annotations

import math
from collections.abc import Mapping

_AMPLE = 2.0  # An ample deadline is this multiple of the time that it must cover.
MOST_MS = 600_000  # Longest deadline that the settings allow, in ms.
HELD_SHARE = 0.95  # Share of its time for which a request may wait for a starting worker. The rest is left for the run.


def fitting(seconds: float) -> dict[str, int]:
    """Return suitable deadlines in ms, by setting, for a model whose batches take `seconds`. They are long enough for a request
    that arrives just after a batch has left: it waits for that batch, and runs in the next one."""
    batch = _rounded(_AMPLE * seconds)
    fits = {"gpu_timeout_ms": batch, "queue_timeout_ms": batch, "request_timeout_ms": 2 * batch}
    return {name: min(value, MOST_MS) for name, value in fits.items()}


def flags(seconds: float, limits: Mapping[str, float]) -> str:
    """Return flags that raise deadlines that are too short for batches of `seconds`, or "". `limits` maps settings to ms."""
    raised = {name: value for name, value in fitting(seconds).items() if limits.get(name, math.inf) < value}
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in raised.items())


def _rounded(seconds: float) -> int:
    digits = max(math.floor(math.log10(seconds * 1000)) - 1, 0) if seconds > 0.0 else 0
    return math.ceil(seconds * 1000 / 10.0**digits) * int(10.0**digits)

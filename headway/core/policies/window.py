"""`window`: size or time, the usual rule. A batch leaves when it is full or its oldest member has waited long enough.

It leaves early when fewer than one more arrival is expected in what remains of the window: then waiting
costs latency and changes nothing.
"""

from __future__ import annotations

from headway.core.departure import Load, Rule

DEFAULT_WINDOW = 0.040
"""Seconds the policy `window` waits, and `pid` aims at, when no wait is configured."""


class Window:
    """Waits at most `max_wait` seconds for batch-mates."""

    def __init__(self, max_wait: float) -> None:
        self._window = max_wait

    def rule(self, load: Load) -> Rule:
        """Return the rule that leaves full at the largest batch, or when the window is over."""
        return Rule(
            size=load.max_batch,
            window=self._window,
            rate=load.rate,
            service=load.batch_seconds(load.max_batch),
        )

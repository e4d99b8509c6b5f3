"""`table`: three fixed pairs of batch size and wait, chosen by load.

    below 50 % busy and fewer than 10 waiting   16 / 30 ms
    above 85 % busy or more than 100 waiting    64 / 100 ms
    otherwise                                   32 / 50 ms

The rule that operators write by hand; here as a baseline, and for those who want its predictability.
"""

from __future__ import annotations

from headway.core.departure import Load, Rule

LIGHT = (16, 0.030)
NORMAL = (32, 0.050)
HEAVY = (64, 0.100)


class Table:
    """Looks batch size and window up by utilisation and depth."""

    def rule(self, load: Load) -> Rule:
        """Return the rule of the row that fits the load; sizes are capped by the largest batch."""
        if load.utilisation > 0.85 or load.depth > 100:
            size, window = HEAVY
        elif load.utilisation < 0.50 and load.depth < 10:
            size, window = LIGHT
        else:
            size, window = NORMAL
        size = min(size, load.max_batch)
        return Rule(size=size, window=window, rate=load.rate, service=load.batch_seconds(size))

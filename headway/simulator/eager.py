"""`eager`: leave whenever a GPU is free. Not for production: it is what the others are measured against."""

from __future__ import annotations

from headway.core.departure import Load, Rule


class Eager:
    """Never holds a batch back."""

    def rule(self, load: Load) -> Rule:
        """A gap of 0: whatever waits leaves."""
        return Rule(size=load.max_batch, headway=0.0)

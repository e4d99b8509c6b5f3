"""Policy `eager`: leave whenever a GPU is free. Not for production: the other policies are measured against it."""

from __future__ import annotations

from headway.core.departure import Load, Rule


class Eager:
    """Policy that never holds a batch back."""

    def rule(self, load: Load) -> Rule:
        """Rule with a gap of 0: whatever waits leaves."""
        return Rule(size=load.max_batch, headway=0.0)

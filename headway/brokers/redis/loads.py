"""Load of a queue that is cut into shards."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.departure import Load
from headway.core.slot_factors import FACTORS, USUAL, paces


def together(loads: Sequence[Load]) -> Load:
    """Load of all shards: their sums, and the costs of the shard that has seen most batches, or the largest."""
    slots = sum(load.slots for load in loads)
    counts = [sum(load.paces[position] for load in loads if load.paces) for position in range(len(FACTORS))]
    counts[USUAL] = 0  # Where all are alike they are not counted.
    known = max(loads, key=lambda load: (load.departures, load.largest))
    rate = sum(load.rate for load in loads)
    return Load(
        rate=rate,
        alpha=known.alpha,
        beta=known.beta,
        slots=slots,
        max_batch=known.max_batch,
        depth=sum(load.depth for load in loads),
        utilisation=known.utilisation,
        wait=max(load.wait for load in loads),
        departures=sum(load.departures for load in loads),
        deviation=known.deviation,
        largest=known.largest,
        entry_size=sum(load.size_rate for load in loads) / rate if rate else 1.0,
        paces=paces(counts, slots),
    )

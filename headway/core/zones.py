"""Zones: which zone's queue a request waits in, and when slots of another zone may help there.

Each zone has queues of its own, as each shard has, with the slots of that zone at home. So batches form within a zone,
and departures are spaced by its slots. The empty name is the zone of all that are given none.

A slot of another zone helps only where it is worth a hop between zones. While a zone keeps up, an entry leaves at the
latest when a slot at home comes free, and within the time of a full batch each of them does. So an entry that has waited
for longer than a full batch takes shows that the zone is behind. Earlier help takes slots away just when their own zone
needs them, and later help lets a wait grow that an idle slot could have ended.

What a zone that is behind is helped with leaves at once: its rule spaces batches as its own slots can run them, and that
would keep helpers from what is more.
"""

from __future__ import annotations

from collections.abc import Mapping

from headway.core.departure import Load, Rule

GOLDEN = 0.618033988749895
"""Share of the circle by which turns go on: any number of them in a row is spread evenly."""
LEAST_WAIT = 0.01
"""Least seconds that an entry must have waited before another zone helps, however short batches are."""


class HelpAtOnce:
    """Policy of slots that help another zone: what waits there leaves now."""

    def rule(self, load: Load) -> Rule:
        """See Policy."""
        return Rule(load.max_batch, window=0.0)


HELP = HelpAtOnce()


def choose(own: str, slots: Mapping[str, int], turn: int) -> str:
    """Zone whose queue an entry waits in: its gateway's own unless only others have slots, then one by turn, weighted by them.

    Arguments:
        own: zone of the gateway.
        slots: live slots by zone, of the queue that the entry is for.
        turn: number that grows by one with each choice.
    """
    total = sum(slots.values())
    if slots.get(own) or not total:
        return own
    left = int(turn * GOLDEN % 1.0 * total)
    for zone in sorted(slots):
        left -= slots[zone]
        if left < 0:
            return zone
    return own


def behind(depth: int, slots: int, waited: float, batch_seconds: float) -> bool:
    """Whether slots of another zone may claim from a queue, when its rule says go.

    Arguments:
        depth: entries waiting in the queue.
        slots: slots at home in it; a queue without any lives on help.
        waited: seconds for which the oldest of them has waited.
        batch_seconds: expected run time in seconds of a full batch.
    """
    return depth > 0 and (not slots or waited > max(batch_seconds, LEAST_WAIT))

"""Simulated gateways: requests come in, gather, and go to a shard in turn, as in production.

come ──▶ gathered ──send──▶ part ──▶ shard in turn
             (at once, when the last call was long enough ago)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headway.core.shards import in_turn, parts
from headway.core.zones import choose
from headway.model import Entry
from headway.simulator.fleet import Zone
from headway.simulator.scenario import Scenario

Came = tuple[Entry, float]
"""Entry, and the instant at which it came to its gateway."""


class Gateway:
    """Simulated gateway.

    Arguments:
        scenario: gives the seconds for which entries gather, and the size of a batch.
        turn: number of the shard whose turn it is first.
        zone: number of its zone.
    """

    __slots__ = ("_gather", "_max_batch", "_open_at", "_turn", "_zone", "gathered")

    def __init__(self, scenario: Scenario, turn: int, zone: int) -> None:
        self._zone = zone
        self.gathered: list[Came] = []
        """Entries that wait for the next call."""
        self._gather = scenario.gather
        self._max_batch = scenario.max_batch
        self._open_at = 0.0
        self._turn = turn

    def come(self, entry: Entry, now: float) -> float | None:
        """Take an entry in. Returns the instant at which to `send`; None when that is known already."""
        self.gathered.append((entry, now))
        if now >= self._open_at:
            return now
        return now + self._gather if len(self.gathered) == 1 else None

    def send(self, zones: Sequence[Zone], now: float) -> Iterator[tuple[Zone, int, list[Came]]]:
        """Send the entries that have gathered, by zone and number of the shard.

        Arguments:
            zones: all zones.
            now: the instant.
        """
        gathered, self.gathered = self.gathered, []
        self._open_at = now + self._gather
        own = zones[self._zone]
        count = parts(len(gathered), self._max_batch) if own.active > 1 or not own.slots else 1
        for number in range(count):
            zone = own
            if len(zones) > 1 and not own.slots:
                slots = {one.name: one.slots for one in zones}
                zone = zones[int(choose(own.name, slots, self._turn))]
            yield zone, in_turn(self._turn, zone.slots, zone.active), gathered[number::count]
            self._turn += 1


def choose_gateway(scenario: Scenario, rng: Callable[[], float]) -> Callable[[], Gateway]:
    """Make a function that draws the gateway of the next request.

    Arguments:
        scenario: gives the number of gateways.
        rng: uniform in [0, 1).
    """
    count = scenario.gateways
    gateways = [Gateway(scenario, int(rng() * scenario.workers), one % scenario.zones) for one in range(count)]
    if count == 1:
        return lambda: gateways[0]
    return lambda: gateways[int(rng() * count)]

"""Simulated gateways: requests come in, gather, and go to a shard in turn, as in production.

come ──▶ gathered ──send──▶ part ──▶ shard in turn
             (at once, when the last call was long enough ago)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headway.core.shards import in_turn, parts
from headway.model import Entry
from headway.simulator.scenario import Scenario

Came = tuple[Entry, float]
"""Entry, and the instant at which it came to its gateway."""


class Gateway:
    """Simulated gateway.

    Arguments:
        scenario: gives the seconds for which entries gather, and the size of a batch.
        turn: number of the shard whose turn it is first.
    """

    __slots__ = ("_gather", "_max_batch", "_open_at", "_turn", "gathered")

    def __init__(self, scenario: Scenario, turn: int) -> None:
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

    def send(self, slots: int, active: int, now: float) -> Iterator[tuple[int, list[Came]]]:
        """Send the entries that have gathered, by shard.

        Arguments:
            slots: live workers.
            active: shards in use.
            now: the instant.
        """
        gathered, self.gathered = self.gathered, []
        self._open_at = now + self._gather
        count = parts(len(gathered), self._max_batch) if active > 1 else 1
        for number in range(count):
            yield in_turn(self._turn, slots, active), gathered[number::count]
            self._turn += 1


def choose_gateway(scenario: Scenario, rng: Callable[[], float]) -> Callable[[], Gateway]:
    """Make a function that draws the gateway of the next request.

    Arguments:
        scenario: gives the number of gateways.
        rng: uniform in [0, 1).
    """
    count = scenario.gateways
    gateways = [Gateway(scenario, int(rng() * scenario.workers)) for _ in range(count)]
    if count == 1:
        return lambda: gateways[0]
    return lambda: gateways[int(rng() * count)]

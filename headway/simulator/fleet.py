"""State of the simulated queue and its workers; `engine` moves them."""

from __future__ import annotations

import math

from headway.core.batch import Departure
from headway.core.queue import ModelQueue
from headway.core.slot_pace import SlotPace
from headway.simulator.scenario import Scenario


class Shard:
    """Part of the queue of one zone, and the workers that wait for it."""

    __slots__ = ("idle", "looks_at", "number", "policy", "queue", "zone")

    def __init__(self, number: int, zone: int, scenario: Scenario) -> None:
        self.number = number
        self.zone = zone
        self.queue = ModelQueue(scenario.limits())
        self.policy = scenario.make_policy()
        self.idle: dict[str, None] = {}
        self.looks_at = math.inf


class Zone:
    """Part of the fleet: its shards, the workers that are known to live there, and how many shards are in use."""

    __slots__ = ("active", "name", "shards", "slots")

    def __init__(self, number: int, scenario: Scenario) -> None:
        self.name = f"{number:02}"
        self.shards = [Shard(number * scenario.shards + shard, number, scenario) for shard in range(scenario.shards)]
        self.slots, self.active = 0, 1


class Worker:
    """A GPU. `life` counts its lives, so that work of an earlier one is known to be void; `rest` counts its rests."""

    __slots__ = (
        "alive", "departure", "died_at", "helped", "home", "known", "life", "look", "looks_at", "name", "pace", "rest", "shard", "slow",
        "strays",
    )  # fmt: skip

    def __init__(self, name: str, home: Shard, slow: bool, pace: SlotPace) -> None:
        self.name = name
        self.known = True
        """Whether it counts as alive."""
        self.helped = False
        """Whether its last batch was of a zone that is behind."""
        self.looks_at = 0.0
        """Instant from which on it looks again at the zones that are behind."""
        self.strays: list[Shard] = []
        """Shards of other zones that were behind when it last looked."""
        self.pace = pace
        self.slow = slow
        self.life = self.rest = 0
        self.alive = True
        self.died_at = 0.0
        self.home = self.shard = home
        self.departure: Departure | None = None
        """Departure that it runs, from `shard`; None when idle."""
        self.look = 0
        """Number of the shard that it looked at last."""

"""State of the simulated queue and its workers; `engine` moves them."""

from __future__ import annotations

import math

from headway.core.batch import Departure
from headway.core.queue import ModelQueue
from headway.core.slot_pace import SlotPace
from headway.simulator.scenario import Scenario


class Shard:
    """Part of the queue, and the workers that wait for it."""

    __slots__ = ("idle", "looks_at", "number", "policy", "queue")

    def __init__(self, number: int, scenario: Scenario) -> None:
        self.number = number
        self.queue = ModelQueue(scenario.limits())
        self.policy = scenario.make_policy()
        self.idle: dict[str, None] = {}
        self.looks_at = math.inf


class Worker:
    """A GPU. `life` counts its lives, so that work of an earlier one is known to be void; `rest` counts its rests."""

    __slots__ = (
        "alive", "departure", "died_at", "home", "life", "look", "name", "pace", "rest", "shard", "slow",
    )  # fmt: skip

    def __init__(self, name: str, home: Shard, slow: bool, pace: SlotPace) -> None:
        self.name = name
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

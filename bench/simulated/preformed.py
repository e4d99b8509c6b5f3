"""Batches that each gateway forms by itself, as is usual. Not for production: a shared queue is measured against them.

    gateway 1: size or time ──batch──▶ ┐
    gateway 2: size or time ──batch──▶ ├─ queue of batches ──▶ free GPU
    gateway 3: size or time ──batch──▶ ┘

A batch is closed before it is known when a GPU will be free for it, and by a gateway that sees its own share of the
traffic only.
"""

import heapq
import math
import random
from collections import deque

from headway.core.departure import FULL, WINDOW
from headway.simulator.record import Record
from headway.simulator.scenario import Scenario
from headway.simulator.traffic import arrivals


def simulate_preformed(scenario: Scenario, window: float) -> Record:
    """Run a scenario with batches formed by its gateways, which close a `window` after their oldest member. No entry is refused
    or expires, no worker dies."""
    record = Record(scenario)
    free_at = [0.0] * scenario.workers  # A heap: the first batch goes to the first GPU that is free.
    for formed_at, members, reason in _formed(scenario, window, record):
        left_at = max(formed_at, free_at[0])
        seconds = scenario.alpha + scenario.beta * len(members)
        ends = left_at + seconds + scenario.overhead
        heapq.heapreplace(free_at, ends)
        record.departed(len(members), reason, left_at)
        record.ran(left_at + scenario.overhead / 2, seconds)
        for came in members:
            record.answered(0, came, ends)
    return record


def _formed(scenario: Scenario, window: float, record: Record) -> list[tuple[float, list[float], str]]:
    """Batches in the order in which they close: instant, instants at which the members came, reason."""
    rng = random.Random(f"{scenario.seed}/arrivals")
    chooser = random.Random(f"{scenario.seed}/doors")
    open_batches: list[list[float]] = [[] for _ in range(scenario.gateways)]
    closing: deque[tuple[float, int]] = deque()  # In order: the window is the same for all.
    formed = []
    for now in arrivals(scenario, rng):
        while closing and closing[0][0] <= now:
            formed += _closed(open_batches, *closing.popleft(), window)
        record.came(0, now)
        gateway = int(chooser.random() * scenario.gateways)
        members = open_batches[gateway]
        members.append(now)
        if len(members) == scenario.max_batch:
            formed.append((now, members, FULL))
            open_batches[gateway] = []
        elif len(members) == 1 and window < math.inf:
            closing.append((now + window, gateway))
    for at, gateway in closing:
        formed += _closed(open_batches, at, gateway, window)
    return formed


def _closed(
    open_batches: list[list[float]], at: float, gateway: int, window: float
) -> list[tuple[float, list[float], str]]:
    """Batch of a gateway that closes now, if it is still the one whose window ends at this instant."""
    members = open_batches[gateway]
    if not members or members[0] + window != at:
        return []
    open_batches[gateway] = []
    return [(at, members, WINDOW)]

"""One process as its admin port shows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headway.config import Settings
from headway.gateway.gateway import Gateway
from headway.model import Role
from headway.ports import Broker, DeadLetters, Fleet, Ledger
from headway.runtime.counters import Counters


@dataclass(frozen=True, slots=True)
class ProcessView:
    """What an admin port tells of.

    Attributes:
        settings: the process's.
        role: what it does.
        id: its own in the fleet.
        counters: its counters.
        broker: whose queue and workers are shown.
        letters: the dead letters.
        fleet: the other processes.
        clock: monotonic seconds of this process.
        now: asks for the broker's clock, on which all its instants are.
        gateway: whose requests are shown and which replays dead letters; None where there is none.
        ledger: what is known of requests beyond memory; None where nothing is recorded.
    """

    settings: Settings
    role: Role
    id: str
    counters: Counters
    broker: Broker
    letters: DeadLetters
    fleet: Fleet
    clock: Callable[[], float]
    now: Callable[[], Awaitable[float]]
    gateway: Gateway | None = None
    ledger: Ledger | None = None

"""One process as its admin port shows it, and how long it waits for a broker that may be elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from headway.config import Settings
from headway.errors import BrokerUnavailable
from headway.gateway import Gateway
from headway.model import Role
from headway.ports import Broker, DeadLetters, Fleet, Ledger
from headway.tally import Tally

PATIENCE = 0.8
"""Seconds that a route waits for the broker: those who probe usually give up after 1."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Process:
    """What an admin port tells of.

    Attributes:
        settings: the process's.
        role: what it does.
        id: its own in the fleet.
        tally: its counters.
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
    tally: Tally
    broker: Broker
    letters: DeadLetters
    fleet: Fleet
    clock: Callable[[], float]
    now: Callable[[], Awaitable[float]]
    gateway: Gateway | None = None
    ledger: Ledger | None = None


async def soon(asked: Awaitable[T]) -> T:
    """What the broker answers.

    Raises:
        BrokerUnavailable: it does not within PATIENCE.
    """
    try:
        return await asyncio.wait_for(asked, PATIENCE)
    except TimeoutError:
        raise BrokerUnavailable(f"the broker does not answer within {PATIENCE * 1000:.0f} ms") from None

"""View of its own process for the admin port. All routes use it, so it stands beside them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from headway.config import Settings
from headway.doors.readiness import within_answer_time
from headway.errors import BrokerUnavailable
from headway.model import Role
from headway.ports import Board, Broker, DeadLetters, Fleet, Ledger
from headway.runtime.counters import Counters
from headway.telemetry.figures import ProcessFigures, State, collect, reach

if TYPE_CHECKING:
    from headway.gateway.gateway import Gateway


class ProcessView(msgspec.Struct, frozen=True):
    """View of its own process for the admin port.

    Attributes:
        now: asks for the broker's time, in which all the broker's instants are given; `clock` is this process's, monotonic.
        gateway: has the pending requests and replays dead letters; None if this process is no gateway.
        ledger: has requests that memory no longer holds; None if nothing is recorded.
        starting: returns True until the process is up.
        figures: returns the figures of the process for its metrics.
        expected: number of healthy workers that the fleet should have; 0 if not set.
        memory: returns bytes that the broker's servers use and may use; None if the broker is in this process.
        troubles: returns the stores that don't answer, by name, and what that means; see FigureSource.
    """

    settings: Settings
    role: Role
    id: str
    counters: Counters
    broker: Broker
    letters: DeadLetters
    fleet: Fleet
    board: Board
    clock: Callable[[], float]
    now: Callable[[], Awaitable[float]]
    gateway: Gateway | None = None
    ledger: Ledger | None = None
    starting: Callable[[], bool] = lambda: False
    figures: Callable[[], ProcessFigures] = lambda: ProcessFigures(())
    expected: int = 0
    memory: Callable[[], tuple[int, int]] | None = None
    troubles: Callable[[], Mapping[str, str]] = dict

    async def state(self) -> State:
        """Return the state for the metrics. An unreachable broker is part of it and raises nothing."""
        own = self.figures()
        memory = None if self.memory is None else self.memory()
        try:
            if own.exports_fleet:
                figures = collect(self.broker, self.letters, self.fleet, self.expected, memory)
                return State(self.counters, own, await within_answer_time(figures))
            await within_answer_time(reach(self.fleet))
        except BrokerUnavailable:
            return State(self.counters, own, broker_up=False)
        return State(self.counters, own)

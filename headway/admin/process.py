"""View of one process, for its admin port."""

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
    """View of one process, from which its admin port answers.

    Attributes:
        settings: settings of the process.
        role: role of the process.
        id: id of the process in the fleet.
        counters: counters of the process.
        broker: broker whose queue and workers are shown.
        letters: the dead letters.
        fleet: the other processes.
        board: the departure board.
        clock: monotonic seconds of this process.
        now: asks for the instant on the broker's clock, on which all its instants are.
        gateway: gateway whose requests are shown and which replays dead letters; None where there is none.
        ledger: ledger of requests that memory no longer holds; None where nothing is recorded.
        starting: whether the process has not come up yet.
        figures: reads the figures of the process for its metrics.
        expected: healthy workers that the fleet should have; 0: nobody has said.
        troubles: says which stores of this process do not answer now, and what that means, by their names; see FigureSource.
        memory: bytes that the broker's servers use, and most that they may; None where the broker is in this process.
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
        """Return the state that the metrics show. Raises nothing: a broker that does not answer is part of it."""
        own = self.figures()
        memory = None if self.memory is None else self.memory()
        try:
            if own.exports_fleet:
                asked = collect(self.broker, self.letters, self.fleet, self.expected, memory)
                return State(self.counters, own, await within_answer_time(asked))
            await within_answer_time(reach(self.fleet))
        except BrokerUnavailable:
            return State(self.counters, own, broker_up=False)
        return State(self.counters, own)

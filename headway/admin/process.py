"""View of the process shared by all admin routes, and how ids, times and tiers are formatted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from headway.config import Settings
from headway.doors.fields import ID_PREFIX
from headway.doors.readiness import within_answer_time
from headway.errors import BrokerUnavailable
from headway.http.routing import Request
from headway.model import Role
from headway.ports import Board, Broker, DeadLetters, Fleet, Ledger
from headway.runtime.counters import Counters
from headway.telemetry.figures import ProcessFigures, State, collect, reach

if TYPE_CHECKING:
    from headway.gateway.gateway import Gateway


class ProcessView(msgspec.Struct, frozen=True):
    """The admin port's view of its process."""

    settings: Settings
    role: Role
    id: str
    counters: Counters
    broker: Broker
    letters: DeadLetters
    fleet: Fleet
    board: Board
    clock: Callable[[], float]  # This process's monotonic clock.
    now: Callable[[], Awaitable[float]]  # The broker's clock, on which all times from the broker are based.
    gateway: Gateway | None = None  # Replays dead letters. None in a role without a gateway.
    ledger: Ledger | None = None  # None if requests aren't recorded.
    starting: Callable[[], bool] = lambda: False
    figures: Callable[[], ProcessFigures] = lambda: ProcessFigures(())
    expected: int = 0  # Intended number of healthy workers, or 0 if unknown.
    memory: Callable[[], tuple[int, int]] | None = None  # Used bytes and limit of the broker's servers, if it has any.
    troubles: Callable[[], Mapping[str, str]] = dict  # What is wrong with each unavailable store, by name.

    async def state(self) -> State:
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


def id_in(request: Request) -> str:
    """Return the request id in a path, without its prefix."""
    return request.params["id"].removeprefix(ID_PREFIX)


def instant(seconds: float) -> str:
    """Format Unix time according to RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def tier_name(tier: int, tiers: Sequence[str]) -> str:
    """Return a tier's name, or its index if this process is configured with fewer tiers than the fleet."""
    return tiers[tier] if tier < len(tiers) else str(tier)

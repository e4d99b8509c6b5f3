"""The numbers behind the metrics: those of one process and those of the fleet, which only one process exports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from headway.model import BulkDepth, Capacity, GpuFigures, ProcessInfo, TierDepth, WorkerInfo
from headway.ports import Broker, DeadLetters, Fleet
from headway.runtime.counters import Counters
from headway.version import __version__


class ProcessFigures(msgspec.Struct, frozen=True):
    """The numbers of one process that aren't counters, and its possible label values. Metrics only cover `models`.

    A number is None if the process lacks that part: `pending` and `promise` without a gateway, `slots` without batchers,
    and `leader` without a controller. `promise` is the latency in seconds promised for 95 % of the requests. `bulk_paused`
    counts jobs that are paused for reasons other than their lines. `slots` has the busy share of each slot, and `gpus` the
    stats of its GPU, by model and worker. `versions` are pairs of a model and a running version. `secure` names the ports
    with TLS."""

    tiers: Sequence[str]
    models: Collection[str] = ()
    version: str = __version__
    draining: bool = False
    connections: Mapping[str, int] = msgspec.field(default_factory=dict)
    pending: int | None = None
    promise: float | None = None
    fallbacks: Collection[str] = ()
    rules: Collection[str] = ()
    ledger_backlog: int | None = None
    bulk_jobs: Mapping[str, int] | None = None
    bulk_paused: int | None = None
    slots: Mapping[tuple[str, str], float] | None = None
    gpus: Mapping[tuple[str, str], GpuFigures] = msgspec.field(default_factory=dict)
    versions: Sequence[tuple[str, str]] = ()
    leader: bool | None = None
    exports_fleet: bool = True
    secure: Collection[str] = ()
    worker_label: Callable[[str], str] = str


class FleetState(msgspec.Struct, frozen=True):
    """The numbers of the whole fleet. `letters` counts each model's current dead letters; `letters_ever` also counts
    those that are gone. `expected` is the intended number of healthy workers, or 0 if unknown. `memory` has the used and
    maximum bytes of the broker's servers (maximum 0: no limit). It is None for a broker in this process."""

    depths: Sequence[TierDepth] = ()
    workers: Sequence[WorkerInfo] = ()
    letters: Mapping[str, int] = msgspec.field(default_factory=dict)
    letters_ever: Mapping[str, int] = msgspec.field(default_factory=dict)
    capacities: Sequence[Capacity] = ()
    members: Sequence[ProcessInfo] = ()
    expected: int = 0
    memory: tuple[int, int] | None = None
    bulk: Sequence[BulkDepth] = ()


class State(msgspec.Struct, frozen=True):
    """Metrics of one process. `fleet` is None if another process exports it, or if the broker didn't answer."""

    counters: Counters
    own: ProcessFigures
    fleet: FleetState | None = None
    broker_up: bool = True


async def collect(
    broker: Broker, letters: DeadLetters, fleet: Fleet, expected: int = 0, memory: tuple[int, int] | None = None
) -> FleetState:
    """Read the fleet's numbers. Raises BrokerUnavailable."""
    (depths, bulk), (workers, letters_kept, letters_ever, capacities, members) = await asyncio.gather(
        asyncio.gather(broker.depths(), broker.bulk_queues()),
        asyncio.gather(broker.workers(), letters.counts(), letters.totals(), fleet.capacities(), fleet.members()),
    )
    return FleetState(depths, workers, letters_kept, letters_ever, capacities, members, expected, memory, bulk)


async def reach(fleet: Fleet) -> None:
    """Make a cheap call to the broker. Raises BrokerUnavailable if it doesn't answer."""
    await fleet.members()

"""Figures behind the metrics: those of one process, and those of the fleet, which one process exports for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from headway.model import BulkDepth, Capacity, GpuFigures, ProcessInfo, TierDepth, WorkerInfo
from headway.ports import Broker, DeadLetters, Fleet
from headway.runtime.counters import Counters
from headway.version import __version__


class ProcessFigures(msgspec.Struct, frozen=True):
    """Figures of one process besides its counters, and the label values that it may count under.

    Attributes:
        models: models that it serves or runs; counts of other models are not exported.
        connections: open connections by port.
        pending: requests that it holds; None without a gateway.
        promise: latency in seconds that is promised for 95 % of the requests; None without a gateway.
        fallbacks: models with a fallback.
        rules: rules of its input policy.
        ledger_backlog: records that wait for the ledger; None without one.
        bulk_jobs: bulk jobs that it holds, by status; None if it never holds any.
        bulk_paused: how many of those are paused through no fault of their lines.
        slots: busy share of each of its slots, by model and worker; None without batchers.
        gpus: figures of the slots' GPUs, by model and worker.
        versions: models that it runs, each with its version.
        leader: whether its controller leads; None without one.
        secure: its ports that use TLS.
        worker_label: returns the label of a worker's id.
    """

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
    """Figures of the whole fleet; `depths` are those of the queues.

    Attributes:
        letters, letters_ever: dead letters kept, and ever kept, by model.
        expected: healthy workers that the fleet should have; 0 if nobody has said.
        memory: bytes that the broker's servers use, and may use (0 for no limit); None for a broker in this process.
        bulk: bulk entries of the queues that have had any.
    """

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
    """Figures that one process exports. `fleet` is None if another process exports its figures, or the broker did not answer."""

    counters: Counters
    own: ProcessFigures
    fleet: FleetState | None = None
    broker_up: bool = True


async def collect(
    broker: Broker, letters: DeadLetters, fleet: Fleet, expected: int = 0, memory: tuple[int, int] | None = None
) -> FleetState:
    """Read the fleet's figures from broker, dead letters and fleet. Raises BrokerUnavailable."""
    (depths, bulk), (workers, letters_kept, letters_ever, capacities, members) = await asyncio.gather(
        asyncio.gather(broker.depths(), broker.bulk_queues()),
        asyncio.gather(broker.workers(), letters.counts(), letters.totals(), fleet.capacities(), fleet.members()),
    )
    return FleetState(depths, workers, letters_kept, letters_ever, capacities, members, expected, memory, bulk)


async def reach(fleet: Fleet) -> None:
    """Find out whether the broker answers, by a cheap call. Raises BrokerUnavailable if it does not."""
    await fleet.members()

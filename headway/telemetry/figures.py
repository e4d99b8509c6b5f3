"""Figures behind the metrics: those of one process, and those of the whole fleet, which one process exports for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from headway.model import BulkDepth, Capacity, GpuFigures, ProcessInfo, TierDepth, WorkerInfo
from headway.ports import Broker, DeadLetters, Fleet
from headway.runtime.counters import Counters
from headway.version import __version__


class ProcessFigures(msgspec.Struct, frozen=True):
    """Figures of one process at an instant, beside its counters, and the label values that it is known to count under.

    Attributes:
        tiers: names of the tiers, highest first.
        models: names of the models that it serves or runs; what it has counted of others is not exported.
        version: version of Headway.
        draining: whether it is going down.
        connections: open connections by port.
        pending: requests that it holds; None: it has no gateway.
        promise: seconds that are promised for P95; None: it has no gateway.
        fallbacks: models that its gateway has fallbacks for.
        rules: names of the rules of its input policy.
        ledger_backlog: records that wait for the ledger; None: it has none.
        bulk_jobs: bulk jobs that it holds, by status; None: it has none ever.
        bulk_paused: number of those that pause by no fault of their lines.
        slots: busy share of each of its slots, by model and worker; None: it has no batchers.
        gpus: figures of the GPU of each of its slots that has one, by model and worker.
        versions: models that it runs, each with its version.
        leader: whether its controller leads; None: it has none.
        exports_fleet: whether it is the one that exports the figures of the fleet.
        secure: names of its ports that speak TLS.
        worker_label: makes the label of a worker from its id.
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
    """Figures of the whole fleet at an instant.

    Attributes:
        depths: depths of the queues.
        workers: worker registry.
        letters: number of dead letters kept, by model.
        letters_ever: number of dead letters ever kept, by model.
        capacities: capacities of the workers by model.
        members: processes of the fleet.
        expected: healthy workers that there should be; 0: nobody has said.
        memory: bytes that the broker's servers use, and most that they may (0: no limit); None: it is in this process.
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
    """State of one process at one instant, as it is exported.

    Attributes:
        counters: counters of what has happened so far.
        own: figures of the process.
        fleet: figures of the fleet; None: another process exports them, or the broker did not answer.
        broker_up: whether the broker answered.
    """

    counters: Counters
    own: ProcessFigures
    fleet: FleetState | None = None
    broker_up: bool = True


async def collect(
    broker: Broker,
    letters: DeadLetters,
    fleet: Fleet,
    expected: int = 0,
    memory: tuple[int, int] | None = None,
) -> FleetState:
    """Ask broker, dead letters and fleet for their part of the fleet's figures.

    Raises:
        BrokerUnavailable: one of them does not answer.
    """
    (depths, bulk), (workers, kept, ever, capacities, members) = await asyncio.gather(
        asyncio.gather(broker.depths(), broker.bulk_queues()),
        asyncio.gather(broker.workers(), letters.counts(), letters.totals(), fleet.capacities(), fleet.members()),
    )
    return FleetState(depths, workers, kept, ever, capacities, members, expected, memory, bulk)


async def reach(fleet: Fleet) -> None:
    """Find out whether the broker answers, by a call that costs it little.

    Raises:
        BrokerUnavailable: it does not.
    """
    await fleet.members()

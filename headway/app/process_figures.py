"""Figures of a process for its metrics, read from its parts at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from headway.app.model_plans import ModelPlan
from headway.app.roles import Parts
from headway.config import Settings, fallbacks_of
from headway.config.checks import NONE
from headway.model import GpuFigures
from headway.telemetry.figures import ProcessFigures

if TYPE_CHECKING:
    from headway.bulk.feeder import Feeder
    from headway.controller.controller import Controller
    from headway.gateway.gateway import Gateway
    from headway.gateway.input_gate import InputGate
    from headway.gateway.ledger_writer import LedgerWriter
    from headway.worker.pools import Workers


class OpenPort(Protocol):
    """Port whose connections are counted."""

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        ...


class FigureSource(msgspec.Struct, kw_only=True):
    """Source of the figures of one process; called, it returns them as they are now.

    Attributes:
        settings: settings of the process.
        models: names of the models that it serves, runs or misses, at any time.
        leaving: whether the process is going down.
        gateway, pool, controller, ledger_writer, gate, bulk: its parts; None where it has none.
        process_name: name of the process that its workers' ids begin with, if nobody has chosen it; else empty.
        host: what stands for that in labels.
        ports: its ports by name.
    """

    settings: Settings
    models: Callable[[], Collection[str]]
    leaving: Callable[[], bool]
    gateway: Gateway | None = None
    pool: Workers | None = None
    controller: Controller | None = None
    ledger_writer: LedgerWriter | None = None
    gate: InputGate | None = None
    bulk: Feeder | None = None
    process_name: str = ""
    host: str = ""
    ports: dict[str, OpenPort] = msgspec.field(default_factory=dict)

    def __call__(self) -> ProcessFigures:
        """Return the figures."""
        settings, gateway, pool, controller = self.settings, self.gateway, self.pool, self.controller
        alone = not settings.broker
        return ProcessFigures(
            tiers=settings.tier_names,
            models=self.models(),
            draining=self.leaving(),
            connections={name: port.open_connections for name, port in self.ports.items()},
            pending=None if gateway is None else gateway.pending,
            promise=None if gateway is None else settings.promise_ms / 1000,
            fallbacks=() if gateway is None else tuple(fallbacks_of(settings)),
            rules=() if self.gate is None else self.gate.names,
            ledger_backlog=None if self.ledger_writer is None or gateway is None else self.ledger_writer.waiting,
            bulk_jobs=None if self.bulk is None else self.bulk.statuses,
            bulk_paused=None if self.bulk is None else self.bulk.paused,
            slots=None if pool is None else _shares(pool),
            gpus={} if pool is None else _gpus(pool),
            versions=() if pool is None else sorted({(one.slot.model, one.slot.runs.version) for one in pool.batchers}),
            leader=None if controller is None else controller.leads_now,
            exports_fleet=alone or (controller is not None and controller.leads_now),
            secure=self.ports.keys() if settings.tls_cert else (),
            worker_label=self._worker_label,
        )

    def _worker_label(self, worker: str) -> str:
        """Label of a worker: its id without a process id, of which there would be new ones all the time."""
        own = f"{self.process_name}/"
        return f"{self.host}/{worker.removeprefix(own)}" if self.process_name and worker.startswith(own) else worker


def expected_workers(settings: Settings, parts: Parts, plans: Mapping[str, ModelPlan]) -> int:
    """Healthy workers that there should be; 0: nobody has said.

    A process that is the whole fleet knows by itself, unless its GPUs hold several models, of which some are cold, or
    the autoscaler changes their number.
    """
    scaled = settings.autoscale != NONE
    if settings.expected_workers or settings.broker or not parts.alone or settings.models_per_gpu or scaled:
        return settings.expected_workers
    return sum(plan.settings.workers for plan in plans.values())


def _gpus(pool: Workers) -> Mapping[tuple[str, str], GpuFigures]:
    slots = ((one.slot, one.figures.gpu_figures) for one in pool.batchers)
    return {(slot.model, slot.worker): figures for slot, figures in slots if figures is not None}


def _shares(pool: Workers) -> Mapping[tuple[str, str], float]:
    return {(one.slot.model, one.slot.worker): one.figures.utilisation for one in pool.batchers}

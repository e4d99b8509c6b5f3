"""Figures of a process for its metrics, read from its parts at each scrape, and its description for the fleet."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from headway.app.model_plans import ModelPlan
from headway.app.roles import ROLES, Parts
from headway.config import Settings, fallbacks_of
from headway.config.settings import NONE
from headway.model import GpuFigures, ProcessInfo, Role
from headway.runtime.counters import Counters
from headway.telemetry.figures import ProcessFigures
from headway.version import __version__

if TYPE_CHECKING:
    from headway.bulk.feeder import Feeder
    from headway.controller.controller import Controller
    from headway.gateway.gateway import Gateway
    from headway.gateway.input_gate import InputGate
    from headway.gateway.ledger_writer import LedgerWriter
    from headway.worker.pools import Workers


KEYS_OLD = 5.0
"""Age of the API keys in seconds from which their store counts as away: they are asked for each second."""


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
        counters: its counters.
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
    counters: Counters = msgspec.field(default_factory=Counters)
    process_name: str = ""
    host: str = ""
    ports: Mapping[str, OpenPort] = msgspec.field(default_factory=dict)

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

    def troubles(self) -> dict[str, str]:
        """Words on each store that does not answer now, by its name: `ledger`, `keys` and `bulk_folder`."""
        ledger = self.ledger_writer.trouble() if self.ledger_writer is not None else ""
        age = self.counters.store.keys_age or 0.0
        keys = f"as of {age:.0f} s ago, as their store does not answer" if age >= KEYS_OLD else ""
        jobs, folder = ("", "") if self.bulk is None else (self.bulk.store_trouble, self.bulk.folder_trouble)
        if self.ledger_writer is None:  # Their database is in the folder then.
            folder = folder or jobs
        elif jobs and not ledger:
            ledger = f"does not answer: {jobs}"
        found = {"ledger": ledger, "keys": keys, "bulk_folder": folder}
        return {name: words for name, words in found.items() if words}

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


def describe_process(
    settings: Settings,
    role: Role,
    id: str,
    gateway: Gateway | None,
    controller: Controller | None,
    admin_port: int,
    scalable: Mapping[str, tuple[int, int]],
    every: float,
) -> ProcessInfo:
    """Describe a process as it is now.

    Arguments:
        settings: settings of the process.
        role: role of the process.
        id: its id in the fleet.
        gateway: its gateway; None where it has none.
        controller: its controller; None where it has none.
        admin_port: number of its admin port; 0 while that is not open.
        scalable: see ProcessInfo.
        every: seconds until its next heartbeat.
    """
    throttles = gateway.limiter.throttles if gateway is not None else {}
    arrivals = {model: one.rates for model, one in throttles.items()}
    model = (settings.default or next(iter(settings.served))) if gateway is not None else ""
    weights = {} if settings.models else {"max-batch-weight": str(settings.max_batch_weight), "weight": settings.weight}
    host = f"[{settings.admin_host}]" if ":" in settings.admin_host else settings.admin_host
    return ProcessInfo(
        id=id,
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        admin=f"{settings.scheme}://{host}:{admin_port}" if admin_port else "",
        version=__version__,
        pending=gateway.pending if gateway is not None else 0,
        requests_per_second=gateway.requests_per_second if gateway is not None else 0.0,
        model=model,
        leads=controller is not None and controller.leads,
        shared={
            "shards": str(settings.shards),
            "tiers": ",".join(settings.tier_names),
            "memory-mb": str(settings.memory_mb),
            **weights,
            **_of_sharing(settings, ROLES[role]),
            **({} if controller is None else _of_controllers(settings)),
        },
        arrivals={model: (one.higher, one.lowest) for model, one in arrivals.items()},
        tenant_rates={model: one.tenants for model, one in arrivals.items()},
        scalable=dict(scalable),
        versions={} if gateway is None else gateway.rollout_counts.counts,
        every=every,
    )


def _of_sharing(settings: Settings, parts: Parts) -> dict[str, str]:
    """Settings of each model that do nothing unless its gateways have them, where those have settings of their own for it.

    Workers tell only what is on: gateways may have it without them.
    """
    if not (parts.gateway or parts.batchers):
        return {}
    all_models = settings.served.items()
    values = {(name, model): getattr(one, name) for name in ("cache", "collapse") for model, one in all_models}
    gives = {at: value for at, value in values.items() if value or parts.gateway}
    return {f"{name} of model {model}": "on" if value else "off" for (name, model), value in gives.items()}


def _of_controllers(settings: Settings) -> dict[str, str]:
    """Settings in which all controllers must agree, as any of them may lead."""
    return {
        "autoscale": settings.autoscale,
        "scale-policy": settings.scale_policy,
        "scale-rules": settings.scale_rules or "the usual ones",
        "min-workers": str(settings.min_workers),
        "max-workers": str(settings.max_workers),
        "scale-to-zero-after-s": f"{settings.scale_to_zero_after_s:g}",
    }

"""The numbers of a process for its metrics, and its description for the fleet."""

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
from headway.model import ProcessInfo, Role
from headway.runtime.counters import Counters
from headway.telemetry.figures import ProcessFigures
from headway.version import __version__

if TYPE_CHECKING:
    from headway.bulk.feeder import Feeder
    from headway.controller.controller import Controller
    from headway.gateway.gateway import Gateway
    from headway.gateway.input_gate import InputGate
    from headway.gateway.ledger_writer import LedgerWriter
    from headway.worker.pool import Workers


KEYS_OLD = 5.0  # Age of API keys in seconds at which their store counts as unavailable. They are read every second.


class OpenPort(Protocol):
    """A port that counts its open connections."""

    @property
    def open_connections(self) -> int: ...


class FigureSource(msgspec.Struct, kw_only=True):
    """Returns the numbers of one process for each scrape. Parts that the process lacks are None. If the name of the process was
    generated, it is `process_name`, and worker labels contain `host` in its place."""

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
        settings, gateway, pool, controller = self.settings, self.gateway, self.pool, self.controller
        alone, batchers = not settings.broker, () if pool is None else pool.batchers
        slots = {(batcher.slot.model, batcher.slot.worker): batcher.figures for batcher in batchers}
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
            slots=None if pool is None else {place: figures.utilisation for place, figures in slots.items()},
            gpus={place: gpu for place, figures in slots.items() if (gpu := figures.gpu_figures) is not None},
            versions=sorted({(batcher.slot.model, batcher.slot.runs.version) for batcher in batchers}),
            leader=None if controller is None else controller.leads_now,
            exports_fleet=alone or (controller is not None and controller.leads_now),
            secure=self.ports.keys() if settings.tls_cert else (),
            worker_label=self._worker_label,
        )

    def troubles(self) -> dict[str, str]:
        """Return what is wrong with each unavailable store, by its name: `ledger`, `keys` or `bulk_folder`."""
        ledger = self.ledger_writer.trouble() if self.ledger_writer is not None else ""
        age = self.counters.store.keys_age or 0.0
        keys = f"as of {age:.0f} s ago, because their store does not answer" if age >= KEYS_OLD else ""
        jobs, folder = ("", "") if self.bulk is None else (self.bulk.store_trouble, self.bulk.folder_trouble)
        if self.ledger_writer is None:  # Then the job database is in the bulk folder.
            folder = folder or jobs
        elif jobs and not ledger:
            ledger = f"does not answer: {jobs}"
        troubles = {"ledger": ledger, "keys": keys, "bulk_folder": folder}
        return {store: trouble for store, trouble in troubles.items() if trouble}

    def _worker_label(self, worker: str) -> str:
        """Return a worker's id without the process id, because otherwise each restart would add new labels."""
        own = f"{self.process_name}/"
        return f"{self.host}/{worker.removeprefix(own)}" if self.process_name and worker.startswith(own) else worker


def expected_workers(settings: Settings, parts: Parts, plans: Mapping[str, ModelPlan]) -> int:
    """Return the number of healthy workers that the fleet should have, or 0 if unknown. Unless `expected_workers` is
    set, it is only known if this process is the whole fleet, its GPUs don't hold several models (some would be cold), and no
    autoscaler changes it."""
    scaled = settings.autoscale != NONE
    if settings.expected_workers or settings.broker or not parts.alone or settings.models_per_gpu or scaled:
        return settings.expected_workers
    return sum(plan.settings.workers for plan in plans.values())


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
    """Describe the current state of a process for the fleet. `admin_port` is 0 until the port is open."""
    throttles = gateway.limiter.throttles if gateway is not None else {}
    arrivals = {model: throttle.rates for model, throttle in throttles.items()}
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
        arrivals={model: (rates.higher, rates.lowest) for model, rates in arrivals.items()},
        tenant_rates={model: rates.tenants for model, rates in arrivals.items()},
        scalable=dict(scalable),
        versions={} if gateway is None else gateway.rollout_counts.counts,
        every=every,
    )


def _of_sharing(settings: Settings, parts: Parts) -> dict[str, str]:
    """Return the settings `cache` and `collapse` of each model, which must be the same on all gateways. A worker leaves out
    those that are off, and a controller leaves out all."""
    if not (parts.gateway or parts.batchers):
        return {}
    values = {
        (name, model): getattr(own, name) for name in ("cache", "collapse") for model, own in settings.served.items()
    }
    reported = {place: value for place, value in values.items() if value or parts.gateway}
    return {f"{name} of model {model}": "on" if value else "off" for (name, model), value in reported.items()}


def _of_controllers(settings: Settings) -> dict[str, str]:
    """Return the settings that must be the same on all controllers, because any controller may lead."""
    return {
        "autoscale": settings.autoscale,
        "scale-policy": settings.scale_policy,
        "scale-rules": settings.scale_rules or "the usual ones",
        "min-workers": str(settings.min_workers),
        "max-workers": str(settings.max_workers),
        "scale-to-zero-after-s": f"{settings.scale_to_zero_after_s:g}",
    }

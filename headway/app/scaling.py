"""Builds the autoscaler with its limits, and finds how many workers a process that scales itself can have."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headway.app.devices import CPU
from headway.app.model_plans import ModelPlan
from headway.config import Settings
from headway.config.settings import LOCAL
from headway.core.scaling import rules
from headway.core.scaling.scaler import ScaleLimits
from headway.core.scaling.sizing import MOST_SLOTS, Holding, rooms
from headway.errors import SettingError
from headway.runtime.counters import ControllerCounts

if TYPE_CHECKING:
    from headway.controller.autoscaler import Autoscaler
    from headway.fleet.models import FleetModels
    from headway.worker.pool import WorkerPool, Workers


def check_to_zero(settings: Settings) -> None:
    """Raise SettingError if a model may scale to zero, but no setting says when. Only controllers need that setting."""
    for own in settings.served.values():
        if not own.min_workers and not own.scale_to_zero_after_s:
            reason = "is 0, but no setting says when to remove the last worker"
            hint = "Set --scale-to-zero-after-s, the seconds without a request after which a model has no workers."
            raise SettingError("min_workers", 0, reason, hint)


def local_pools(settings: Settings, plans: Mapping[str, ModelPlan], pool: Workers | None) -> Mapping[str, WorkerPool]:
    """Return the pools that the autoscaler resizes, by model. Raises SettingError if a model starts with too many workers."""
    if settings.autoscale != LOCAL or pool is None:
        return {}
    from headway.worker.pool import WorkerPool, WorkerPools

    by_model = pool.of_models if isinstance(pool, WorkerPools) else {next(iter(plans)): pool}
    pools = {model: pool for model, pool in by_model.items() if isinstance(pool, WorkerPool)}
    for model in pools:
        own = plans[model].settings
        if own.max_workers and own.workers > own.max_workers:
            reason = f"is more than --max-workers {own.max_workers} allows"
            raise SettingError("workers", own.workers, reason, "Lower it, or raise --max-workers.")
    return pools


def most_local(plan: ModelPlan) -> int:
    """Return the maximum number of a model's workers in this process, given its devices or, on the CPU, its cores."""
    settings, most = plan.settings, plan.devices.most
    if settings.max_workers:
        return min(settings.max_workers, most)
    on_cpu = plan.devices.ids[:1] == (CPU,) or not plan.devices.ids
    return min(max(settings.workers, settings.min_workers, os.cpu_count() or 1), most) if on_cpu else most


def scalable(plans: Mapping[str, ModelPlan], pools: Mapping[str, WorkerPool]) -> dict[str, tuple[int, int]]:
    """Return each model's number of workers in this process, and how many it could have if other models released devices."""
    most = {model: most_local(plans[model]) for model in pools}
    turns = {model: pool for model, pool in pools.items() if plans[model].devices.shared}
    if turns:
        places = next(iter(turns.values())).places
        holdings = {model: Holding(pool.size, pool.wanted, most[model]) for model, pool in turns.items()}
        most |= rooms(holdings, places.free, places.taken - sum(holding.has for holding in holdings.values()))
    return {model: (pool.size, pool.size if pool.held else most[model]) for model, pool in pools.items()}


def make_autoscaler(
    settings: Settings,
    fleet_models: FleetModels | None,
    pools: Mapping[str, WorkerPool],
    counters: ControllerCounts,
    clock: Callable[[], float],
) -> Autoscaler:
    """Build a controller's autoscaler. `fleet_models` is None if this process alone defines the models."""
    from headway.controller.autoscaler import Autoscaler, LocalScaling

    cached: dict[str, tuple[Settings, ScaleLimits]] = {}

    def limits(model: str) -> ScaleLimits:
        served = settings.served if fleet_models is None else fleet_models.served
        own = served.get(model, settings)
        entry = cached.get(model)
        if entry is None or entry[0] is not own:
            entry = cached[model] = own, scale_limits(own)
        return entry[1]

    named = settings.served.keys() if fleet_models is None else fleet_models.named
    here = LocalScaling(pools) if settings.autoscale == LOCAL and not settings.broker else None
    return Autoscaler(here, limits, counters, clock, settings.autoscale, named)


def scale_limits(settings: Settings) -> ScaleLimits:
    """Return the bounds and times for scaling a model."""
    return ScaleLimits(
        policy=settings.scale_policy,
        least=max(settings.min_workers, 1),
        most=settings.max_workers or MOST_SLOTS,
        rules=rules.read(settings.scale_rules),
        start_within=2 * settings.start_timeout_ms / 1000,
        promise=settings.promise_ms / 1000,
        idle_after=settings.scale_to_zero_after_s,
    )

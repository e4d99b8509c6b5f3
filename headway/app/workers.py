"""Builds a process's workers: batchers, their pools, shared GPUs, and a gateway's fallback."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from headway.app.backends import (
    BACKENDS,
    BREAKER_COOLDOWN,
    BREAKER_THRESHOLD,
    SlotPlan,
    is_local,
    make_backend,
    make_devices,
    make_report,
    make_weights,
    model_worker_name,
    worker_name,
)
from headway.app.brokers import BrokerBundle, make_memory_broker
from headway.app.devices import CPU, Devices
from headway.app.model_plans import ModelPlan
from headway.backends.process.group_guard import GroupGuard
from headway.backends.process.host_memory import HostMemory
from headway.backends.process.nvml import NvmlGpus
from headway.config import CHARS, Settings, fallback_batches, fallbacks_of, shown_url
from headway.config.target import FileTarget, ModuleTarget, Target, parse_target
from headway.core import policies
from headway.core.breaker import Breaker
from headway.core.ratelimit import CallPace
from headway.errors import SettingError, TargetError
from headway.model import Slot
from headway.ports import WorkSource
from headway.runtime.certificates import RemoteCertificates
from headway.runtime.counters import Counters, WorkerCounts
from headway.runtime.spans import SpanRecorder
from headway.worker.batch_traces import BatchTraces
from headway.worker.batcher import Batcher
from headway.worker.failure_log import FailureLog
from headway.worker.pool import Places, WorkerPool, WorkerPools, Workers
from headway.worker.shared_gpus import MakeBatcher, SharedGpus, SharedModel, Started
from headway.worker.starting import Limits

if TYPE_CHECKING:
    from headway.gateway.direct_mode import Fallback


def make_pools(
    plans: Mapping[str, ModelPlan],
    bundle: BrokerBundle,
    id: str,
    counters: WorkerCounts,
    clock: Callable[[], float],
    *,
    decides: bool,
    certificates: RemoteCertificates | None,
    recorder: SpanRecorder | None,
) -> Workers:
    """Build the workers of each model in process `id`. `decides` is True if this process sets the time limits of requests."""
    slots, broker, watched = set[str](), bundle.broker, NvmlGpus(clock)
    shares = shared_models(plans)
    pools: dict[str, WorkerPool | SharedGpus] = {}
    batchers = {}
    for model, plan in plans.items():
        settings, request_timeout, queue_timeout = plan.settings, math.inf, math.inf
        if decides:
            request_timeout, queue_timeout = settings.request_timeout_ms / 1000, settings.queue_timeout_ms / 1000
        name = worker_name if len(plans) == 1 else partial(model_worker_name, model)
        batchers[model] = make_batchers(
            settings, plan.target, plan.devices, counters, clock, name, request_timeout, queue_timeout, certificates,
            versioned=plan.versioned(model), recorder=recorder, gpus=watched,
        )  # fmt: skip
    by_turns = [plan.devices for plan in plans.values() if plan.devices.shared]
    places = Places(by_turns[0].most) if by_turns else None
    for model, plan in sorted(plans.items(), key=lambda item: not item[1].settings.min_workers):
        if model not in shares:  # Models that may be without workers come last, and get the remaining devices.
            common = places if plan.devices.shared else None
            pools[model] = make_pool(plan.settings, plan.devices, batchers[model], broker, slots, common)
    pools = {model: pools[model] for model in plans if model in pools}
    if shares:
        first = plans[shares[0]]
        of_each = {model: _shared_model(plans[model], batchers[model]) for model in shares}
        gpus = [worker_name(first.settings, first.target, first.devices, n) for n in range(first.settings.workers)]
        room, may_load = first.settings.models_per_gpu, None
        if first.settings.broker:

            async def may_load(model: str, seconds: float) -> bool:
                return await bundle.fleet.acquire_load(model, id, seconds)

        pools[", ".join(shares)] = SharedGpus(gpus, room, of_each, broker, counters, clock, slots, may_load=may_load)
    return WorkerPools(pools, slots) if len(pools) > 1 else next(iter(pools.values()))


def shared_models(plans: Mapping[str, ModelPlan]) -> list[str]:
    """Return the names of the models that share GPUs: all local ones, or none."""
    local = [model for model, plan in plans.items() if is_local(plan.target)]
    return local if len(plans) > 1 and local and plans[local[0]].settings.models_per_gpu else []


def _shared_model(plan: ModelPlan, make: MakeBatcher) -> SharedModel:
    settings, target, devices = plan.settings, plan.target, plan.devices
    worker = partial(model_worker_name, settings.model, settings, target, devices)
    version = settings.model_version if settings.broker else ""
    report, read = make_report(settings, target), partial(asyncio.to_thread, make_report, settings, target)
    return SharedModel(make, worker, settings.min_warm, report, version, read)


def make_batchers(
    settings: Settings,
    target: Target,
    devices: Devices,
    counters: WorkerCounts,
    clock: Callable[[], float],
    name: Callable[[Settings, Target, Devices, int], str] = worker_name,
    request_timeout: float = math.inf,
    queue_timeout: float = math.inf,
    certificates: RemoteCertificates | None = None,
    *,
    versioned: bool = False,
    recorder: SpanRecorder | None = None,
    gpus: NvmlGpus | None = None,
) -> MakeBatcher:
    """Return a function that builds the batchers for a target. `name` returns the worker name of a slot. The timeouts, in
    seconds, are finite only if this process sets them. If `versioned`, the batchers claim only entries for their version.
    Raises SettingError if the target's backends can't be built."""
    plan_of = _slot_plans(settings, target, devices, counters, name, certificates)
    policy = policies.build(settings.policy, None if settings.max_wait_ms is None else settings.max_wait_ms / 1000)
    limits = Limits(settings.gpu_timeout_ms / 1000, request_timeout, queue_timeout, len(settings.tier_names))
    memory, failure_log = HostMemory(clock), FailureLog(settings.gpu_timeout_ms / 1000)
    report, reads = make_report(settings, target), isinstance(target, FileTarget | ModuleTarget)
    version = settings.model_version if versioned else ""
    traces = BatchTraces(recorder) if recorder is not None else None

    def make(index: int, broker: WorkSource, started: Started = lambda seconds: None) -> Batcher:
        plan, breaker = plan_of(index)
        return Batcher(
            Slot(plan.name, settings.model, settings.max_batch_size, settings.max_batch_weight, report, version),
            partial(make_backend, target, plan),
            broker,
            policy,
            breaker,
            limits,
            counters,
            clock,
            memory=memory.used,
            gpu=gpus.watch(plan.device) if gpus is not None and plan.device != CPU else None,
            failure_log=failure_log,
            started=started,
            traces=traces,
            read_report=partial(asyncio.to_thread, make_report, settings, target) if reads else None,
        )

    return make


def _slot_plans(
    settings: Settings,
    target: Target,
    devices: Devices,
    counters: WorkerCounts,
    name: Callable[[Settings, Target, Devices, int], str],
    certificates: RemoteCertificates | None,
) -> Callable[[int], tuple[SlotPlan, Breaker]]:
    kind = BACKENDS[type(target)]
    shared = kind.check(target, settings)
    one_breaker = Breaker(BREAKER_THRESHOLD, BREAKER_COOLDOWN) if kind.one_breaker else None
    weights = make_weights(settings, target, settings.max_batch_weight) if settings.max_batch_weight else None
    pace, guard = CallPace(settings.remote_rate), GroupGuard()

    def plan_of(index: int) -> tuple[SlotPlan, Breaker]:
        breaker = one_breaker or Breaker(BREAKER_THRESHOLD, BREAKER_COOLDOWN)
        plan = SlotPlan(
            settings,
            name(settings, target, devices, index),
            devices.of(index),
            breaker,
            guard,
            weights=weights,
            certificates=certificates,
            counters=counters,
            pace=pace,
            shared=shared,
        )
        return plan, breaker

    return plan_of


def make_pool(
    settings: Settings,
    devices: Devices,
    make: MakeBatcher,
    broker: WorkSource,
    slots: set[str] | None = None,
    places: Places | None = None,
) -> WorkerPool:
    """Build the pool of a target's workers. It can grow to the number of devices."""
    return WorkerPool(lambda index: make(index, broker), settings.workers, devices.most, slots, places)


def fallback_targets(settings: Settings) -> Mapping[str, Target]:
    """Return the fallback targets by model. Raises SettingError if one is invalid."""
    targets = {}
    for model, of_model in fallbacks_of(settings).items():
        text = of_model.fallback
        try:
            targets[model] = parse_target(text)
        except TargetError as exc:
            setting = "fallback" if settings.fallback.endswith(text) else f"models.{model}.fallback"
            hint = "Write module:attr, path/file.py:attr, or the URL of a remote batch API."
            raise SettingError(setting, shown_url(text), f"is not a target: {exc}", hint) from None
    return targets


def make_fallback(
    settings: Settings,
    counters: Counters,
    clock: Callable[[], float],
    certificates: RemoteCertificates | None = None,
    recorder: SpanRecorder | None = None,
) -> Fallback | None:
    """Build what a gateway uses while its broker is unreachable, or return None if no fallback is set. Its processes use no GPU."""
    from headway.gateway.direct_mode import Fallback

    targets, own = fallback_targets(settings), {}
    for model, of_model in fallbacks_of(settings).items():
        slots = fallback_batches(of_model.fallback)
        own[model] = dataclasses.replace(of_model, workers=slots, devices=",".join(["cpu"] * slots), weight=CHARS)
    if not own:
        return None
    broker = make_memory_broker(settings, counters.broker, clock, models=own)
    pools, all_slots = {}, set[str]()
    name = partial(_fallback_name, several=len(own) > 1)
    for model, of_model in own.items():
        devices = make_devices(of_model, targets[model])
        make = make_batchers(
            of_model,
            targets[model],
            devices,
            counters.worker,
            clock,
            name,
            certificates=certificates,
            recorder=recorder,
        )
        pools[model] = make_pool(of_model, devices, make, broker, all_slots)
    return Fallback(broker, WorkerPools(pools, all_slots), own.keys())


def _fallback_name(settings: Settings, target: Target, devices: Devices, index: int, *, several: bool) -> str:
    return f"{settings.name}/{settings.model}/fallback-{index}" if several else f"{settings.name}/fallback-{index}"

"""Making of the fallback that a gateway asks while its broker is away: for each model a target, with processes of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from headway.app.backends import make_devices
from headway.app.brokers import make_memory_broker
from headway.app.devices import Devices
from headway.app.workers import make_batchers, make_pool
from headway.config import CHARS, Settings, fallback_batches, fallbacks_of, shown_url
from headway.config.target import Target, parse_target
from headway.errors import SettingError, TargetError
from headway.gateway.direct_mode import Fallback
from headway.runtime.certificates import RemoteCertificates
from headway.runtime.counters import Counters
from headway.runtime.spans import SpanRecorder
from headway.worker.pools import WorkerPools


def fallback_targets(settings: Settings) -> Mapping[str, Target]:
    """Targets of the fallbacks by model; none where none is set.

    Raises:
        SettingError: a text is no target.
    """
    return {
        model: _target(
            "fallback" if settings.fallback.endswith(of_model.fallback) else f"models.{model}.fallback",
            of_model.fallback,
        )
        for model, of_model in fallbacks_of(settings).items()
    }


def make_fallback(
    settings: Settings,
    counters: Counters,
    clock: Callable[[], float],
    certificates: RemoteCertificates | None = None,
    recorder: SpanRecorder | None = None,
) -> Fallback | None:
    """Make the fallback that a gateway asks while a broker elsewhere is away, if one is set. Its processes get no GPU."""
    targets, own = fallback_targets(settings), {}
    for model, of_model in fallbacks_of(settings).items():
        slots = fallback_batches(of_model.fallback)
        own[model] = dataclasses.replace(of_model, workers=slots, devices=",".join(["cpu"] * slots), weight=CHARS)
    if not own:
        return None
    broker = make_memory_broker(settings, counters.broker, clock, models=own)
    pools, all_slots = {}, set[str]()
    for model, of_model in own.items():
        devices = make_devices(of_model, targets[model])
        name = _name if len(own) == 1 else _name_of_several
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


def _target(setting: str, text: str) -> Target:
    try:
        return parse_target(text)
    except TargetError as exc:
        hint = "Write module:attr, path/file.py:attr, or the URL of a remote batch API."
        raise SettingError(setting, shown_url(text), f"is no target: {exc}", hint) from None


def _name(settings: Settings, target: Target, devices: Devices, index: int) -> str:
    return f"{settings.name}/fallback-{index}"


def _name_of_several(settings: Settings, target: Target, devices: Devices, index: int) -> str:
    return f"{settings.name}/{settings.model}/fallback-{index}"

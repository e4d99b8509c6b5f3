"""Plans of the models, or their versions, that a process runs: the settings, target and devices of each."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headway.app.backends import make_devices_of_models
from headway.app.devices import Devices
from headway.config import Settings
from headway.config.target import Target, parse_target
from headway.errors import SettingError, TargetError

Given = str | Target | Mapping[str, str | Target]
"""Target, or the text that names it; for several models a mapping by model name."""


class ModelPlan(msgspec.Struct, frozen=True):
    """Plan of one model or version that a process runs; `devices` are those of its workers."""

    settings: Settings
    target: Target
    devices: Devices

    def versioned(self, name: str) -> bool:
        """True if its workers claim only entries for their version, because others may run another version."""
        return bool(self.settings.broker) or name != self.settings.model


def make_plans(settings: Settings, given: Given) -> dict[str, ModelPlan]:
    """Plan each model that the settings name, or each of its versions, in order; by the keys of `Settings.runs`.

    Arguments:
        settings: settings of the process.
        given: target of the only model, or targets of models that have none in the settings.

    Raises:
        TargetError: a target is invalid or missing.
        SettingError: there aren't enough devices, or the default model isn't served.
    """
    if settings.default_model and settings.default_model not in settings.served and not settings.broker:
        hint = f"Name one of {', '.join(settings.served)}."
        raise SettingError("default_model", settings.default_model, "is no model that is served here", hint)
    own = {model.name: model.target for model in settings.models}
    own |= {f"{model.name}@{version.name}": version.target for model in settings.models for version in model.versions}
    targets = {}
    for model, of_model in settings.runs.items():
        target = own.get(model) or (given.get(model, "") if isinstance(given, Mapping) else given)
        if target == "":
            file = f" of {settings.weights_file}" if settings.weights_file else " of the settings file"
            hint = f'Write {model}=TARGET on the command line, or target = "…" in [models."{model}"]{file}.'
            raise TargetError(f"model {model!r} has no target. {hint}")
        targets[model] = of_model, parse_target(target) if isinstance(target, str) else target
    devices = make_devices_of_models(targets)
    return {model: ModelPlan(of_model, target, devices[model]) for model, (of_model, target) in targets.items()}

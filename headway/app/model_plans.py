"""Plans of the models that a process runs, or of their versions: settings, target and devices of each."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headway.app.backends import make_devices_of_models
from headway.app.devices import Devices
from headway.config import Settings
from headway.config.target import Target, parse_target
from headway.errors import SettingError, TargetError

Given = str | Target | Mapping[str, str | Target]
"""Target, or the text that names it; or those of several models, by the name of the model."""


class ModelPlan(msgspec.Struct, frozen=True):
    """Plan of one model that a process runs, or of one of its versions.

    Attributes:
        settings: settings of the model.
        target: what runs.
        devices: devices of its workers.
    """

    settings: Settings
    target: Target
    devices: Devices

    def versioned(self, name: str) -> bool:
        """Whether its workers claim what is for their version: others may run another over their broker, or in their process."""
        return bool(self.settings.broker) or name != self.settings.model


def make_plans(settings: Settings, given: Given) -> dict[str, ModelPlan]:
    """Plan of each model that the settings name, or of each of its versions, in order; by the keys of `Settings.runs`.

    Arguments:
        settings: settings of the process.
        given: target of the only model; or of several that have none in the settings.

    Raises:
        TargetError: a target is none, or a model has none.
        SettingError: the devices do not suffice, or the default model is none of them.
    """
    if settings.default_model and settings.default_model not in settings.served and not settings.broker:
        hint = f"Name one of {', '.join(settings.served)}."
        raise SettingError("default_model", settings.default_model, "is no model that is served here", hint)
    own = {one.name: one.target for one in settings.models}
    own |= {f"{one.name}@{each.name}": each.target for one in settings.models for each in one.versions}
    targets = {}
    for model, of_model in settings.runs.items():
        found = own.get(model) or (given.get(model, "") if isinstance(given, Mapping) else given)
        if found == "":
            file = f" of {settings.weights_file}" if settings.weights_file else " of the settings file"
            hint = f'Write {model}=TARGET on the command line, or target = "…" in [models."{model}"]{file}.'
            raise TargetError(f"model {model!r} has no target. {hint}")
        target = parse_target(found) if isinstance(found, str) else found
        targets[model] = of_model, target
    devices = make_devices_of_models(targets)
    return {model: ModelPlan(of_model, target, devices[model]) for model, (of_model, target) in targets.items()}

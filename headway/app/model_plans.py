"""Plans for the models and versions that a process runs: settings, target and devices of each. Also version weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from headway.app.backends import make_devices_of_models
from headway.app.devices import Devices
from headway.config import Settings, read_weights_again
from headway.config.target import Target, parse_target
from headway.core.versions import read_weights
from headway.errors import SettingError, TargetError
from headway.runtime.periodic import BareResource

if TYPE_CHECKING:
    from headway.gateway.served_models import ServedModels

Given = str | Target | Mapping[str, str | Target]  # A target, a string that names one, or a mapping of these by model.


class ModelPlan(msgspec.Struct, frozen=True):
    """Plan for one model or version that a process runs."""

    settings: Settings
    target: Target
    devices: Devices

    def versioned(self, name: str) -> bool:
        """Return True if these workers must claim only entries for their version, because others may run another version."""
        return bool(self.settings.broker) or name != self.settings.model


def make_plans(settings: Settings, given: Given) -> dict[str, ModelPlan]:
    """Plan each model in the settings, or each of its versions, in order. The keys are those of `Settings.runs`. `given` is
    the target of the only model, or a mapping with the targets of the models that have none in the settings. Raises
    TargetError if a target is invalid or missing, SettingError if there aren't enough devices or the default model isn't
    served."""
    if settings.default_model and settings.default_model not in settings.served and not settings.broker:
        hint = f"Name one of {', '.join(settings.served)}."
        raise SettingError("default_model", settings.default_model, "is not served here", hint)
    own = {model.name: model.target for model in settings.models}
    own |= {f"{model.name}@{version.name}": version.target for model in settings.models for version in model.versions}
    targets = {}
    for model, of_model in settings.runs.items():
        target = own.get(model) or (given.get(model, "") if isinstance(given, Mapping) else given)
        if target == "":
            file = f" of {settings.weights_file}" if settings.weights_file else " of the settings file"
            hint = f'Give {model}=TARGET on the command line, or write target = "…" in [models."{model}"]{file}.'
            raise TargetError(f"model {model!r} has no target. {hint}")
        targets[model] = of_model, parse_target(target) if isinstance(target, str) else target
    devices = make_devices_of_models(targets)
    return {model: ModelPlan(of_model, target, devices[model]) for model, (of_model, target) in targets.items()}


def check_weights(settings: Settings, texts: Mapping[str, str]) -> None:
    """Raise SettingError if an unknown version has a weight above 0. `texts` has the weights by model; those under
    "" are for models without their own. With a broker, every version is accepted, because other processes may serve it."""
    if settings.broker:
        return
    for model in settings.models:
        versions = [version.name for version in model.versions]
        text = texts.get(model.name, texts.get("", ""))
        unknown = [version for version, weight in read_weights(text).items() if weight and version not in versions]
        if versions and unknown:
            reason = f"no target is given for {', '.join(f'{model.name}@{version}' for version in unknown)}"
            hint = f"Name versions that are served here: {', '.join(versions)}."
            raise SettingError(f"models.{model.name}.version_weights", text, reason, hint)


class WeightsResource(BareResource):
    """Resource that rereads the version weights for a gateway, and then calls `changed`."""

    rereads = "the version weights"

    def __init__(self, settings: Settings, served: ServedModels, changed: Callable[[], None]) -> None:
        self._settings, self._served, self._changed = settings, served, changed

    async def reread(self) -> None:
        """Apply the weights that the file has now. If it can't be used, keep the previous weights and raise SettingError."""
        weights = read_weights_again(self._settings)
        check_weights(self._settings, weights)
        self._served.weigh({model: read_weights(text) for model, text in weights.items()})
        self._changed()

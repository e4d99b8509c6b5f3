"""Weights of model versions, read from the settings file again on SIGHUP."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.config import Settings, read_weights_again
from headway.core.versions import read_weights
from headway.errors import SettingError
from headway.gateway.served_models import ServedModels
from headway.runtime.periodic import BareResource


def check_weights(settings: Settings, texts: Mapping[str, str]) -> None:
    """Check that weights name existing versions, if only this process defines them.

    `texts` has the weights of each model that has its own, by name, and those of all other models at "".

    Raises:
        SettingError: an unknown version has a weight above 0.
    """
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
    """Rereads the weights of a gateway's process and calls `changed`; see `headway.app.lifecycle.Rereadable`."""

    rereads = "the weights of versions"

    def __init__(self, settings: Settings, served: ServedModels, changed: Callable[[], None]) -> None:
        self._settings, self._served, self._changed = settings, served, changed

    async def reread(self) -> None:
        """Apply the weights that the file has now.

        Raises:
            SettingError: the file can't be used; the previous weights stay.
        """
        weights = read_weights_again(self._settings)
        check_weights(self._settings, weights)
        self._served.weigh({model: read_weights(text) for model, text in weights.items()})
        self._changed()

"""Weights of the versions of models, read again from the settings file on SIGHUP."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.config import Settings, read_weights_again
from headway.core.versions import read_weights
from headway.errors import SettingError
from headway.gateway.served_models import ServedModels
from headway.runtime.periodic import BareResource


def check_weights(settings: Settings, texts: Mapping[str, str]) -> None:
    """Check that weights are of versions that are there, where this process alone says which there are.

    Arguments:
        settings: settings of the process.
        texts: weights of each model that has its own, by its name; those of all others at "".

    Raises:
        SettingError: a weight above 0 is of another version.
    """
    if settings.broker:
        return
    for one in settings.models:
        there = [each.name for each in one.versions]
        text = texts.get(one.name, texts.get("", ""))
        strange = [version for version, weight in read_weights(text).items() if weight and version not in there]
        if there and strange:
            reason = f"no target is given for {', '.join(f'{one.name}@{version}' for version in strange)}"
            hint = f"Name versions that are served here: {', '.join(there)}."
            raise SettingError(f"models.{one.name}.version_weights", text, reason, hint)


class WeightsResource(BareResource):
    """Weights as a resource of their gateway's process; see `headway.app.lifecycle.Resource` and `Rereadable`.

    Arguments:
        settings: settings that name the file.
        served: models whose versions the weights are of.
        changed: is called whenever other weights hold.
    """

    rereads = "the weights of versions"

    def __init__(self, settings: Settings, served: ServedModels, changed: Callable[[], None]) -> None:
        self._settings, self._served, self._changed = settings, served, changed

    async def reread(self) -> None:
        """Go by the weights that the file has now.

        Raises:
            SettingError: the file cannot be used; the former weights hold.
        """
        found = read_weights_again(self._settings)
        check_weights(self._settings, found)
        self._served.weigh({model: read_weights(text) for model, text in found.items()})
        self._changed()

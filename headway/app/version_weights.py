"""Weights of the versions of models, read again from the settings file on SIGHUP."""

from __future__ import annotations

from headway.config import Settings, read_weights_again
from headway.core.versions import read_weights
from headway.gateway.model_rules import RuleTable
from headway.runtime.supervisor import Supervisor


class WeightsResource:
    """Weights as a resource of their gateway's process; see `headway.app.lifecycle.Resource` and `Rereadable`.

    Arguments:
        settings: settings that name the file.
        rules: rules of the models, which go by the weights.
    """

    rereads = "the weights of versions"

    def __init__(self, settings: Settings, rules: RuleTable) -> None:
        self._settings, self._rules = settings, rules

    async def open(self) -> None:
        """See Resource. Nothing is needed."""

    def start(self, supervisor: Supervisor) -> None:
        """See Resource. Nothing runs."""

    async def close(self) -> None:
        """See Resource. Nothing is held."""

    async def reread(self) -> None:
        """Go by the weights that the file has now.

        Raises:
            SettingError: the file cannot be used; the former weights hold.
        """
        found = read_weights_again(self._settings)
        self._rules.weigh({model: read_weights(text) for model, text in found.items()})

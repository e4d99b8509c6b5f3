"""Fallbacks of a gateway, by the models that they answer for."""

from __future__ import annotations

from dataclasses import replace

from headway.config.models import split_target
from headway.config.settings import Settings
from headway.config.target import shown_target
from headway.errors import SettingError

_REMOTE_CALLS = 4
"""Calls in flight at once to a fallback that is a remote API."""


def fallbacks_of(settings: Settings) -> dict[str, Settings]:
    """Settings of each model that has a fallback, whose `fallback` is the text of its target alone.

    A target without a name is for the default model or, where there is none, for the first; a model's table goes before it.

    Raises:
        SettingError: the model that a fallback names is not one that the process has settings for.
    """
    if not settings.broker:
        return {}
    served = settings.served
    texts = {one.name: str(text) for one in settings.models if (text := dict(one.values).get("fallback"))}
    if settings.fallback:
        model, target = split_target(settings.fallback) or ("", settings.fallback)
        if model and model not in served:
            reason = f"is for the model {model!r}, and this process has settings for {', '.join(served)} alone"
            hint = (
                f"Write a table [models.{model}] with this fallback in the settings file, or name the model by --model."
            )
            raise SettingError("fallback", f"{model}={shown_target(target)}", reason, hint)
        if model:
            texts[model] = target
        else:
            texts.setdefault(settings.default if settings.default in served else next(iter(served)), target)
    return {model: replace(one, models=(), fallback=texts[model]) for model, one in served.items() if model in texts}


def fallback_batches(fallback: str) -> int:
    """Batches that a gateway runs at once on a fallback. A function has one process, as it shares the gateway's CPUs."""
    return _REMOTE_CALLS if "://" in fallback.partition("(")[0] else 1

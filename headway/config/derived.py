"""Settings made from others, for fallbacks and for models that only their workers know.

A model's *terms* are the settings that gateways have to know. Workers report them in the registry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headway.config.fields import Term
from headway.config.models import split_target
from headway.config.settings import FIELDS, Settings, kind
from headway.config.target import shown_target
from headway.errors import SettingError

_REMOTE_CALLS = 4
"""Calls in flight to a fallback that is a remote API."""
_ALWAYS = tuple(name for name, field in FIELDS.items() if field.term is Term.ALWAYS)
TERMS = tuple(name for name, field in FIELDS.items() if field.term is not Term.NO)
Terms = Sequence[tuple[str, str | int | float | bool]]


def fallbacks_of(settings: Settings) -> dict[str, Settings]:
    """Return the settings of each model with a fallback, in which `fallback` holds only the target. A target without a model's name
    is for the default model, or for the first model if that isn't served. A model's own table beats it. Raises SettingError for a
    fallback of a model that this process has no settings for."""
    if not settings.broker:
        return {}
    served = settings.served
    targets = {model.name: str(target) for model in settings.models if (target := dict(model.values).get("fallback"))}
    if settings.fallback:
        model, target = split_target(settings.fallback) or ("", settings.fallback)
        if model and model not in served:
            reason = f"is for the model {model!r}, and this process has settings for {', '.join(served)} alone"
            hint = f"Write a table [models.{model}] with this fallback in the settings file, or name it by --model."
            raise SettingError("fallback", f"{model}={shown_target(target)}", reason, hint)
        if model:
            targets[model] = target
        else:
            targets.setdefault(settings.default if settings.default in served else next(iter(served)), target)
    return {
        model: replace(own, models=(), fallback=targets[model]) for model, own in served.items() if model in targets
    }


def fallback_batches(fallback: str) -> int:
    """Return the number of batches that a gateway runs at once on a fallback. A function gets one, as CPUs are scarce there."""
    return _REMOTE_CALLS if "://" in fallback.partition("(")[0] else 1


def terms_of(settings: Settings) -> tuple[tuple[str, str | int | float | bool], ...]:
    """Return the terms in a model's settings."""
    terms = [(name, getattr(settings, name)) for name in TERMS]
    return tuple((name, value) for name, value in terms if name in _ALWAYS or value != FIELDS[name].default)


def on_terms(settings: Settings, model: str, terms: Terms) -> Settings:
    """Return the process's settings with the terms of a model that only its workers know. Terms that contradict these settings, as
    those of another release may, are left out."""
    values: dict[str, Any] = {name: value for name, value in terms if name in TERMS and _fits(name, value)}
    longest = values.get("request_timeout_ms", settings.request_timeout_ms)
    values["queue_timeout_ms"] = min(values.get("queue_timeout_ms", settings.queue_timeout_ms), longest)
    for subset in (values, {name: value for name, value in values.items() if name in _ALWAYS}, {}):
        try:
            return replace(settings, models=(), default_model="", model=model, **subset)
        except SettingError:
            continue
    return settings


def _fits(name: str, value: object) -> bool:
    return isinstance(value, kind(name)) and isinstance(value, bool) == (kind(name) is bool)

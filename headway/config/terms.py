"""Terms of a model: those of its settings that a gateway has to know, as workers report them in the registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headway.config.fields import Term
from headway.config.settings import FIELDS, Settings, kind
from headway.errors import SettingError

_ALWAYS = tuple(name for name, one in FIELDS.items() if one.term is Term.ALWAYS)
TERMS = tuple(name for name, one in FIELDS.items() if one.term is not Term.NO)
"""Names of the settings that are terms."""

Terms = Sequence[tuple[str, str | int | float | bool]]


def terms_of(settings: Settings) -> tuple[tuple[str, str | int | float | bool], ...]:
    """Terms of the model with these settings, to be reported."""
    found = [(name, getattr(settings, name)) for name in TERMS]
    return tuple((name, value) for name, value in found if name in _ALWAYS or value != FIELDS[name].default)


def on_terms(settings: Settings, model: str, terms: Terms) -> Settings:
    """Settings of a model of which a process knows what its workers report, and nothing else.

    What they do not report is as in the process. Terms that do not go together with that, as of another release, are
    left out.
    """
    values: dict[str, Any] = {name: value for name, value in terms if name in TERMS and _fits(name, value)}
    longest = values.get("request_timeout_ms", settings.request_timeout_ms)
    values["queue_timeout_ms"] = min(values.get("queue_timeout_ms", settings.queue_timeout_ms), longest)
    for chosen in (values, {name: value for name, value in values.items() if name in _ALWAYS}, {}):
        try:
            return replace(settings, models=(), default_model="", model=model, **chosen)
        except SettingError:
            continue
    return settings


def _fits(name: str, value: object) -> bool:
    return isinstance(value, kind(name)) and isinstance(value, bool) == (kind(name) is bool)

"""Limits of a credential for single models, as a file of keys, a command or a token gives them."""

from __future__ import annotations

from collections.abc import Collection

from headway.errors import SettingError
from headway.identity.tables import MOST_NAME, is_name
from headway.model import ModelLimit

MOST = 1e9
"""Largest rate and burst."""


def check_model_limit(where: str, limit: ModelLimit, models: Collection[str]) -> ModelLimit:
    """Check a limit, and return it.

    Arguments:
        where: where it was written, as an error names it.
        limit: the limit.
        models: the only models that the credential may ask; empty for all.

    Raises:
        SettingError: the limit cannot be used.
    """
    model = limit.model
    if not is_name(model):
        reason = f"must be the name of a model, of 1 to {MOST_NAME} printable characters"
        raise SettingError(where, model, reason, "For example big = {rate = 60}.")
    if models and model not in models:
        hint = f"Name one of {', '.join(models)}, or add it to models."
        raise SettingError(where, model, "is no model that this credential may ask", hint)
    if not 0 < limit.rate <= MOST:
        hint = "Leave the model out for no limit of its own; models says which it may ask at all."
        raise SettingError(f"{where}.{model}.rate", limit.rate, "must lie above 0, and be at most 1e9", hint)
    if limit.burst is not None and not 1 <= limit.burst <= MOST:
        hint = "Leave it out for ten seconds' worth of the rate."
        raise SettingError(f"{where}.{model}.burst", limit.burst, "must lie between 1 and 1e9", hint)
    return limit

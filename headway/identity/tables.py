"""TOML files with API keys or token issuers, and their limits for individual models."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from headway.errors import SettingError
from headway.model import ModelLimit

MOST_NAME = 128  # Maximum number of characters in the name of a user, tenant, tier or model.
MOST = 1e9  # Maximum rate and burst.


def read_tables(path: Path, setting: str, kind: type[Any], name: str, unreadable: str) -> list[dict[str, object]]:
    """Return a file's tables under the key `name`, unvalidated. Raises SettingError if the file can't be read or doesn't fit
    `kind`. `setting` is the setting that names the file. `unreadable` is the hint for a file that can't be read."""
    try:
        content = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), kind)
    except OSError as exc:
        raise SettingError(setting, str(path), f"cannot be read: {exc.strerror}", unreadable) from exc
    except msgspec.ValidationError as exc:
        hint = f"Write every {name.removesuffix('s')} as a table [[{name}]]."
        raise SettingError(setting, str(path), str(exc), hint) from exc
    except (ValueError, RecursionError) as exc:  # Not TOML, not UTF-8, or a number with thousands of digits.
        raise SettingError(setting, str(path), f"is not valid TOML: {exc}", "Fix the file.") from exc
    tables: list[dict[str, object]] = getattr(content, name)
    return tables


def is_name(text: str) -> bool:
    """Return True if a string has 1 to 128 characters, all printable."""
    return 0 < len(text) <= MOST_NAME and text.isprintable()


def check_model_limit(where: str, limit: ModelLimit, models: Collection[str]) -> ModelLimit:
    """Return the limit. Raises SettingError if it is invalid. `where` is the limit's place in the file. `models` are the
    only models that the credential may use, or empty for all."""
    model = limit.model
    if not is_name(model):
        reason = f"must be a model name of 1 to {MOST_NAME} printable characters"
        raise SettingError(where, model, reason, "For example big = {rate = 60}.")
    if models and model not in models:
        hint = f"Name one of {', '.join(models)}, or add it to models."
        raise SettingError(where, model, "is not a model that this credential may use", hint)
    if not 0 < limit.rate <= MOST:
        hint = "Leave the model out if it needs no limit of its own; models says which may be used at all."
        raise SettingError(f"{where}.{model}.rate", limit.rate, "must be above 0 and at most 1e9", hint)
    if limit.burst is not None and not 1 <= limit.burst <= MOST:
        hint = "Leave it out for as much as the rate allows in ten seconds."
        raise SettingError(f"{where}.{model}.burst", limit.burst, "must lie between 1 and 1e9", hint)
    return limit

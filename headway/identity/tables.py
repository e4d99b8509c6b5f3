"""Tables of a TOML file in which credentials are described: keys, or issuers of tokens."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from headway.errors import SettingError

MOST_NAME = 128
"""Longest name of a user, a tenant, a tier or a model, in characters."""


def read_tables(path: Path, setting: str, kind: type[Any], name: str, unreadable: str) -> list[dict[str, object]]:
    """Read the tables of a file, each as it is.

    Arguments:
        path: the file.
        setting: setting that names the file.
        kind: shape of the whole file, of which `name` is the member with the tables.
        name: what a table is called in the file, in the plural.
        unreadable: hint for a file that cannot be read.

    Raises:
        SettingError: the file cannot be read, or is of another shape.
    """
    try:
        found: list[dict[str, object]] = getattr(
            msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), kind), name
        )
    except OSError as exc:
        raise SettingError(setting, str(path), f"cannot be read: {exc.strerror}", unreadable) from exc
    except msgspec.ValidationError as exc:
        hint = f"Write every {name.removesuffix('s')} as a table [[{name}]]."
        raise SettingError(setting, str(path), str(exc), hint) from exc
    except (ValueError, RecursionError) as exc:  # No TOML, no UTF-8, or a number of thousands of digits.
        raise SettingError(setting, str(path), f"is not valid TOML: {exc}", "Mend the file.") from exc
    return found


def is_name(text: str) -> bool:
    """Whether a text will do as a name: 1 to 128 printable characters."""
    return 0 < len(text) <= MOST_NAME and text.isprintable()

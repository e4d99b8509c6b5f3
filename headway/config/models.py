"""Settings that each model may have of its own: `[models.NAME]` in the file, and NAME=TARGET on the command line.

The file says how a model is served, the command line which ones are: all of the file's that have a target, unless it
names some. A model without a table is served by the settings of the process. NAME@VERSION in the place of a name is one
of several versions of a model; what all of them have in common is the model's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.config.target import shown_target
from headway.errors import SettingError

SHORT = {"version": "model_version"}
"""Keys of a model's table that stand for a setting of another name."""
MOST_MODELS = 256
"""Most models of one process."""
VERSIONS = 'Versions of one model are NAME@VERSION=TARGET each, or a table [models."NAME@VERSION"] each.'
"""Hint for whoever gives a process two targets under one name."""

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.:/-]{1,128}(@[A-Za-z0-9_.:/@-]{0,128})?)=(?P<target>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model of several: its target, and the settings that it has of its own.

    Attributes:
        name: name under which it is served.
        target: text of its target; empty where a process runs none, or where the target is a Python object.
        values: values of settings by their names, which a model may have of its own.
        versions: versions of it that this process names, each with its version as its name; empty: there is one, which
            `model_version` says.
    """

    name: str
    target: str = field(default="", repr=False)
    values: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    versions: tuple[ModelSettings, ...] = ()


def split_target(text: str) -> tuple[str, str] | None:
    """Name and target of NAME=TARGET; None for a text that names no model."""
    found = _NAMED.fullmatch(text)
    return None if found is None or "://" in found["name"] else (found["name"], found["target"])


def named_targets(texts: Sequence[str], tables: Mapping[str, Any]) -> dict[str, str] | None:
    """Targets by model of the arguments TARGET of a command; None for a single one that names no model.

    A text that is the name of a table means that model, with the target of its table: an empty text here. So does the name
    of a model that has tables for its versions: it means all of these.

    Raises:
        SettingError: a text names no model beside others, or a name is there twice.
    """
    known = {*tables, *(table.partition("@")[0] for table in tables)}
    if len(texts) == 1 and texts[0] not in known and split_target(texts[0]) is None:
        return None
    found: dict[str, str] = {}
    for text in texts:
        name, target = (text, "") if text in known else split_target(text) or ("", text)
        if not name:
            hint = "Write NAME=TARGET for each model, for example small=small.py:Model large=large.py:Model."
            raise SettingError("TARGET", shown_target(text), "names no model, and there are several", hint)
        if name in found:
            hint = f"Give each a name of its own. {VERSIONS}"
            raise SettingError("TARGET", name, "is the name of two models", hint)
        found[name] = target
    return found

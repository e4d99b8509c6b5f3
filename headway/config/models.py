"""Models with settings of their own: `[models.NAME]` in the file, and NAME=TARGET on the command line.

The file says how models are served. The command line says which models are served: those that it names, or else all in the file
with a target. A model without a table has the settings of the process. NAME@VERSION instead of NAME is one of several versions
of a model. Settings that its versions share are in the model's own table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.config.target import shown_target
from headway.errors import SettingError

SHORT = {"version": "model_version"}
"""Short keys of a model's table, and the settings that they stand for."""
MOST_MODELS = 256
VERSIONS = 'Versions of one model are NAME@VERSION=TARGET each, or a table [models."NAME@VERSION"] each.'
"""Hint for two targets under one name."""

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.:/-]{1,128}(@[A-Za-z0-9_.:/@-]{0,128})?)=(?P<target>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model of several, or one version of a model, in which case `name` is the version. `target` is empty if the process runs
    none, or a Python object. `versions` are those that this process names; empty for a single one, which `model_version` names."""

    name: str
    target: str = field(default="", repr=False)
    values: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    versions: tuple[ModelSettings, ...] = ()


def split_target(text: str) -> tuple[str, str] | None:
    """Split NAME=TARGET. Return None for a text that names no model."""
    match = _NAMED.fullmatch(text)
    return None if match is None or "://" in match["name"] else (match["name"], match["target"])


def named_targets(texts: Sequence[str], tables: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the targets of a command by model; None for a single target that names no model. The name of a table stands for its
    model, and the target in the table (an empty text here). The name of a model with tables for its versions stands for all of
    these versions. Raises SettingError."""
    known = {*tables, *(table.partition("@")[0] for table in tables)}
    if len(texts) == 1 and texts[0] not in known and split_target(texts[0]) is None:
        return None
    targets: dict[str, str] = {}
    for text in texts:
        name, target = (text, "") if text in known else split_target(text) or ("", text)
        if not name:
            hint = "Write NAME=TARGET for each model, for example small=small.py:Model large=large.py:Model."
            raise SettingError("TARGET", shown_target(text), "names no model, and there are several", hint)
        if name in targets:
            hint = f"Give each a name of its own. {VERSIONS}"
            raise SettingError("TARGET", name, "is the name of two models", hint)
        targets[name] = target
    return targets

"""The settings file. Unlike the other sources it has typed values, as it is TOML, and tables of models."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headway.config.models import MOST_MODELS, SHORT, VERSIONS
from headway.config.settings import FIELDS, MODEL_FIELDS, VERSION_FIELDS, is_file, kind
from headway.core.excerpt import nearest
from headway.core.scaling import rules as scale_rules
from headway.errors import SettingError

Given = dict[str, tuple[str, Any]]
"""For each field that a source sets, the name that its user wrote, and the value."""


@dataclass(frozen=True, slots=True)
class FileTable:
    """A parsed file of settings."""

    path: Path
    content: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Table `[models.NAME]` of a file. `target` may be empty. `own` are its settings, and `spelling` has their names in errors."""

    target: str = field(repr=False)
    own: tuple[tuple[str, Any], ...] = field(repr=False)
    spelling: Mapping[str, str]


def read_file(file: Path | None, source: str) -> FileTable:
    """Read a file of settings, or `headway.toml` in the working directory, if there is one. Raises SettingError for `source` if the
    file is missing, no regular file, or not TOML."""
    path = file or Path("headway.toml")
    if not is_file(path):
        # A folder or a dangling link may be a mount whose source is missing.
        if file is None and not os.path.lexists(path):
            return FileTable(path, {})
        reason = "is no regular file" if os.path.exists(path) else "no such file"  # noqa: PTH110 - as in `is_file`
        if file is None:
            hint = "Put a TOML file there, or remove it."
            raise SettingError("the file of settings", str(path.absolute()), reason, hint)
        raise SettingError(source, str(path), reason, "Name an existing TOML file, or leave it out.")
    try:
        text = ""
        text = path.read_text(encoding="utf-8")
        return FileTable(path, tomllib.loads(text))
    except OSError as exc:
        raise SettingError(source, str(path), f"cannot be read: {exc.strerror}", "Fix its permissions.") from exc
    except (ValueError, RecursionError) as exc:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors.
        raise SettingError(source, str(path), f"is not valid TOML: {exc}", _toml_hint(text, str(exc))) from exc


_MODEL_KEYS = ("target", *SHORT)
_BARE = re.compile(r"""^\s*\[models\.([^]"'\n]*[^]"'\n\w.-][^]"'\n]*)]""", re.MULTILINE)
"""Heading of a model's table whose name lacks the quotes that it needs."""


def _toml_hint(text: str, error: str) -> str:
    if (heading := _BARE.search(text)) is not None:
        return f'Put the name of the model in quotes: [models."{heading[1]}"].'
    if "Cannot declare ('models'" in error:
        return f"Write one table for each model. {VERSIONS}"
    return "Fix the file."


def values_of(file: FileTable) -> Given:
    """Return the settings of a file, without those in tables of models. Raises SettingError."""
    table = {name: value for name, value in file.content.items() if name != "models"}
    if isinstance(models := table.get("model"), dict):
        names = ", ".join(f"[models.{name}]" for name, own in models.items() if isinstance(own, dict))
        hint = f"Write {names or '[models.NAME]'}; `model` is the name of a single one."
        raise SettingError(f"{file.path}: model", "…", "is a table, but must be text", hint)
    return _values(table, f"{file.path}: ", FIELDS)


def model_tables(file: FileTable) -> dict[str, ModelTable]:
    """Return a file's tables of models by name. Raises SettingError if a table is malformed, or has a key that is wrong there."""
    content = file.content.get("models", {})
    if not isinstance(content, dict) or len(content) > MOST_MODELS:
        hint = f"Write [models.NAME] for each of at most {MOST_MODELS}."
        raise SettingError(f"{file.path}: models", "…", "is no table of models", hint)
    tables = {name: _model_table(name, table, f"{file.path}: [models.{name}]") for name, table in content.items()}
    for name in tables:
        whole = tables.get(name.partition("@")[0]) if "@" in name else None
        if whole is not None and (whole.target or "model_version" in whole.spelling):
            key = "target" if whole.target else whole.spelling["model_version"].split()[-1]
            hint = "Write it in the tables of its versions alone, or have one table for the model."
            raise SettingError(f"{whole.spelling['model']} {key}", "…", f"is there beside [models.{name}]", hint)
    return tables


def _model_table(name: str, table: object, spelt: str) -> ModelTable:
    if not isinstance(table, dict):
        hint = "Write [models.NAME], and one line for each setting."
        raise SettingError(spelt, "…", "is no table", f"{hint} {VERSIONS}" if isinstance(table, list) else hint)
    target = table.get("target", "")
    if not isinstance(target, str):
        raise SettingError(f"{spelt} target", "…", "must be text", 'Put it in quotes: "…".')
    settings = {str(SHORT.get(key, key)): value for key, value in table.items() if key != "target"}
    if len(settings) + ("target" in table) != len(table):
        raise SettingError(spelt, name, "has both `version` and `model_version`", "Write one of them.")
    fields = VERSION_FIELDS if "@" in name else MODEL_FIELDS
    given = _values(settings, f"{spelt} ", fields, {str(SHORT.get(key, key)): key for key in table})
    own = tuple((field, value) for field, (_, value) in given.items())
    return ModelTable(target, own, {field: spelt_field for field, (spelt_field, _) in given.items()} | {"model": spelt})


def _values(
    table: Mapping[str, Any],
    prefix: str,
    allowed: Collection[str],
    keys: Mapping[str, str] = MappingProxyType({}),
) -> Given:
    """Return the settings of a table. `keys` maps settings to their names in the file, where these differ."""
    values: Given = {}
    for name, value in table.items():
        spelt = f"{prefix}{keys.get(name, name)}"
        if name not in allowed and isinstance(value, dict) and prefix.endswith("] "):
            whole = f"{prefix.rpartition('[models.')[2].removesuffix('] ')}.{name}"
            hint = f'If it is the name of a model, put that in quotes: [models."{whole}"]; else remove it. {VERSIONS}'
            if name == "arguments":
                hint = 'Write the arguments of a class in its target: target = "path/file.py:Class(size=3)".'
            raise SettingError(spelt, "…", "is a table, and a model has none of that name", hint)
        if name not in allowed:
            names = (*allowed, *_MODEL_KEYS) if prefix.endswith("] ") else (*allowed, "models")
            if allowed is VERSION_FIELDS and name in MODEL_FIELDS:
                raise _belongs_to_model(spelt, name, value, prefix.rpartition("[models.")[2].partition("@")[0])
            raise _belongs_to_process(spelt, name, value) if name in FIELDS else unknown(spelt, name, value, names)
        if name == "scale_rules" and isinstance(value, list):
            values[name] = (spelt, _scale_rules(spelt, value))
        else:
            values[name] = (spelt, typed(spelt, name, value))
    return values


def _scale_rules(spelt: str, tables: list[Any]) -> str:
    try:
        return scale_rules.write(scale_rules.read_all(tables))
    except scale_rules.NoRules as exc:
        hint = "For example [{queue_above = 500, for_s = 30, add = 3}]."
        raise SettingError(spelt, "…", f"cannot be read: {exc}", hint) from None


def _belongs_to_process(spelt: str, name: str, value: object) -> SettingError:
    hint = "Write it at the top of the file, above all tables."
    return SettingError(spelt, FIELDS[name].shown(value), "is a setting of the process, not of a model", hint)


def _belongs_to_model(spelt: str, name: str, value: object, model: str) -> SettingError:
    if name == "model_version":
        return SettingError(spelt, value, "is in the name of its table already", "Remove it.")
    reason = "is a setting of the model, not of one of its versions"
    return SettingError(spelt, FIELDS[name].shown(value), reason, f'Write it in a table [models."{model}"].')


def unknown(spelt: str, name: str, value: object, allowed: Collection[str] = FIELDS) -> SettingError:
    """Return the error for a name that is no setting."""
    table = value if isinstance(value, dict) and "models" in allowed else None
    near = nearest(name, allowed if table is None else ("models",))
    hint = f"Did you mean {near[0]}?" if near else "Remove it."
    if name == "target":
        hint = "Name it on the command line, with the arguments of a class in it: path/file.py:Class(size=3)."
    if not near and table and not table.keys() - FIELDS.keys():
        hint = f"Settings stand in no table: write {', '.join(table)} at the top of the file, without [{name}]."
    value = FIELDS[near[0]].shown(value) if near and near[0] in FIELDS else "…" if isinstance(value, dict) else value
    return SettingError(spelt, value, "there is no such setting", hint)


def typed(spelt: str, name: str, value: Any) -> Any:
    """Return a value of TOML for setting `name`. Raises SettingError if its type is wrong."""
    expected = kind(name)
    if expected is float and type(value) is int and abs(value) < 1 << 62:
        return float(value)
    if type(value) is expected:
        return value
    what, hint = {
        str: ("text", 'Put it in quotes: "…".'),
        int: ("a whole number", "Write digits without quotes."),
        float: ("a number", "Write digits without quotes."),
        bool: ("a truth value", "Use true or false, without quotes."),
    }[expected]
    raise SettingError(spelt, FIELDS[name].shown(value), f"must be {what}", hint)

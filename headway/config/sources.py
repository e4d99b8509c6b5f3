"""Merge flags, environment and file into Settings. Errors name a setting as its user wrote it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headway.config.file import FileTable, Given, ModelTable, model_tables, read_file, typed, unknown, values_of
from headway.config.models import VERSIONS, ModelSettings, named_targets
from headway.config.settings import FIELDS, MAX_REQUEST_TIMEOUT_MS, MODEL_FIELDS, PREFIX, Settings, flag, kind
from headway.core.excerpt import nearest
from headway.errors import SettingError

Targets = Mapping[str, str | None]
ALIKE = 0.85
"""Least similarity, 0 to 1 by `difflib`, of a misspelt name to the right one."""


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
    spell: Callable[[str], str] = flag,
    targets: Sequence[str] | Targets | None = None,
) -> Settings:
    """Merge flags, environment and file into Settings. Raises SettingError if a name is unknown, or a value is wrong.

    `flags` has values or texts by field name, and None for a flag that was not given. `HEADWAY_PORT` in `environ` sets `port`, and
    so on. Empty variables don't count. Without a `file`, `HEADWAY_CONFIG` names it, or it is `headway.toml` in the working
    directory, if there is one. `spell` returns the name under which the caller gave a field. `targets` are texts: one target, or
    NAME=TARGET or NAME@VERSION=TARGET for each of several, or names of models in the file. A caller with targets of its own passes
    a mapping with the models as keys. None means all models in the file.
    """
    table = _read_named(file, environ, spell)
    tables = model_tables(table)
    sources = [values_of(table), _from_environ(environ), _from_flags(flags, spell)]
    named = targets if targets is None or isinstance(targets, Mapping) else named_targets(targets, tables)
    merged = _merged(sources, spell, tables, named, targets is not None)
    weights_elsewhere = any("version_weights" in given for given in sources[1:])
    return merged if weights_elsewhere or not table.content else replace(merged, weights_file=str(table.path))


def spelling_of(
    name: str, flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, file: Path | None = None
) -> str:
    """Return the name of a setting as its user wrote it, in flags, environment or file; see `load`."""
    variable = f"{PREFIX}{name.upper()}"
    if flags.get(name) is not None or environ.get(variable):
        return flag(name) if flags.get(name) is not None else variable
    given = values_of(_read_named(file, environ, flag))
    return given[name][0] if name in given else flag(name)


def _read_named(file: Path | None, environ: Mapping[str, str], spell: Callable[[str], str]) -> FileTable:
    if file is None and environ.get(f"{PREFIX}CONFIG"):
        return read_file(Path(environ[f"{PREFIX}CONFIG"]), f"{PREFIX}CONFIG")
    return read_file(file, spell("config"))


def read_weights_again(settings: Settings) -> dict[str, str]:
    """Read the weights of versions from the settings file again, by model, and under "" those of models without a table. Raises
    SettingError."""
    table = read_file(Path(settings.weights_file), "config")
    whole = str(values_of(table).get("version_weights", ("", ""))[1])
    weights = {"": whole}
    for model, own in model_tables(table).items():
        weights[model] = str(dict(own.own).get("version_weights", whole))
    for text in weights.values():
        replace(settings, models=(), default_model="", version_weights=text)  # Building Settings checks it.
    return weights


def load_arguments(values: Mapping[str, Any]) -> Settings:
    """Return the settings in a function's arguments. Environment and files don't matter."""
    return _merged([_from_flags(values, str)], str)


def _merged(
    sources: Sequence[Given],
    spell: Callable[[str], str],
    tables: Mapping[str, ModelTable] = MappingProxyType({}),
    targets: Targets | None = None,
    single_target: bool = False,
) -> Settings:
    """Return the settings of several sources, of which a later one beats an earlier one. `targets` are those of named models: ""
    for the target in the model's table, None for a target that the caller has itself. `single_target` is True for a target without
    a name."""
    values: dict[str, Any] = {}
    spelling: dict[str, str] = {name: spell(name) for name in FIELDS}
    for given in sources:
        for name, (spelt, value) in given.items():
            values[name], spelling[name] = value, spelt
    alone = str(values.get("model", FIELDS["model"].default)) if single_target else None
    models = tuple(_fitted_model(values, model) for model in _chosen(tables, targets, alone))
    _fit_times(values)
    _fit_workers(values)
    try:
        return Settings(**values, models=models)
    except SettingError as exc:
        raise _respelt(exc, values, spelling, tables) from None


def _respelt(
    error: SettingError, values: Mapping[str, Any], spelling: Mapping[str, str], tables: Mapping[str, ModelTable]
) -> SettingError:
    """Return an error with its settings named as their user wrote them. `models.NAME.FIELD` is a model's own setting."""
    model, _, name = error.setting.removeprefix("models.").rpartition(".")
    given = {name: spelling[name] for name in values}
    for table in (model.partition("@")[0], model):
        given |= tables[table].spelling if table in tables else {}
    if model not in tables and model:
        given["model"] = f"model {model!r}"
    if "@" in model:
        given["model_version"] = given["model"]
    names, quoted = {**spelling, **given}, re.compile("`(" + "|".join(FIELDS) + ")`")
    reason, hint = (quoted.sub(lambda match: names[match[1]], text) for text in (error.reason, error.hint))
    return SettingError(given.get(name) or f"{spelling[name]} (its default)", error.value, reason, hint)


def _chosen(tables: Mapping[str, ModelTable], targets: Targets | None, alone: str | None) -> tuple[ModelSettings, ...]:
    """Return the models that are named, or all models with a table. `alone` is the model of a single target."""
    if targets is None and alone is not None:
        return (ModelSettings(alone, "", tables[alone].own),) if alone in tables else ()
    no_table = ModelTable("", (), {})
    models: dict[str, ModelSettings] = {}
    for key, target in _with_versions(tables, targets).items():
        name, versioned, version = key.partition("@")
        table = tables.get(key, no_table)
        text = table.target if target == "" else target or ""
        before = models.get(name)
        if before is not None and not (versioned and before.versions):
            hint = f"Give it a version, too, or leave the others out. {VERSIONS}"
            raise SettingError("TARGET", name, "is named with a version and without one", hint)
        if versioned:
            whole = before or ModelSettings(name, "", tables.get(name, no_table).own)
            models[name] = replace(whole, versions=(*whole.versions, ModelSettings(version, text, table.own)))
        else:
            models[name] = ModelSettings(name, text, table.own)
    return tuple(models.values())


def _with_versions(tables: Mapping[str, ModelTable], targets: Targets | None) -> Targets:
    """Return targets by model, or by version for a model whose versions have tables. None means the whole file."""
    expanded: dict[str, str | None] = {}
    for name, target in (dict.fromkeys(tables, "") if targets is None else targets).items():
        versions = [table for table in tables if table.startswith(f"{name}@")] if target == "" else []
        expanded = {**dict.fromkeys(versions, ""), **expanded} if versions else {**expanded, name: target}
    return expanded


def _fitted_model(values: Mapping[str, Any], model: ModelSettings) -> ModelSettings:
    own = dict(model.values)
    versions = tuple(replace(version, values=_fitted(values, own | dict(version.values))) for version in model.versions)
    return replace(model, values=_fitted(values, own), versions=versions)


def _fitted(values: Mapping[str, Any], own: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    together = {**values, **own}
    _fit_times(together)
    if "devices" in own and "workers" not in own:
        together.pop("workers", None)
    _fit_workers(together)
    return tuple(sorted((name, value) for name, value in together.items() if name in MODEL_FIELDS))


def _fit_workers(values: dict[str, Any]) -> None:
    if devices := values.get("devices"):
        values.setdefault("workers", devices.count(",") + 1)


def _fit_times(values: dict[str, Any]) -> None:
    """Adjust default times to the overall time, so that the queue's is not longer, and tasks don't end before other requests."""

    def default(name: str) -> float:
        value: Any = FIELDS[name].default
        return float(value)

    overall = float(values.get("request_timeout_ms", default("request_timeout_ms")))
    if 1.0 <= overall < default("queue_timeout_ms"):
        values.setdefault("queue_timeout_ms", overall)
    if default("task_timeout_ms") < overall <= MAX_REQUEST_TIMEOUT_MS:
        values.setdefault("task_timeout_ms", overall)


def misspelt(environ: Mapping[str, str], known: Collection[str]) -> list[tuple[str, str]]:
    """Return variables that look like misspelt settings, each with the name that was probably meant. Other variables with the
    prefix may be somebody else's, such as those that Kubernetes sets for a Service. `known` are variables that are no settings."""
    names = {PREFIX + name.upper() for name in FIELDS} | {f"{PREFIX}CONFIG", *known}
    endings = [name.removeprefix(PREFIX) for name in names]
    misspelt = []
    for name, value in environ.items():
        if value and name.startswith(PREFIX) and name not in names:
            ending = name.removeprefix(PREFIX)
            near = nearest(ending, endings, 1, ALIKE)
            # In a short name, two swapped letters make a big difference to difflib.
            near = near or [candidate for candidate in endings if sorted(candidate) == sorted(ending)]
            misspelt += [(name, PREFIX + candidate) for candidate in near[:1]]
    return misspelt


def _from_environ(environ: Mapping[str, str]) -> Given:
    values: Given = {}
    for name in FIELDS:
        spelt = f"{PREFIX}{name.upper()}"
        if text := environ.get(spelt):
            if text.startswith("tcp://"):
                hint = "Kubernetes sets it for a Service of this name: set enableServiceLinks: false in the pod."
                raise SettingError(spelt, FIELDS[name].shown(text), "is a service link", hint)
            values[name] = (spelt, _parsed(spelt, name, text))
    return values


def _from_flags(flags: Mapping[str, Any], spell: Callable[[str], str]) -> Given:
    values: Given = {}
    for name, value in flags.items():
        if name not in FIELDS:
            raise unknown(spell(name), name, value)
        if value is not None:
            parse = _parsed if isinstance(value, str) else typed
            values[name] = (spell(name), parse(spell(name), name, value))
    return values


_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parsed(spelt: str, name: str, text: str) -> Any:
    expected = kind(name)
    if expected is str:
        return text
    if expected is bool:
        if text.lower() not in _TRUTH:
            raise SettingError(spelt, text, "is not a truth value", "Use true or false.")
        return _TRUTH[text.lower()]
    try:
        return expected(text)
    except ValueError:
        what = "a whole number" if expected is int else "a number"
        unit = FIELDS[name].unit
        hint = f"Write digits only; the unit is {unit}." if unit else "Write digits only."
        raise SettingError(spelt, text, f"is not {what}", hint) from None

"""Sources of settings: flags, environment and file, merged, each value with the name under which it was written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headway.config.file import Given, ModelTable, model_tables, read_file, typed, unknown, values_of
from headway.config.models import VERSIONS, ModelSettings, named_targets
from headway.config.settings import FIELDS, MAX_REQUEST_TIMEOUT_MS, MODEL_FIELDS, PREFIX, Settings, flag, kind
from headway.core.excerpt import nearest
from headway.errors import SettingError

ALIKE = 0.85
"""Likeness of two names, 0 to 1, from which one counts as a misspelling of the other, as by `difflib`."""


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
    spell: Callable[[str], str] = flag,
    targets: Sequence[str] | Mapping[str, str | None] | None = None,
) -> Settings:
    """Merge flags, environment and file into Settings.

    Arguments:
        flags: field name to value or to its text, None for a flag that was not given.
        environ: the process environment; `HEADWAY_PORT` sets `port`, and so on. An empty variable counts as
            not set. `HEADWAY_CONFIG` names the file when `file` is None.
        file: a TOML file; when none is named, `headway.toml` in the working directory is read if it is there.
        spell: field name to the name under which the caller of the command, or of a function, gave it.
        targets: texts that the caller gave: one target, NAME=TARGET or NAME@VERSION=TARGET for each of several, or names of
            models of the file; or the names of models whose targets it has itself. None: it gave none, and all models of
            the file count.

    Raises:
        SettingError: a name is unknown, or a value is of the wrong type or out of range.
    """
    table = read_file(*_named_file(file, environ, spell))
    tables = model_tables(table)
    sources = [values_of(table), _from_environ(environ), _from_flags(flags, spell)]
    named = targets if targets is None or isinstance(targets, Mapping) else named_targets(targets, tables)
    merged = _merged(sources, spell, tables, named, targets is not None)
    elsewhere = any("version_weights" in given for given in sources[1:])
    return merged if elsewhere or not table.content else replace(merged, weights_file=str(table.path))


def spelling_of(
    name: str, flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, file: Path | None = None
) -> str:
    """Name of a setting as its user wrote it, whose value came by flags, environment or file; see `load`."""
    variable = f"{PREFIX}{name.upper()}"
    if flags.get(name) is not None or environ.get(variable):
        return flag(name) if flags.get(name) is not None else variable
    given = values_of(read_file(*_named_file(file, environ, flag)))
    return given[name][0] if name in given else flag(name)


def _named_file(file: Path | None, environ: Mapping[str, str], spell: Callable[[str], str]) -> tuple[Path | None, str]:
    """File of settings that is named, if there is one, and by what."""
    if file is None and environ.get(f"{PREFIX}CONFIG"):
        return Path(environ[f"{PREFIX}CONFIG"]), f"{PREFIX}CONFIG"
    return file, spell("config")


def read_weights_again(settings: Settings) -> dict[str, str]:
    """Weights of versions as the file of these settings has them now, by model; those of models without a table at "".

    Raises:
        SettingError: the file cannot be used.
    """
    table = read_file(Path(settings.weights_file), "config")
    whole = str(values_of(table).get("version_weights", ("", ""))[1])
    found = {"": whole}
    for model, own in model_tables(table).items():
        found[model] = str(dict(own.own).get("version_weights", whole))
    for text in found.values():
        replace(settings, models=(), default_model="", version_weights=text)  # It is checked there.
    return found


def load_arguments(values: Mapping[str, Any]) -> Settings:
    """Settings of a function's arguments alone, whatever environment and files say; see `load`."""
    return _merged([_from_flags(values, str)], str)


def _merged(
    sources: Sequence[Given],
    spell: Callable[[str], str],
    tables: Mapping[str, ModelTable] = MappingProxyType({}),
    targets: Mapping[str, str | None] | None = None,
    one_target: bool = False,
) -> Settings:
    """Settings of several sources, of which a later one beats an earlier one.

    Arguments:
        sources: values of each source.
        spell: see `load`.
        tables: tables of models.
        targets: targets by model, where the caller named models; empty: that of the table; None: the caller has it itself.
        one_target: whether the caller gave a single target, if it named no models.
    """
    values: dict[str, Any] = {}
    spelling: dict[str, str] = {name: spell(name) for name in FIELDS}
    for given in sources:
        for name, (spelt, value) in given.items():
            values[name], spelling[name] = value, spelt
    models = _chosen(tables, targets, str(values.get("model", FIELDS["model"].default)) if one_target else None)
    models = tuple(_fitted_model(values, one) for one in models)
    _fit_times(values)
    _fit_workers(values)
    try:
        return Settings(**values, models=models)
    except SettingError as exc:
        raise _respelt(exc, values, spelling, tables) from None


def _respelt(
    error: SettingError, values: Mapping[str, Any], spelling: Mapping[str, str], tables: Mapping[str, ModelTable]
) -> SettingError:
    """Error with its settings named as their user wrote them. That of a model is named `models.NAME.FIELD`."""
    model, _, name = error.setting.removeprefix("models.").rpartition(".")
    given = {name: spelling[name] for name in values}
    for table in (model.partition("@")[0], model):
        given |= tables[table].spelling if table in tables else {}
    if model not in tables and model:
        given["model"] = f"model {model!r}"
    if "@" in model:
        given["model_version"] = given["model"]
    respell = _speller({**spelling, **given})
    spelt = given.get(name) or f"{spelling[name]} (its default)"
    return SettingError(spelt, error.value, respell(error.reason), respell(error.hint))


def _chosen(
    tables: Mapping[str, ModelTable], targets: Mapping[str, str | None] | None, alone: str | None
) -> tuple[ModelSettings, ...]:
    """Models of a process: those that are named, or all that have a table. `alone`: name of the model of a single target.

    Raises:
        SettingError: a model is named with a version and without one.
    """
    if targets is None and alone is not None:
        return (ModelSettings(alone, "", tables[alone].own),) if alone in tables else ()
    nothing = ModelTable("", (), {})
    models: dict[str, ModelSettings] = {}
    for key, target in _with_versions(tables, targets).items():
        name, versioned, version = key.partition("@")
        table = tables.get(key, nothing)
        text = table.target if target == "" else target or ""
        before = models.get(name)
        if before is not None and not (versioned and before.versions):
            hint = f"Give it a version, too, or leave the others out. {VERSIONS}"
            raise SettingError("TARGET", name, "is named with a version and without one", hint)
        if versioned:
            whole = before or ModelSettings(name, "", tables.get(name, nothing).own)
            models[name] = replace(whole, versions=(*whole.versions, ModelSettings(version, text, table.own)))
        else:
            models[name] = ModelSettings(name, text, table.own)
    return tuple(models.values())


def _with_versions(
    tables: Mapping[str, ModelTable], targets: Mapping[str, str | None] | None
) -> Mapping[str, str | None]:
    """Targets by model, with the versions in the place of a model whose versions have the tables. None: all of the file's."""
    found: dict[str, str | None] = {}
    for name, target in (dict.fromkeys(tables, "") if targets is None else targets).items():
        versions = [table for table in tables if table.startswith(f"{name}@")] if target == "" else []
        found = {**dict.fromkeys(versions, ""), **found} if versions else {**found, name: target}
    return found


def _fitted_model(values: Mapping[str, Any], one: ModelSettings) -> ModelSettings:
    """A model with what follows from the settings of its own, of its versions, and of the process."""
    own = dict(one.values)
    versions = tuple(replace(each, values=_fitted(values, own | dict(each.values))) for each in one.versions)
    return replace(one, values=_fitted(values, own), versions=versions)


def _fitted(values: Mapping[str, Any], own: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Settings of a model's own, with what follows from them and those of the process."""
    together = {**values, **own}
    _fit_times(together)
    if "devices" in own and "workers" not in own:
        together.pop("workers", None)
    _fit_workers(together)
    return tuple(sorted((name, value) for name, value in together.items() if name in MODEL_FIELDS))


def _fit_workers(values: dict[str, Any]) -> None:
    """Have as many workers as there are devices named, unless their number was given."""
    if devices := values.get("devices"):
        values.setdefault("workers", devices.count(",") + 1)


def _fit_times(values: dict[str, Any]) -> None:
    """Fit the times that were left out to those that were given.

    Who shortens the time in all should not have to shorten the time in the queue, too. Who lengthens it does not mean
    that tasks end sooner than other requests.
    """

    def usual(name: str) -> float:
        default: Any = FIELDS[name].default
        return float(default)

    def chosen(name: str) -> float:
        return float(values.get(name, usual(name)))

    whole = chosen("request_timeout_ms")
    if 1.0 <= whole < usual("queue_timeout_ms"):
        values.setdefault("queue_timeout_ms", whole)
    if usual("task_timeout_ms") < whole <= MAX_REQUEST_TIMEOUT_MS:
        values.setdefault("task_timeout_ms", whole)


def _speller(spelling: Mapping[str, str]) -> Callable[[str], str]:
    """Make a function that replaces the field names between backticks by what their user wrote."""
    quoted = re.compile("`(" + "|".join(FIELDS) + ")`")
    return lambda text: quoted.sub(lambda match: spelling[match[1]], text)


def misspelt(environ: Mapping[str, str], known: Collection[str]) -> list[tuple[str, str]]:
    """Variables that look like one of Headway's and are none, each with the one that was most likely meant.

    What else begins as they do is somebody else's, such as what Kubernetes sets for a Service.

    Arguments:
        environ: the process environment.
        known: further names that are no settings'.
    """
    names = {PREFIX + name.upper() for name in FIELDS} | {f"{PREFIX}CONFIG", *known}
    rest = [name.removeprefix(PREFIX) for name in names]
    found = []
    for name, value in environ.items():
        if value and name.startswith(PREFIX) and name not in names:
            given = name.removeprefix(PREFIX)
            near = nearest(given, rest, 1, ALIKE)
            near = near or [
                one for one in rest if sorted(one) == sorted(given)
            ]  # Letters change places in short names, too.
            found += [(name, PREFIX + one) for one in near[:1]]
    return found


def _from_environ(environ: Mapping[str, str]) -> Given:
    found: Given = {}
    for name in FIELDS:
        spelt = f"{PREFIX}{name.upper()}"
        text = environ.get(spelt)
        if text:
            if text.startswith("tcp://"):
                hint = "Kubernetes sets it for a Service of this name: set enableServiceLinks: false in the pod."
                raise SettingError(spelt, FIELDS[name].shown(text), "is a service link", hint)
            found[name] = (spelt, _parsed(spelt, name, text))
    return found


def _from_flags(flags: Mapping[str, Any], spell: Callable[[str], str]) -> Given:
    found: Given = {}
    for name, value in flags.items():
        if name not in FIELDS:
            raise unknown(spell(name), name, value)
        if value is not None:
            parse = _parsed if isinstance(value, str) else typed
            found[name] = (spell(name), parse(spell(name), name, value))
    return found


_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parsed(spelt: str, name: str, text: str) -> Any:
    """Parse the text of a flag or an environment variable as the type of field `name`."""
    wanted = kind(name)
    if wanted is str:
        return text
    if wanted is bool:
        if text.lower() not in _TRUTH:
            raise SettingError(spelt, text, "is not a truth value", "Use true or false.")
        return _TRUTH[text.lower()]
    try:
        return wanted(text)
    except ValueError:
        what = "a whole number" if wanted is int else "a number"
        unit = FIELDS[name].unit
        hint = f"Write digits only; the unit is {unit}." if unit else "Write digits only."
        raise SettingError(spelt, text, f"is not {what}", hint) from None

"""Merge flags, environment and file into Settings. Errors name a setting as its user wrote it. The settings of fallbacks,
and of models that only workers know, are derived from the merged ones. A model's *terms* are the settings that gateways need
to know; workers report them in the registry."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headway.config.fields import Term
from headway.config.settings import (
    FIELDS,
    MAX_REQUEST_TIMEOUT_MS,
    MODEL_FIELDS,
    PREFIX,
    VERSION_FIELDS,
    Settings,
    flag,
    is_file,
    kind,
)
from headway.config.target import MOST_MODELS, SHORT, VERSIONS, ModelSettings, named_targets, shown_target, split_target
from headway.core.excerpt import nearest
from headway.core.scaling import rules as scale_rules
from headway.errors import SettingError

Given = dict[str, tuple[str, Any]]  # For each field that a source sets: its name as the user wrote it, and its value.


@dataclass(frozen=True, slots=True)
class FileTable:
    """Parsed settings file."""

    path: Path
    content: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Table `[models.NAME]` of a file. `target` may be empty. `own` has its settings; `spelling`, their names in errors."""

    target: str = field(repr=False)
    own: tuple[tuple[str, Any], ...] = field(repr=False)
    spelling: Mapping[str, str]


def read_file(file: Path | None, source: str) -> FileTable:
    """Read a settings file. If `file` is None, read `headway.toml` in the working directory, if it exists. Raises SettingError for
    `source` if the file is missing, not a regular file, or not TOML."""
    path = file or Path("headway.toml")
    if not is_file(path):
        # A folder or a dangling link may be a mount whose source is missing.
        if file is None and not os.path.lexists(path):
            return FileTable(path, {})
        reason = "is not a regular file" if os.path.exists(path) else "no such file"  # noqa: PTH110 - as in `is_file`
        if file is None:
            hint = "Put a TOML file there, or remove it."
            raise SettingError("the settings file", str(path.absolute()), reason, hint)
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
"""Heading of a model's table whose name needs quotes but has none."""


def _toml_hint(text: str, error: str) -> str:
    if (heading := _BARE.search(text)) is not None:
        return f'Put the name of the model in quotes: [models."{heading[1]}"].'
    if "Cannot declare ('models'" in error:
        return f"Write one table for each model. {VERSIONS}"
    return "Fix the file."


def values_of(file: FileTable) -> Given:
    """Return the settings in a file, except those in model tables. Raises SettingError."""
    table = {name: value for name, value in file.content.items() if name != "models"}
    if isinstance(models := table.get("model"), dict):
        names = ", ".join(f"[models.{name}]" for name, own in models.items() if isinstance(own, dict))
        hint = f"Write {names or '[models.NAME]'}; `model` is the name of a single model."
        raise SettingError(f"{file.path}: model", "…", "is a table, but must be a string", hint)
    return _values(table, f"{file.path}: ", FIELDS)


def model_tables(file: FileTable) -> dict[str, ModelTable]:
    """Return a file's model tables by name. Raises SettingError if a table is malformed, or has a key that isn't allowed."""
    content = file.content.get("models", {})
    if not isinstance(content, dict) or len(content) > MOST_MODELS:
        hint = f"Write [models.NAME] for each of at most {MOST_MODELS}."
        raise SettingError(f"{file.path}: models", "…", "is not a table of models", hint)
    tables = {name: _model_table(name, table, f"{file.path}: [models.{name}]") for name, table in content.items()}
    for name in tables:
        model_table = tables.get(name.partition("@")[0]) if "@" in name else None
        if model_table is not None and (model_table.target or "model_version" in model_table.spelling):
            key = "target" if model_table.target else model_table.spelling["model_version"].split()[-1]
            hint = "Write it only in the tables of the versions, or write one table for the whole model."
            raise SettingError(f"{model_table.spelling['model']} {key}", "…", f"contradicts [models.{name}]", hint)
    return tables


def _model_table(name: str, table: object, spelt: str) -> ModelTable:
    if not isinstance(table, dict):
        hint = "Write [models.NAME], and one line for each setting."
        raise SettingError(spelt, "…", "is not a table", f"{hint} {VERSIONS}" if isinstance(table, list) else hint)
    target = table.get("target", "")
    if not isinstance(target, str):
        raise SettingError(f"{spelt} target", "…", "must be a string", 'Put it in quotes: "…".')
    settings = {str(SHORT.get(key, key)): value for key, value in table.items() if key != "target"}
    if len(settings) + ("target" in table) != len(table):
        raise SettingError(spelt, name, "has both `version` and `model_version`", "Write one of them.")
    fields = VERSION_FIELDS if "@" in name else MODEL_FIELDS
    given = _values(settings, f"{spelt} ", fields, {str(SHORT.get(key, key)): key for key in table})
    own = tuple((field, value) for field, (_, value) in given.items())
    return ModelTable(target, own, {field: spelt_field for field, (spelt_field, _) in given.items()} | {"model": spelt})


def _values(
    table: Mapping[str, Any], prefix: str, allowed: Collection[str], keys: Mapping[str, str] = MappingProxyType({})
) -> Given:
    """Return the settings in a table. `keys` maps settings to their keys in the file, if these differ."""
    values: Given = {}
    for name, value in table.items():
        spelt = f"{prefix}{keys.get(name, name)}"
        if name not in allowed and isinstance(value, dict) and prefix.endswith("] "):
            full_name = f"{prefix.rpartition('[models.')[2].removesuffix('] ')}.{name}"
            hint = (
                f'If this is the name of a model, put it in quotes: [models."{full_name}"]; else remove it. {VERSIONS}'
            )
            if name == "arguments":
                hint = 'Write the arguments of a class in its target: target = "path/file.py:Class(size=3)".'
            raise SettingError(spelt, "…", "is a table, but no setting of a model is a table", hint)
        if name not in allowed:
            names = (*allowed, *_MODEL_KEYS) if prefix.endswith("] ") else (*allowed, "models")
            if allowed is VERSION_FIELDS and name in MODEL_FIELDS:
                raise _belongs_to_model(spelt, name, value, prefix.rpartition("[models.")[2].partition("@")[0])
            if name not in FIELDS:
                raise unknown(spelt, name, value, names)
            reason = "is a setting of the process, not of a model"
            hint = "Write it at the top of the file, above all tables."
            raise SettingError(spelt, FIELDS[name].shown(value), reason, hint)
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


def _belongs_to_model(spelt: str, name: str, value: object, model: str) -> SettingError:
    if name == "model_version":
        return SettingError(spelt, value, "is already in the name of its table", "Remove it.")
    reason = "is a setting of the model, not of one of its versions"
    return SettingError(spelt, FIELDS[name].shown(value), reason, f'Write it in a table [models."{model}"].')


def unknown(spelt: str, name: str, value: object, allowed: Collection[str] = FIELDS) -> SettingError:
    """Return the error for a name that is not a setting."""
    table = value if isinstance(value, dict) and "models" in allowed else None
    near = nearest(name, allowed if table is None else ("models",))
    hint = f"Did you mean {near[0]}?" if near else "Remove it."
    if name == "target":
        hint = "Name it on the command line, with the arguments of a class in it: path/file.py:Class(size=3)."
    if not near and table and not table.keys() - FIELDS.keys():
        hint = f"Settings are not in tables: write {', '.join(table)} at the top of the file, without [{name}]."
    value = FIELDS[near[0]].shown(value) if near and near[0] in FIELDS else "…" if isinstance(value, dict) else value
    return SettingError(spelt, value, "there is no such setting", hint)


def typed(spelt: str, name: str, value: Any) -> Any:
    """Convert the TOML value of the setting `name` to the setting's type. Raises SettingError if it has another type."""
    expected = kind(name)
    if expected is float and type(value) is int and abs(value) < 1 << 62:
        return float(value)
    if type(value) is expected:
        return value
    what, hint = {
        str: ("a string", 'Put it in quotes: "…".'),
        int: ("a whole number", "Write digits without quotes."),
        float: ("a number", "Write digits without quotes."),
        bool: ("true or false", "Write it without quotes."),
    }[expected]
    raise SettingError(spelt, FIELDS[name].shown(value), f"must be {what}", hint)


Targets = Mapping[str, str | None]
ALIKE = 0.85  # Minimum similarity of a misspelt name to the right one, from 0 to 1 as computed by `difflib`.


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
    spell: Callable[[str], str] = flag,
    targets: Sequence[str] | Targets | None = None,
) -> Settings:
    """Merge flags, environment and file into Settings. Raises SettingError if a name is unknown, or a value is wrong.

    `flags` maps field names to values or strings, or to None for flags that were not given. `environ` has `HEADWAY_PORT`
    for `port`, and so on; empty variables are ignored. `file` defaults to what `HEADWAY_CONFIG` names, or else
    `headway.toml` in the working directory, if it exists. `spell` returns the caller's name for a field. `targets` has
    one target, or several as NAME=TARGET, as NAME@VERSION=TARGET or as names of models in the file. It is a mapping by model if
    targets are objects, and None for all models in the file.
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
    """Return the name of a setting as its user wrote it: as a flag, as a variable, or in the file. See `load`."""
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
    """Reread the version weights from the file, by model. The key "" is for models without a table. Raises SettingError."""
    table = read_file(Path(settings.weights_file), "config")
    default = str(values_of(table).get("version_weights", ("", ""))[1])
    weights = {"": default}
    for model, own in model_tables(table).items():
        weights[model] = str(dict(own.own).get("version_weights", default))
    for text in weights.values():
        replace(settings, models=(), default_model="", version_weights=text)  # The constructor checks it.
    return weights


def load_arguments(values: Mapping[str, Any]) -> Settings:
    """Return the settings in a function's arguments, without reading the environment or a file."""
    return _merged([_from_flags(values, str)], str)


def _merged(
    sources: Sequence[Given],
    spell: Callable[[str], str],
    tables: Mapping[str, ModelTable] = MappingProxyType({}),
    targets: Targets | None = None,
    single_target: bool = False,
) -> Settings:
    """Merge sources. Later sources override earlier ones. `targets` has the targets by model: "" if the target is in the table,
    None if the caller has it as an object. `single_target` is True if there is one target without a model's name."""
    values: dict[str, Any] = {}
    spelling: dict[str, str] = {name: spell(name) for name in FIELDS}
    for given in sources:
        for name, (spelt, value) in given.items():
            values[name], spelling[name] = value, spelt
    single = str(values.get("model", FIELDS["model"].default)) if single_target else None
    models = tuple(_fitted_model(values, model) for model in _chosen(tables, targets, single))
    _fit_times(values)
    _fit_workers(values)
    try:
        return Settings(**values, models=models)
    except SettingError as exc:
        raise _respelt(exc, values, spelling, tables) from None


def _respelt(
    error: SettingError, values: Mapping[str, Any], spelling: Mapping[str, str], tables: Mapping[str, ModelTable]
) -> SettingError:
    """Replace the names of settings in an error with those that the user wrote. `models.NAME.FIELD` is a model's own setting."""
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


def _chosen(tables: Mapping[str, ModelTable], targets: Targets | None, single: str | None) -> tuple[ModelSettings, ...]:
    """Return the models that the user named, or else all models with a table. `single` is the model of a single target."""
    if targets is None and single is not None:
        return (ModelSettings(single, "", tables[single].own),) if single in tables else ()
    no_table = ModelTable("", (), {})
    models: dict[str, ModelSettings] = {}
    for key, target in _with_versions(tables, targets).items():
        name, versioned, version = key.partition("@")
        table = tables.get(key, no_table)
        text = table.target if target == "" else target or ""
        before = models.get(name)
        if before is not None and not (versioned and before.versions):
            hint = f"Give a version for each, or leave the others out. {VERSIONS}"
            raise SettingError("TARGET", name, "is given both with and without a version", hint)
        if versioned:
            model = before or ModelSettings(name, "", tables.get(name, no_table).own)
            models[name] = replace(model, versions=(*model.versions, ModelSettings(version, text, table.own)))
        else:
            models[name] = ModelSettings(name, text, table.own)
    return tuple(models.values())


def _with_versions(tables: Mapping[str, ModelTable], targets: Targets | None) -> Targets:
    """Return the targets by model, or by version for models whose versions have tables. If `targets` is None, all tables are used."""
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
    """Fit two defaults to `request_timeout_ms`: `queue_timeout_ms` must not be longer, and `task_timeout_ms` not shorter."""

    def default(name: str) -> float:
        value: Any = FIELDS[name].default
        return float(value)

    overall = float(values.get("request_timeout_ms", default("request_timeout_ms")))
    if 1.0 <= overall < default("queue_timeout_ms"):
        values.setdefault("queue_timeout_ms", overall)
    if default("task_timeout_ms") < overall <= MAX_REQUEST_TIMEOUT_MS:
        values.setdefault("task_timeout_ms", overall)


def misspelt(environ: Mapping[str, str], known: Collection[str]) -> list[tuple[str, str]]:
    """Return variables that look like misspelt settings, each with the most similar name. Other variables with the prefix may come
    from other programs; for example, Kubernetes sets some for a Service. `known` are Headway's variables that are not settings."""
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
                hint = "There is a Service of this name: set enableServiceLinks: false in the pod."
                reason = "was set by Kubernetes as a service link, not by you"
                raise SettingError(spelt, FIELDS[name].shown(text), reason, hint)
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
            raise SettingError(spelt, text, "must be true or false", "Write one of them.")
        return _TRUTH[text.lower()]
    try:
        return expected(text)
    except ValueError:
        what = "a whole number" if expected is int else "a number"
        unit = FIELDS[name].unit
        hint = f"Write digits only; the unit is {unit}." if unit else "Write digits only."
        raise SettingError(spelt, text, f"is not {what}", hint) from None


_REMOTE_CALLS = 4  # Calls in flight to a fallback that is a remote API.
_ALWAYS = tuple(name for name, field in FIELDS.items() if field.term is Term.ALWAYS)
TERMS = tuple(name for name, field in FIELDS.items() if field.term is not Term.NO)
Terms = Sequence[tuple[str, str | int | float | bool]]


def fallbacks_of(settings: Settings) -> dict[str, Settings]:
    """Return the settings of each model with a fallback. In these, `fallback` is only the target. A target given without a
    model's name is for the default model, or else the first model. A model's own table takes precedence. Raises SettingError
    if a fallback names a model that has no settings in this process."""
    if not settings.broker:
        return {}
    served = settings.served
    targets = {model.name: str(target) for model in settings.models if (target := dict(model.values).get("fallback"))}
    if settings.fallback:
        model, target = split_target(settings.fallback) or ("", settings.fallback)
        if model and model not in served:
            reason = f"is for the model {model!r}, but this process only has settings for {', '.join(served)}"
            hint = f"Write a table [models.{model}] with this fallback in the file, or set --model to its name."
            raise SettingError("fallback", f"{model}={shown_target(target)}", reason, hint)
        if model:
            targets[model] = target
        else:
            targets.setdefault(settings.default if settings.default in served else next(iter(served)), target)
    return {
        model: replace(own, models=(), fallback=targets[model]) for model, own in served.items() if model in targets
    }


def fallback_batches(fallback: str) -> int:
    """Return how many batches a gateway runs on a fallback at once. A function gets only one: it uses the gateway's CPUs."""
    return _REMOTE_CALLS if "://" in fallback.partition("(")[0] else 1


def terms_of(settings: Settings) -> tuple[tuple[str, str | int | float | bool], ...]:
    """Return the terms in a model's settings."""
    terms = [(name, getattr(settings, name)) for name in TERMS]
    return tuple((name, value) for name, value in terms if name in _ALWAYS or value != FIELDS[name].default)


def on_terms(settings: Settings, model: str, terms: Terms) -> Settings:
    """Return the process's settings with a model's terms added, except terms that contradict the settings."""
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

"""Sources of settings: flags, environment and file, merged, each value with the name under which it was written."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.config.checks import MAX_REQUEST_TIMEOUT_MS, is_file, shown
from headway.config.settings import FIELDS, PREFIX, Settings, flag, kind
from headway.core import arguments
from headway.errors import SettingError


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
    spell: Callable[[str], str] = flag,
) -> Settings:
    """Merge flags, environment and file into Settings.

    Arguments:
        flags: field name to value or to its text, None for a flag that was not given.
        environ: the process environment; `HEADWAY_PORT` sets `port`, and so on. An empty variable counts as
            not set. `HEADWAY_CONFIG` names the file when `file` is None.
        file: a TOML file; when none is named, `headway.toml` in the working directory is read if it is there.
        spell: field name to the name under which the caller of the command, or of a function, gave it.

    Raises:
        SettingError: a name is unknown, or a value is of the wrong type or out of range.
    """
    source = spell("config")
    if file is None and environ.get(f"{PREFIX}CONFIG"):
        file, source = Path(environ[f"{PREFIX}CONFIG"]), f"{PREFIX}CONFIG"
    return _merged([_from_file(file, source), _from_environ(environ), _from_flags(flags, spell)], spell)


def load_arguments(values: Mapping[str, Any]) -> Settings:
    """Settings of a function's arguments alone, whatever environment and files say; see `load`."""
    return _merged([_from_flags(values, str)], str)


def _merged(sources: Sequence[_Given], spell: Callable[[str], str]) -> Settings:
    """Settings of several sources, of which a later one beats an earlier one."""
    values: dict[str, Any] = {}
    spelling: dict[str, str] = {name: spell(name) for name in FIELDS}
    for given in sources:
        for name, (spelt, value) in given.items():
            values[name], spelling[name] = value, spelt
    _fit_times(values)
    if devices := values.get("devices"):
        values.setdefault("workers", devices.count(",") + 1)
    try:
        return Settings(**values)
    except SettingError as exc:
        respell = _speller(spelling)
        spelt = spelling[exc.setting] + ("" if exc.setting in values else " (its default)")
        raise SettingError(spelt, exc.value, respell(exc.reason), respell(exc.hint)) from None


def _fit_times(values: dict[str, Any]) -> None:
    """Fit the times that were left out to those that were given.

    Who shortens the time in all should not have to shorten the time in the queue, too. Who lengthens it does not mean
    that tasks end sooner than other requests, or that a shutdown breaks requests off.
    """

    def usual(name: str) -> float:
        default: Any = FIELDS[name].default
        return float(default)

    def chosen(name: str) -> float:
        return float(values.get(name, usual(name)))

    whole = chosen("request_timeout_ms")
    if 1.0 <= whole < usual("queue_timeout_ms"):
        values.setdefault("queue_timeout_ms", whole)
    for name, longest in (
        ("task_timeout_ms", whole),
        ("drain_timeout_ms", max(whole, chosen("gpu_timeout_ms"))),
    ):
        if usual(name) < longest <= MAX_REQUEST_TIMEOUT_MS:
            values.setdefault(name, longest)


def _speller(spelling: Mapping[str, str]) -> Callable[[str], str]:
    """Make a function that replaces the field names between backticks by what their user wrote."""
    quoted = re.compile("`(" + "|".join(FIELDS) + ")`")
    return lambda text: quoted.sub(lambda match: spelling[match[1]], text)


_Given = dict[str, tuple[str, Any]]
"""Field name to its spelling in one source, and its value there."""


def _from_file(file: Path | None, source: str) -> _Given:
    path = file or Path("headway.toml")
    if not is_file(path):
        if file is None:
            return {}
        raise SettingError(source, str(file), "no such file", "Name an existing TOML file, or leave it out.")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SettingError(source, str(path), f"cannot be read: {exc.strerror}", "Mend its permissions.") from exc
    except (ValueError, RecursionError) as exc:  # of which TOMLDecodeError and UnicodeDecodeError are two
        raise SettingError(source, str(path), f"is not valid TOML: {exc}", "Mend the file.") from exc
    found: _Given = {}
    if "target" in table:
        found["target_arguments"] = _target_arguments(path, table.pop("target"), "target_arguments" in table)
    for name, value in table.items():
        spelt = f"{path}: {name}"
        if name not in FIELDS:
            raise _unknown(spelt, name, value)
        found[name] = (spelt, _typed(spelt, name, value))
    return found


def _unknown(spelt: str, name: str, value: object) -> SettingError:
    near = difflib.get_close_matches(name, FIELDS, 1)
    hint = f"Did you mean {near[0]}?" if near else "Remove it."
    return SettingError(spelt, shown(FIELDS[near[0]], value) if near else value, "there is no such setting", hint)


def _target_arguments(path: Path, table: object, twice: bool) -> tuple[str, str]:
    """Text of the arguments in the table `[target.arguments]`, with its spelling."""
    spelt = f"{path}: [target.arguments]"
    named = table.get("arguments") if isinstance(table, dict) and len(table) == 1 else None
    if not isinstance(named, dict):
        hint = "Write [target.arguments], and one line for each of them."
        raise SettingError(f"{path}: target", "…", "is no table of the arguments of a class", hint)
    if twice:
        raise SettingError(spelt, "…", "is there beside target_arguments", "Write all of them in one place.")
    try:
        return spelt, arguments.write(named)
    except arguments.NoArguments as exc:
        raise SettingError(
            spelt, "…", f"cannot be used: {exc}", "Write text, numbers, true, false, or lists."
        ) from None


def _from_environ(environ: Mapping[str, str]) -> _Given:
    found: _Given = {}
    for name in FIELDS:
        spelt = f"{PREFIX}{name.upper()}"
        text = environ.get(spelt)
        if text:
            if text.startswith("tcp://"):
                hint = "Kubernetes sets it for a Service of this name: set enableServiceLinks: false in the pod."
                raise SettingError(spelt, shown(FIELDS[name], text), "is a service link", hint)
            found[name] = (spelt, _parsed(spelt, name, text))
    return found


def _from_flags(flags: Mapping[str, Any], spell: Callable[[str], str]) -> _Given:
    found: _Given = {}
    for name, value in flags.items():
        if name not in FIELDS:
            raise _unknown(spell(name), name, value)
        if value is not None:
            parse = _parsed if isinstance(value, str) else _typed
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
        unit = FIELDS[name].metadata["unit"]
        hint = f"Write digits only; the unit is {unit}." if unit else "Write digits only."
        raise SettingError(spelt, text, f"is not {what}", hint) from None


def _typed(spelt: str, name: str, value: Any) -> Any:
    """Check the value of a file's key, which has a type already, against the type of field `name`."""
    wanted = kind(name)
    if wanted is float and type(value) is int and abs(value) < 1 << 62:
        return float(value)
    if type(value) is wanted:
        return value
    what, hint = {
        str: ("text", 'Put it in quotes: "…".'),
        int: ("a whole number", "Write digits without quotes."),
        float: ("a number", "Write digits without quotes."),
        bool: ("a truth value", "Use true or false, without quotes."),
    }[wanted]
    raise SettingError(spelt, shown(FIELDS[name], value), f"must be {what}", hint)

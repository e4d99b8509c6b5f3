"""Command-line flags made from the table of settings, so that none is written down twice."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.config import FIELDS, flag, kind, load, misspelt, spelling_of
from headway.errors import SettingError

_WORDS = {str: "TEXT", int: "N", float: "X", bool: ""}

_ONE = {"batches": "batch", "bytes": "byte", "characters": "character", "days": "day", "inputs": "input"}
"""Units of which there is one."""

OTHERS = ("HEADWAY_ADMIN", "HEADWAY_ADMIN_TOKEN", "HEADWAY_CA", "HEADWAY_CERT", "HEADWAY_CERT_KEY")
"""Environment variables of commands that are no settings."""

_Config = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="TOML file of settings; else headway.toml, if there is one here."),
]


def with_settings(
    names: Iterable[str] = tuple(FIELDS), **fixed: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each setting in `names`, and `--config`.

    Settings in `fixed` have that value, whatever environment and file say.

    The decorated function takes a keyword argument `settings`, which is filled with the Settings that flags,
    environment and file come to. Values are parsed by `headway.config` and not by Typer, so that a bad one gets the
    same message and exit code wherever it was written.
    """
    chosen = tuple(name for name in names if FIELDS[name].has_flag)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(config: str | None = None, **given: Any) -> None:
            flags = {**fixed, **{name: given.pop(name) for name in chosen}}
            file = None if config is None else Path(config)
            settings = load(flags, file=file, targets=given.get("targets") or None)
            for name, meant in misspelt(os.environ, OTHERS):
                typer.echo(f"headway: {name} is no setting, and changes nothing. Did you mean {meant}?", err=True)
            try:
                function(settings=settings, **given)
            except SettingError as exc:
                # What comes up later, such as a port that is taken, is named by its field.
                if exc.setting not in FIELDS:
                    raise
                raise SettingError(spelling_of(exc.setting, flags, file=file), exc.value, exc.reason, exc.hint) from exc

        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "settings"]
        added = [_parameter("config", _Config), *(_parameter(name, _option(name)) for name in chosen)]
        parameters = [*own, *added]
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__dict__["__signature__"] = inspect.Signature(parameters)
        return command

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str) -> Any:
    one = FIELDS[name]
    switch = kind(name) is bool
    option = typer.Option(
        f"{flag(name)}/--no-{flag(name)[2:]}" if switch else flag(name),
        metavar=one.unit.upper() or _WORDS[kind(name)] or None,
        help=f"{one.help}{_default(name)}",
        rich_help_panel=one.group,
        show_default=False,
    )
    return Annotated[bool | None, option] if switch else Annotated[str | None, option]


def _default(name: str) -> str:
    value, unit = FIELDS[name].default, FIELDS[name].unit
    if value is None or value is False or value == "":
        return ""
    shown = f"{value:.15g}" if isinstance(value, float) else str(value)
    return f" (default {shown} {_ONE.get(unit, unit) if value == 1 else unit}".rstrip() + ")"

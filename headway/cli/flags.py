"""Command-line options, made from the fields of Settings and of the tools' dataclasses, so that each is declared only once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from headway.cli.commands import F, Option, combined, default_text, option
from headway.config import FIELDS, flag, kind, load, misspelt, spelling_of
from headway.config.fields import ToolOption, tool_options_of
from headway.errors import SettingError

_WORDS = {str: "TEXT", int: "N", float: "X"}

OTHERS = ("HEADWAY_ADMIN", "HEADWAY_ADMIN_TOKEN", "HEADWAY_CA", "HEADWAY_CERT", "HEADWAY_CERT_KEY")
"""Environment variables that commands read in addition to the settings."""

_CONFIG = option("--config", metavar="FILE",
    help="TOML file of settings; default: headway.toml in this folder, if it exists. Every setting is a flag, an environment "
    "variable (--port: HEADWAY_PORT) and a key of the file (port). A flag overrides the environment, which overrides the file.")  # fmt: skip


def with_settings(
    names: Iterable[str] = tuple(FIELDS), **fixed: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add `--config` and an option for each setting in `names` to a command, which gets the resulting `settings`. `fixed`
    has values that users can't change. `headway.config`, not click, parses values, so the error for a bad one is the same
    wherever it was written."""
    chosen = tuple(names)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(config: str | None = None, **given: Any) -> None:
            flags = {**fixed, **{name: given.pop(name) for name in chosen}}
            file = None if config is None else Path(config)
            settings = load(flags, file=file, targets=given.get("targets") or None)
            for name, similar in misspelt(os.environ, OTHERS):
                click.echo(f"headway: {name} is not a setting, and has no effect. Did you mean {similar}?", err=True)
            try:
                function(settings=settings, **given)
            except SettingError as exc:
                # A late error, such as a port that is in use, names the field; users know the flag or variable.
                if exc.setting not in FIELDS:
                    raise
                raise SettingError(spelling_of(exc.setting, flags, file=file), exc.value, exc.reason, exc.hint) from exc

        return combined([_CONFIG, *map(_of_setting, chosen)])(command)

    return decorate


def _of_setting(name: str) -> Callable[[F], F]:
    # The roles' commands share their options, because a process imports all four commands.
    shared: Any = lambda *_, **__: _option_of(name)  # noqa: E731 - click takes a class, or a function that returns an instance
    return click.option(cls=shared)


@functools.cache
def _option_of(name: str) -> Option:
    field, switch = FIELDS[name], kind(name) is bool
    return Option(
        [f"{flag(name)}/--no-{flag(name)[2:]}" if switch else flag(name)],
        group=field.group,
        rare=not field.common,
        metavar=None if switch else field.unit.upper() or _WORDS[kind(name)],
        help=f"{field.help}{default_text(field.default, field.unit)}",
        default=None,
        type=bool if switch else str,
    )


def with_fields(
    kind: type, names: Iterable[str] | None = None, required: Collection[str] = (), **defaults: Any
) -> Callable[[F], F]:
    """Add an option to a command for each `tool_option` of the dataclass `kind`, or only for those in `names`. Users must
    give those in `required`. `defaults`, in the options' units, override the fields' defaults."""
    options = tool_options_of(kind)
    chosen = options if names is None else names
    return combined([_of_field(name, options[name], defaults, name in required) for name in chosen])


def _of_field(name: str, field: ToolOption, defaults: Mapping[str, Any], required: bool) -> Callable[[F], F]:
    # With a default, even None, click would not require the option.
    given = {"required": True} if required else {"default": defaults.get(name, field.default)}
    if field.type is bool:
        return option(field.flag, name, group=field.group, is_flag=True, help=field.help, **given)
    return option(
        field.flag, name, group=field.group, type=field.type, metavar=field.metavar, multiple=field.multiple, help=field.help,
        **given,
    )  # fmt: skip


def fields_from(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of options to fields of the dataclass `kind`, in the fields' units."""
    options = tool_options_of(kind)
    return {name: options[name].read(value) for name, value in given.items() if name in options}

"""Options made from tables of fields, so that none is written down twice: of settings, and of what the tools run."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from headway.cli.commands import F, Option, combined, option, told
from headway.config import FIELDS, flag, kind, load, misspelt, spelling_of
from headway.config.tool_options import ToolOption, tool_options_of
from headway.errors import SettingError

_WORDS = {str: "TEXT", int: "N", float: "X"}

OTHERS = ("HEADWAY_ADMIN", "HEADWAY_ADMIN_TOKEN", "HEADWAY_CA", "HEADWAY_CERT", "HEADWAY_CERT_KEY")
"""Environment variables of commands that are no settings."""

_CONFIG = option("--config", metavar="FILE", help="TOML file of settings; else headway.toml, if there is one here.")


def with_settings(
    names: Iterable[str] = tuple(FIELDS), **fixed: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting in `names`, and `--config`.

    Settings in `fixed` have that value, whatever environment and file say.

    The decorated function takes a keyword argument `settings`, which is filled with the Settings that flags,
    environment and file come to. Values are parsed by `headway.config` and not by click, so that a bad one gets the
    same message and exit code wherever it was written.
    """
    chosen = tuple(names)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(config: str | None = None, **given: Any) -> None:
            flags = {**fixed, **{name: given.pop(name) for name in chosen}}
            file = None if config is None else Path(config)
            settings = load(flags, file=file, targets=given.get("targets") or None)
            for name, meant in misspelt(os.environ, OTHERS):
                click.echo(f"headway: {name} is no setting, and changes nothing. Did you mean {meant}?", err=True)
            try:
                function(settings=settings, **given)
            except SettingError as exc:
                # What comes up later, such as a port that is taken, is named by its field.
                if exc.setting not in FIELDS:
                    raise
                raise SettingError(spelling_of(exc.setting, flags, file=file), exc.value, exc.reason, exc.hint) from exc

        return combined([_CONFIG, *map(_of_setting, chosen)])(command)

    return decorate


def _of_setting(name: str) -> Callable[[F], F]:
    # The commands of the roles share what they have in common: a process imports all four.
    shared: Any = lambda *_, **__: _option_of(name)  # noqa: E731 - click takes a class, or what makes its instance
    return click.option(cls=shared)


@functools.cache
def _option_of(name: str) -> Option:
    one, switch = FIELDS[name], kind(name) is bool
    return Option(
        [f"{flag(name)}/--no-{flag(name)[2:]}" if switch else flag(name)],
        group=one.group,
        rare=not one.common,
        metavar=None if switch else one.unit.upper() or _WORDS[kind(name)],
        help=f"{one.help}{told(one.default, one.unit)}",
        default=None,
        type=bool if switch else str,
    )


def with_fields(
    kind: type, names: Iterable[str] | None = None, required: Collection[str] = (), **defaults: Any
) -> Callable[[F], F]:
    """Give a command an option for each field of `kind` in `names`, which has one: by default all of them.

    Arguments:
        kind: dataclass whose fields are made by `tool_option`.
        names: names of fields.
        required: names of those that must be given.
        defaults: values that the options have in the place of the fields' defaults, by name; in the options' units.
    """
    known = tool_options_of(kind)
    return combined(
        [_of_field(name, known[name], defaults, name in required) for name in (known if names is None else names)]
    )


def _of_field(name: str, one: ToolOption, defaults: Mapping[str, Any], required: bool) -> Callable[[F], F]:
    # To click a default of None is one, too, and then nothing is missing.
    given = {"required": True} if required else {"default": defaults.get(name, one.default)}
    if one.type is bool:
        return option(one.flag, name, group=one.group, is_flag=True, help=one.help, **given)
    return option(
        one.flag,
        name,
        group=one.group,
        type=one.type,
        metavar=one.metavar,
        multiple=one.multiple,
        help=one.help,
        **given,
    )


def fields_from(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of fields of `kind` from those of their options, in the fields' units."""
    known = tool_options_of(kind)
    return {name: known[name].read(value) for name, value in given.items() if name in known}

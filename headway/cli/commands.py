"""Commands and options of the command line: click's, with options under headings, and modules that are imported when they are asked for.

The help of a command with many settings shows the common ones; `--help-all` shows all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])

MANY = 40
"""Options of a command from which on its help shows the common ones."""
_ONE = {"batches": "batch", "bytes": "byte", "characters": "character", "days": "day", "inputs": "input"}
"""Units of which there is one."""
OPTIONS = "Options"
"""Heading of options that have none of their own."""
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
"""Names of the help and width of it, of every command."""


def told(default: Any, unit: str = "") -> str:
    """A default, as the help tells it behind what an option does; empty where there is none."""
    if default is None or default is False or default == "":
        return ""
    shown = f"{default:.15g}" if isinstance(default, float) else str(default)
    return f" (default {shown} {_ONE.get(unit, unit) if default == 1 else unit}".rstrip() + ")"


class Option(click.Option):
    """Option under a heading of the help, which tells its default.

    Attributes:
        group: the heading.
        rare: whether the short help leaves it out.
    """

    def __init__(self, names: Sequence[str], group: str = OPTIONS, rare: bool = False, **others: Any) -> None:
        others["help"] = others.get("help", "") + told(others.get("default"))
        super().__init__(names, **others)
        self.group, self.rare = group, rare


def option(*names: str, group: str = OPTIONS, **others: Any) -> Callable[[F], F]:
    """Give a command an option; the rest is as click.option has it."""
    return click.option(*names, cls=Option, group=group, **others)


_WHOLE = "headway.whole_help"
"""Mark of a context whose help shows all settings."""


def _show_all(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_WHOLE] = True
        click.echo(ctx.get_help())
        ctx.exit()


_HELP_ALL = Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, hidden=True, callback=_show_all
)  # fmt: skip


class Command(click.Command):
    """Command of which the help has headings, and of which errors name the roles that take what it does not."""

    def __init__(self, name: str | None, **others: Any) -> None:
        super().__init__(name, context_settings=CONTEXT, **others)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Parameters, and those of the help."""
        return [*super().get_params(ctx), _HELP_ALL]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as exc:
            from headway.cli.usage_errors import better_error

            raise better_error(exc, self.name) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, each of them where its first option stands."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None and not (self._is_short(ctx) and getattr(parameter, "rare", False)):
                groups.setdefault(getattr(parameter, "group", OPTIONS), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Say how to see what a short help leaves out."""
        if self._is_short(ctx):
            rare = sum(getattr(parameter, "rare", False) for parameter in self.params)
            formatter.write(f"\n{rare} more settings: {ctx.command_path} --help-all\n")

    def _is_short(self, ctx: click.Context) -> bool:
        return len(self.params) > MANY and _WHOLE not in ctx.meta


def command(*arguments: Any, **others: Any) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a command; the rest is as click.command has it."""
    return click.command(*arguments, cls=Command, **others)


class Lazy(NamedTuple):
    """Command that is imported when it is asked for.

    Attributes:
        place: its module and its name there, with a colon between them.
        heading: heading that lists it.
        summary: line of the list.
    """

    place: str
    heading: str
    summary: str


class CommandGroup(click.Group):
    """Commands under headings.

    Arguments:
        lazy: commands by name that are imported when they are asked for.
    """

    command_class = Command

    def __init__(self, name: str | None = None, lazy: Mapping[str, Lazy] | None = None, **others: Any) -> None:
        super().__init__(name, context_settings=CONTEXT, no_args_is_help=True, **others)
        self._lazy = lazy or {}
        self.commands.update(dict.fromkeys(self._lazy))  # type: ignore[arg-type]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Parameters, and those of the help."""
        return [*super().get_params(ctx), _HELP_ALL]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help."""
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported."""
        if cmd_name in self._lazy and self.commands[cmd_name] is None:
            module, _, name = self._lazy[cmd_name].place.partition(":")
            self.commands[cmd_name] = getattr(importlib.import_module(module), name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, of which none is imported."""
        if not self._lazy:
            super().format_commands(ctx, formatter)
            return
        headings: dict[str, list[tuple[str, str]]] = {}
        for name, one in self._lazy.items():
            headings.setdefault(one.heading, []).append((name, one.summary))
        for heading, records in headings.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=20)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a name, for which no command is imported."""
        names = [CompletionItem(name) for name in self.commands if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


def combined(decorators: Sequence[Callable[[F], F]]) -> Callable[[F], F]:
    """One decorator of several, whose options stand in their order."""

    def decorate(function: F) -> F:
        for one in reversed(decorators):
            function = one(function)
        return function

    return decorate

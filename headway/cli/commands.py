"""Click commands whose help has headings, and groups that import a command only when it runs. The help of a command with
many settings shows only the common ones; `--help-all` shows them all."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])

MANY = 40  # A command's help with more options than this shows only the common ones.
_SINGULAR = {"batches": "batch", "bytes": "byte", "characters": "character", "days": "day", "inputs": "input"}
OPTIONS = "Options"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)")


def default_text(default: Any, unit: str = "") -> str:
    """Format a default for the help, or return an empty string if there is none."""
    if default is None or default is False or default == "":
        return ""
    shown = f"{default:.15g}" if isinstance(default, float) else str(default)
    return f" (default {shown} {_SINGULAR.get(unit, unit) if default == 1 else unit}".rstrip() + ")"


class Option(click.Option):
    """Option that the help lists with its default, under the heading `group`. The short help omits `rare` options."""

    def __init__(self, names: Sequence[str], group: str = OPTIONS, rare: bool = False, **others: Any) -> None:
        others["help"] = others.get("help", "") + default_text(others.get("default"))
        super().__init__(names, **others)
        self.group, self.rare = group, rare


def option(*names: str, group: str = OPTIONS, **others: Any) -> Callable[[F], F]:
    """Add an option to a command; see click.option."""
    return click.option(*names, cls=Option, group=group, **others)


_SHOWS_ALL = "headway.help_all"  # Key in the metadata of a context whose help shows all settings.


def _show_all(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


_HELP_ALL = Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, hidden=True, callback=_show_all)


class Command(click.Command):
    """Command whose help has headings. If the user gives it an option or target of another command, the error names that command."""

    def __init__(self, name: str | None, **others: Any) -> None:
        super().__init__(name, context_settings=CONTEXT, **others)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _HELP_ALL]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as exc:
            raise _explained(exc, self.name) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None and not (self._is_short(ctx) and getattr(parameter, "rare", False)):
                groups.setdefault(getattr(parameter, "group", OPTIONS), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self._is_short(ctx):
            rare = sum(getattr(parameter, "rare", False) for parameter in self.params)
            formatter.write(f"\n{rare} more settings: {ctx.command_path} --help-all\n")

    def _is_short(self, ctx: click.Context) -> bool:
        return len(self.params) > MANY and _SHOWS_ALL not in ctx.meta


def command(*arguments: Any, **others: Any) -> Callable[[Callable[..., Any]], Command]:
    """Turn a function into a command; see click.command."""
    return click.command(*arguments, cls=Command, **others)


class Lazy(NamedTuple):
    """Command that is imported from `place` (module:name) when it runs. `summary` is its line in the list under `heading`."""

    place: str
    heading: str
    summary: str


class CommandGroup(click.Group):
    """Group that lists its commands under headings. Those in `lazy` are imported when they run."""

    command_class = Command

    def __init__(self, name: str | None = None, lazy: Mapping[str, Lazy] | None = None, **others: Any) -> None:
        super().__init__(name, context_settings=CONTEXT, no_args_is_help=True, **others)
        self._lazy = lazy or {}
        self.commands.update(dict.fromkeys(self._lazy))  # type: ignore[arg-type]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _HELP_ALL]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._lazy and self.commands[cmd_name] is None:
            module, _, name = self._lazy[cmd_name].place.partition(":")
            self.commands[cmd_name] = getattr(importlib.import_module(module), name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self._lazy:
            super().format_commands(ctx, formatter)
            return
        headings: dict[str, list[tuple[str, str]]] = {}
        for name, lazy in self._lazy.items():
            headings.setdefault(lazy.heading, []).append((name, lazy.summary))
        for heading, records in headings.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=20)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name) for name in self.commands if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


def combined(decorators: Sequence[Callable[[F], F]]) -> Callable[[F], F]:
    """Combine decorators into one. Their options appear in the help in the given order."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def _explained(error: click.UsageError, command: str | None) -> click.UsageError:
    from headway.app.roles import ROLES  # This imports all settings, and only a usage error needs it.
    from headway.config.fields import joined

    role = next((role for role in ROLES if role.value == command), None)
    if role is None:
        return error
    if isinstance(error, click.NoSuchOption):
        takers = _takers_of(error.option_name)
        if not takers or command in takers:
            return error
        message = f"headway {command} has no {error.option_name}: it is a flag of headway {joined(takers, 'and')}."
    elif not ROLES[role].batchers and (match := _EXTRA.fullmatch(error.message)):
        message = (
            f"headway {command} takes no TARGET, but got {match[1]}: only workers run targets. Also start headway worker {match[1]} "
            f"with the same --broker, or run everything in one process: headway serve {match[1]}"
        )
    else:
        return error
    return click.UsageError(message, error.ctx)


def _takers_of(option: str) -> list[str]:
    from headway.app.roles import ROLES
    from headway.config import FIELDS, flag

    name = next((name for name in FIELDS if option in (flag(name), f"--no-{flag(name)[2:]}")), "")
    return [role.value for role, parts in ROLES.items() if name in parts.settings] if name else []

"""The command line. `main` is what the console script runs.

A command's module is imported when that command is invoked, so that `headway --help` and a typing error
answer at once, whatever the commands themselves need.

Exit codes: 0 done · 1 it did not come out well (the message says why) · 2 wrong usage · 3 a bad setting ·
4 the target cannot be loaded or breaks the rules · 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from headway import __version__

EXIT_FAILED = 1
EXIT_SETTING = 3
EXIT_TARGET = 4

_OF_OUTPUT = frozenset((errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE))
"""Errors of a disk that is full, or of a reader that has gone; those of a file name the file."""

Found = Callable[..., Any] | typer.Typer
"""A command: a function with Typer's annotations, or an app with commands of its own."""


def _init() -> Found:
    from headway.cli.init import init

    return init


def _serve() -> Found:
    from headway.cli.serve import serve

    return serve


def _gateway() -> Found:
    from headway.cli.gateway import gateway

    return gateway


def _worker() -> Found:
    from headway.cli.worker import worker

    return worker


def _controller() -> Found:
    from headway.cli.controller import controller

    return controller


def _check() -> Found:
    from headway.cli.check import check

    return check


def _status() -> Found:
    from headway.cli.status import status

    return status


def _top() -> Found:
    from headway.cli.top import top

    return top


def _dlq() -> Found:
    from headway.cli.dlq import dlq

    return dlq


def _keys() -> Found:
    from headway.cli.keys import keys

    return keys


def _bench() -> Found:
    from headway.cli.bench import bench

    return bench


def _plan() -> Found:
    from headway.cli.plan import plan

    return plan


def _simulate() -> Found:
    from headway.cli.simulate import simulate

    return simulate


COMMANDS: dict[str, tuple[Callable[[], Found], str, str]] = {
    "serve": (_serve, "Serve", "Serve TARGET: HTTP, queue and GPU workers in one process."),
    "gateway": (_gateway, "Serve", "Take requests for workers in other processes."),
    "worker": (_worker, "Serve", "Run TARGET for gateways in other processes."),
    "controller": (_controller, "Serve", "Count the workers, and tell the gateways what they can carry."),
    "init": (_init, "Serve", "Make a folder with a target, its test and its settings."),
    "check": (_check, "Serve", "Load TARGET, try it in batches, and say what it costs."),
    "status": (_status, "Operate", "Show how a running service is doing."),
    "top": (_top, "Operate", "Show it live: load, latency, refusals, workers."),
    "dlq": (_dlq, "Operate", "List, show, replay and purge dead letters."),
    "keys": (_keys, "Operate", "Create, list, revoke and rotate API keys."),
    "bench": (_bench, "Measure and plan", "Put open-loop load on a URL; latency and errors."),
    "plan": (_plan, "Measure and plan", "Say how many GPUs a load and a promise need."),
    "simulate": (_simulate, "Measure and plan", "Run the production policies under virtual time."),
}
"""Commands by name: the function that imports each, the panel that lists it, and one line on what it does."""


class LazyCommand(TyperCommand):
    """Stands for a command until it is invoked, and only then imports it.

    Arguments:
        name: what the user types.
        find: imports and returns the command.
        panel: heading it is listed under.
        summary: one line for the list.
    """

    def __init__(self, name: str, find: Callable[[], Found], panel: str, summary: str) -> None:
        super().__init__(name, help=summary, rich_help_panel=panel)
        self._find = find

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command and let it parse `args`."""
        found = self._find()
        if not isinstance(found, typer.Typer):
            app = _app()
            app.command(name=self.name, help=_plain(_flowing(inspect.getdoc(found) or "")))(found)
            found = app
        command, given = typer.main.get_command(found), [*args]
        for parameter in command.params:
            if isinstance(parameter, TyperOption | TyperArgument) and parameter.help:
                parameter.help = _plain(parameter.help)
        _defer(command)
        if {"-h", "--help", "--help-all"}.intersection(args):
            args = self._short_help(command, args)
        try:
            return command.make_context(info_name, args, parent=parent, **extra)
        except Exception as exc:
            if isinstance(option := getattr(exc, "option_name", None), str):
                from headway.cli.other_roles import point_out

                point_out(exc, option, self.name)
            elif type(exc).__name__ == "UsageError":
                from headway.cli.other_roles import point_out_target

                point_out_target(exc, self.name)
            elif value := _value_of(exc, given):
                exc.message = f"{value!r}: {exc.message}"  # type: ignore[attr-defined]
            raise

    def _short_help(self, command: Any, args: list[str]) -> list[str]:
        """Make the help of a command with many options a short one, unless all of it is asked for; returns its arguments."""
        from headway.cli.help_pages import ALL, MANY, asks, shorten

        if asks(args):
            return ["--help" if arg == ALL else arg for arg in args]
        if len(command.params) > MANY:
            from headway.config import FIELDS

            shorten(command, FIELDS, self.name or "")
        return args


def _value_of(error: Exception, args: Sequence[str]) -> str:
    """Value of the option that an error is about, where its message does not show it; else empty."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for name in names:
        for place, text in enumerate(args):
            flag, equals, value = text.partition("=")
            if flag == name and (found := value if equals else "".join(args[place + 1 : place + 2])):
                return "" if repr(found) in str(getattr(error, "message", "")) else found
    return ""


class _Deferred:
    """Conversion of a parameter's value that is built when there is one to convert.

    What Typer builds it of takes 0.1 s to import.
    """

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert a value as Typer would."""
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        if _is_text(param.type_descriptor) and all(one.isascii() for one in (value if several else [value])):
            return list(value) if several else value
        if type(value) is param.type_descriptor.annotation and value == param.default:
            return value
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _is_text(descriptor: Any) -> bool:
    """Whether a parameter takes text, or a list of texts, as it stands. Typer looks only at characters beyond ASCII in it."""
    kind = get_args(descriptor.annotation)[0] if descriptor.is_list else descriptor.annotation
    return kind is str and descriptor.parameter_info.parser is None


def _defer(command: Any) -> None:
    """Defer what a command and all commands in it may not need: conversions of parameters, and what prints the help."""
    found = command.get_params

    def get_params(ctx: Any) -> Any:
        parameters = found(ctx)
        for parameter in parameters:
            if parameter._runtime_param is None:
                parameter._runtime_param = _Deferred()
            if isinstance(parameter, TyperArgument) or parameter.is_flag:
                parameter.display_type_rich = _no_type
        return parameters

    printed = command.format_help

    def format_help(ctx: Any, formatter: Any) -> None:
        from headway.cli.help_pages import import_printer

        import_printer()
        printed(ctx, formatter)

    command.get_params, command.format_help = get_params, format_help
    for inner in getattr(command, "commands", {}).values():
        _defer(inner)


def _no_type(ctx: Any) -> None:
    """Type that the help shows of a switch, as `<bool>` would ask for a value, and of an argument, which has a name."""


def _flowing(text: str) -> str:
    """`text` with each paragraph on one line, so that it is wrapped to the terminal's width."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def _plain(text: str) -> str:
    """`text` with its brackets escaped that Rich would take for markup, as in `http://host[:port][/path]`."""
    return re.sub(r"\[(?=[a-zA-Z#/@])", r"\\[", text)


def _app(add_completion: bool = False, **settings: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headway {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Turn single inference requests into full batches for scarce GPUs, and bring each answer back.

    Start with a function of your own that takes a list of texts and returns as many: headway serve FILE.py:FUNCTION
    """


def build() -> TyperGroup:
    """The whole command line as one command group."""
    app = _app(add_completion=True, no_args_is_help=True)
    app.callback()(_root)
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)  # noqa: S101 - an app with a callback is a group; for the type checker
    _defer(group)
    for name, (find, panel, summary) in COMMANDS.items():
        group.add_command(LazyCommand(name, find, panel, summary))
    return group


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line on `arguments` (those of the process when None) and exit."""
    try:
        code = _code(arguments)
        sys.stdout.flush()
    except OSError as exc:
        if exc.errno not in _OF_OUTPUT or exc.filename is not None:
            raise
        code = EXIT_FAILED
        _give_up_output()
        with contextlib.suppress(OSError):
            typer.echo(f"headway: the output cannot be written: {os.strerror(exc.errno)}", err=True)
    sys.exit(code)


def _code(arguments: Sequence[str] | None) -> int | str | None:
    """Exit code of a command, which has been run. An error that is foreseen is told in one line."""
    try:
        build().main(args=arguments, prog_name="headway")
    except SystemExit as exc:
        return exc.code
    except Exception as exc:
        from headway.errors import HeadwayError, SettingError, TargetError

        if not isinstance(exc, HeadwayError):
            raise
        from headway.runtime.log import escape

        typer.echo(f"headway: {escape(str(exc))}", err=True)  # It may quote a target's own error.
        codes = {SettingError: EXIT_SETTING, TargetError: EXIT_TARGET}
        return next((code for kind, code in codes.items() if isinstance(exc, kind)), EXIT_FAILED)
    return 0


def _give_up_output() -> None:
    """Let standard output go nowhere: what is still buffered would fail once more, and change the exit code."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), sys.stdout.fileno())

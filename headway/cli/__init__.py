"""The command line. The console script runs `main`. A command's module is imported only when the command runs, so that
`headway --help` and usage errors appear immediately.

Exit codes: 0 done · 1 failed (the message says why) · 2 wrong usage · 3 a bad setting · 4 the target cannot be loaded or
breaks the rules · 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from headway.cli.commands import CommandGroup, Lazy
from headway.version import __version__

EXIT_FAILED = 1
EXIT_SETTING = 3
EXIT_TARGET = 4
EXIT_INTERRUPTED = 130

_OUTPUT_ERRORS = frozenset((errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE))  # Full disk, closed pipe

COMMANDS = {
    "serve": Lazy("headway.cli.roles:serve", "Serve", "Serve TARGET: HTTP, queue and GPU workers in one process."),
    "gateway": Lazy("headway.cli.roles:gateway", "Serve", "Take requests for workers in other processes."),
    "worker": Lazy("headway.cli.roles:worker", "Serve", "Run TARGET for gateways in other processes."),
    "controller": Lazy("headway.cli.roles:controller", "Serve", "Count the workers, and limit what gateways admit."),
    "init": Lazy("headway.cli.init:init", "Serve", "Make a folder with a target, its test and its settings."),
    "check": Lazy("headway.cli.check:check", "Serve", "Load TARGET, try it in batches, and measure them."),
    "status": Lazy("headway.cli.status:status", "Operate", "Show how a running service is doing."),
    "top": Lazy("headway.cli.top:top", "Operate", "Show a running service live: load, latency, workers."),
    "rollout": Lazy("headway.cli.rollout:rollout", "Operate", "Shift requests to a new version step by step."),
    "drain": Lazy("headway.cli.drain:drain", "Operate", "Take a worker, process or host out of service."),
    "undrain": Lazy("headway.cli.drain:undrain", "Operate", "Put a drained worker, process or host back to work."),
    "bulk": Lazy("headway.cli.bulk:bulk", "Operate", "Run files of inputs on spare capacity."),
    "failover": Lazy("headway.cli.failover:failover", "Operate", "Promote a replica of the broker's Redis."),
    "dlq": Lazy("headway.cli.dlq:dlq", "Operate", "List, show, replay and purge dead letters."),
    "keys": Lazy("headway.cli.keys:keys", "Operate", "Create, list, revoke and rotate API keys."),
    "bench": Lazy("headway.cli.bench:bench", "Measure and plan", "Send requests at a fixed rate, and measure."),
    "plan": Lazy("headway.cli.plan:plan", "Measure and plan", "Find out how many GPUs you need."),
    "simulate": Lazy("headway.cli.simulate:simulate", "Measure and plan", "Try a load and settings without a GPU."),
}
_SHELLS = ("bash", "zsh", "fish")


def _show_completion(ctx: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    if shell is None or ctx.resilient_parsing:
        return
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click knows these shells; for the type checker
    click.echo(kind(ctx.command, {}, "headway", "_HEADWAY_COMPLETE").source())
    ctx.exit()


@click.group(cls=CommandGroup, lazy=COMMANDS)
@click.version_option(__version__, "--version", "-V", message="headway %(version)s", help="Print the version.")
@click.option("--show-completion", type=click.Choice(_SHELLS), is_eager=True, expose_value=False, callback=_show_completion,
    help='Print the completion script for a shell; use it as: eval "$(headway --show-completion bash)".')  # fmt: skip
def program() -> None:
    """Turn single inference requests into full batches for scarce GPUs, and return each answer to its caller.

    To begin, write a function that takes a list of strings and returns one output for each: headway serve FILE.py:FUNCTION
    """


@program.command(hidden=True)
def version() -> None:
    """Print the version."""
    click.echo(f"headway {__version__}")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line on `arguments` (None for the process's own) and exit."""
    try:
        code = _code(arguments)
        sys.stdout.flush()
    except OSError as exc:
        if exc.errno not in _OUTPUT_ERRORS or exc.filename is not None:
            raise
        code = EXIT_FAILED
        # Flushing the buffer at exit would fail again, and change the exit code.
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        with contextlib.suppress(OSError):
            click.echo(f"headway: the output cannot be written: {os.strerror(exc.errno)}", err=True)
    sys.exit(code)


def _code(arguments: Sequence[str] | None) -> int:
    try:
        return program.main(arguments, prog_name="headway", standalone_mode=False) or 0
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except click.Abort as exc:
        if isinstance(exc.__cause__, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        click.echo("Aborted.", err=True)
        return EXIT_FAILED
    except Exception as exc:
        from headway.errors import HeadwayError, SettingError, TargetError

        if not isinstance(exc, HeadwayError):
            raise
        from headway.runtime.log import escape

        click.echo(f"headway: {escape(str(exc))}", err=True)  # It may quote a target's own error.
        codes = {SettingError: EXIT_SETTING, TargetError: EXIT_TARGET}
        return next((code for kind, code in codes.items() if isinstance(exc, kind)), EXIT_FAILED)

"""Runner of a role in this process: streams, log, event loop, exit code. The commands `serve`, `gateway`, … share it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from headway.app.roles import ROLES
from headway.cli.flags import with_settings
from headway.config import Settings
from headway.model import Role

targets_argument = click.argument(
    "targets",
    metavar="[NAME[@VERSION]=]TARGET",
    nargs=-1,
    help="module:attribute, path/file.py:attribute, or the URL of a remote batch API; of several models NAME=TARGET for "
    "each, or the NAME of a table [models.NAME] in the file; NAME@VERSION for versions of one model; left out: all of the file's.",
)


def with_settings_of(role: Role) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each setting of a role; see `with_settings`."""
    parts = ROLES[role]
    return with_settings(parts.settings) if parts.gateway else with_settings(parts.settings, port=0)


def run_targets(settings: Settings, role: Role, targets: Sequence[str] | None) -> None:
    """Run the models that targets name, or the file of settings, until a signal comes, and exit."""
    if not targets and not settings.models:
        raise click.BadParameter(
            "it is missing, and no file of settings has a table [models.NAME]", param_hint="TARGET"
        )
    alone = targets[0] if targets and len(targets) == 1 else ""
    named = settings.models and alone in {*settings.served, *settings.runs}
    run(settings, role, "" if named else alone)


def run(settings: Settings, role: Role, target: str = "") -> None:
    """Run until a signal comes, and exit."""
    import asyncio

    import uvloop

    from headway.app import runner, signals
    from headway.runtime import log

    # What was imported stays, and is not looked at again.
    gc.freeze()
    gc.enable()
    signals.ignore_until_ready()
    _open_missing_streams()
    with (
        log.running(settings.log_level, json=settings.log_json) as writer,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
    ):
        code = loop.run(runner.run(settings, role, target, writer.reopen))
    if writer.write_blocked or not _flushed():
        os._exit(code)
    raise click.exceptions.Exit(code)


def _flushed() -> bool:
    """Whether the last output was accepted.

    If not, Python's own end would exit with 120, whatever became of the service.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return False
    return True


def _open_missing_streams() -> None:
    """Open /dev/null in the place of standard streams that came closed. A socket would otherwise take their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115

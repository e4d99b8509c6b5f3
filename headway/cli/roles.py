"""`headway serve`, `gateway`, `worker` and `controller`: run a role in this process until it ends."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from headway.app.roles import ROLES
from headway.cli.commands import command
from headway.cli.flags import with_settings
from headway.config import Settings
from headway.model import Role

targets_argument = click.argument(
    "targets",
    metavar="[NAME[@VERSION]=]TARGET",
    nargs=-1,
    help="module:attribute, path/file.py:attribute, or the URL of a remote batch API; of several models NAME=TARGET for "
    "each, or the NAME of a table [models.NAME] in the file; NAME@VERSION for versions of one model; if left out: all of the file's.",
)


def with_settings_of(role: Role) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a flag for each setting of a role to a command."""
    parts = ROLES[role]
    return with_settings(parts.settings) if parts.gateway else with_settings(parts.settings, port=0)


def run_targets(settings: Settings, role: Role, targets: Sequence[str] | None) -> None:
    """Run the models that the targets or the settings file name. Exit when a signal comes."""
    if not targets and not settings.models:
        raise click.BadParameter("it is missing, and no settings file has a table [models.NAME]", param_hint="TARGET")
    alone = targets[0] if targets and len(targets) == 1 else ""
    named = settings.models and alone in {*settings.served, *settings.runs}
    run(settings, role, "" if named else alone)


def run(settings: Settings, role: Role, target: str = "") -> None:
    """Run a role. Exit when a signal comes."""
    import asyncio

    import uvloop

    from headway.app import runner, signals
    from headway.runtime import log

    # Modules imported by now stay, so the collector need not look at them again.
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
    """Return True if the last output was accepted. If it wasn't, Python would exit with 120, whatever became of the service."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return False
    return True


def _open_missing_streams() -> None:
    """Open /dev/null in place of closed standard streams. Otherwise a socket would get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest free number, which is this one.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115


@command()
@targets_argument
@with_settings_of(Role.SERVE)
def serve(settings: Settings, targets: Sequence[str]) -> None:
    """Serve TARGET: HTTP, queue and GPU workers in one process.

    TARGET is a function that takes a list of strings and returns as many, a class that is built once per
    worker and then called, or a remote API that takes a batch. It is loaded and tried before the port opens.

    NAME=TARGET for each of several models gives each workers and a queue of its own, and tables [models.NAME] of the file their
    settings. NAME@VERSION=TARGET is one of several versions of a model, drawn by --version-weights. Without TARGET all models of
    the file are served.

    With --broker the queue is in Redis or Valkey, shared with every other process that names the same one; see also
    headway gateway, headway worker and headway controller.

    Every flag is also an environment variable (--max-batch-size: HEADWAY_MAX_BATCH_SIZE) and a key of
    headway.toml (max_batch_size). A flag beats the environment, which beats the file.

    Exit codes: 0 stopped in good order, 1 the broker or the database of keys does not answer, 3 a bad setting, 4 the target
    cannot be loaded or breaks the rules.
    """
    run_targets(settings, Role.SERVE, targets)


@command()
@with_settings_of(Role.GATEWAY)
def gateway(settings: Settings) -> None:
    """Take requests over HTTP and put them into the queue that all processes share. Start as many as you like.

    A gateway has no TARGET: workers do. It serves all models that workers of the fleet report, as they come and go, keeps nothing
    on disk, and any balancer may stand before several of them. Ready (/readyz) means that it knows of a healthy worker.

    While the broker is away it asks --fallback itself, if there is one; otherwise requests get 503 at once.

    headway gateway --broker redis://127.0.0.1:6379/0 --fallback http://10.0.0.9:9100/batch

    On SIGTERM it takes no new connection, answers what it holds, leaves the fleet and exits.

    Every flag is also an environment variable (--broker: HEADWAY_BROKER) and a key of headway.toml (broker). A flag beats the
    environment, which beats the file. --max-batch-size, --tiers and --shards must be the same for all processes.

    Exit codes: 0 stopped in good order, 1 the broker or the database of keys does not answer, 3 a bad setting.
    """
    run(settings, Role.GATEWAY)


@command()
@targets_argument
@with_settings_of(Role.WORKER)
def worker(settings: Settings, targets: Sequence[str]) -> None:
    """Run TARGET on this machine's GPUs, one process each, for the gateways that share the broker. Start one a machine.

    TARGET is a function that takes a list of strings and returns as many, a class that is built once per GPU and then
    called, or a remote API that takes a batch. It is loaded and tried before the first batch is claimed. A worker opens
    no port for clients; its admin port has /readyz (one of its GPUs is healthy) and /metrics.

    headway worker model.py:Model --workers 8 --broker redis://10.0.0.1:6379/0

    NAME=TARGET for each of several models gives each workers of its own; see headway serve.

    On SIGTERM it claims no more, finishes the batches that run, leaves the fleet and exits: no request fails. One that is
    killed is missed within seconds, and what it ran is given to another.

    Every flag is also an environment variable (--broker: HEADWAY_BROKER) and a key of headway.toml (broker). A flag beats
    the environment, which beats the file. --max-batch-size, --tiers and --shards must be the same for all processes.

    Exit codes: 0 stopped in good order, 1 the broker does not answer, 3 a bad setting, 4 the target cannot be loaded or
    breaks the rules.
    """
    run_targets(settings, Role.WORKER, targets)


@command()
@with_settings_of(Role.CONTROLLER)
def controller(settings: Settings) -> None:
    """Look after the fleet: count its workers and tell all what they can carry. Start two; one leads.

    The leader measures, for each model, how many workers are healthy and what they do at most together,
    and publishes --target-utilisation of that. It takes back what dead workers held. When it goes, another leads within
    3 seconds; requests are served all the same while none does.

    headway controller --broker redis://127.0.0.1:6379/0

    Every flag is also an environment variable (--broker: HEADWAY_BROKER) and a key of headway.toml (broker). A flag beats
    the environment, which beats the file. --max-batch-size, --tiers and --shards must be the same for all processes.

    Exit codes: 0 stopped in good order, 1 the broker does not answer, 3 a bad setting.
    """
    run(settings, Role.CONTROLLER)

"""`headway serve`, `gateway`, `worker` and `controller`: run a role in this process until a signal ends it."""

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
    help="module:attribute, path/file.py:attribute, or the URL of a remote batch API. For several models: NAME=TARGET each, or the "
    "NAME of a table [models.NAME] in the file. For versions of a model: NAME@VERSION=TARGET each. Default: all models of the file.",
)


def with_settings_of(role: Role) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a flag for each setting of a role to a command."""
    parts = ROLES[role]
    return with_settings(parts.settings) if parts.gateway else with_settings(parts.settings, port=0)


def run_targets(settings: Settings, role: Role, targets: Sequence[str] | None) -> None:
    """Run the models that the command line or the settings file names, until a signal comes. Then exit."""
    if not targets and not settings.models:
        raise click.BadParameter("it is missing, and no settings file has a table [models.NAME]", param_hint="TARGET")
    single = targets[0] if targets and len(targets) == 1 else ""
    is_name = settings.models and single in {*settings.served, *settings.runs}
    run(settings, role, "" if is_name else single)


def run(settings: Settings, role: Role, target: str = "") -> None:
    """Run a role until a signal comes. Then exit."""
    import asyncio

    import uvloop

    from headway.app import runner
    from headway.runtime import log

    # Modules imported so far stay in memory, so the collector need not scan them again.
    gc.freeze()
    gc.enable()
    runner.ignore_until_ready()
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
    """Return True if the output could be written. If not, Python itself would exit with 120 instead of the service's code."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return False
    return True


def _open_missing_streams() -> None:
    """Open /dev/null in place of closed standard streams. Otherwise a socket would get one of their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # This gets the lowest free number, which is `number`.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115


@command()
@targets_argument
@with_settings_of(Role.SERVE)
def serve(settings: Settings, targets: Sequence[str]) -> None:
    """Serve TARGET: HTTP, queue and GPU workers in one process.

    TARGET is a function that takes a list of strings and returns one output for each, a class that each worker builds once and
    then calls, or a remote API that takes a batch. Headway loads it and runs a trial batch before the port opens.

    To serve several models, give NAME=TARGET for each. Each model has its own workers and queue, and its settings in a table
    [models.NAME] of the file. To serve several versions of a model, give NAME@VERSION=TARGET for each; --version-weights divides
    the requests between them. Without TARGET, Headway serves all models of the file.

    With --broker, the queue is in Redis or Valkey, and all processes with the same broker share it; see also
    headway gateway, headway worker and headway controller.

    Exit codes: 0 stopped by a signal, 1 the broker or the database of keys does not answer, 3 a bad setting, 4 the target
    cannot be loaded or breaks the rules.
    """
    run_targets(settings, Role.SERVE, targets)


@command()
@with_settings_of(Role.GATEWAY)
def gateway(settings: Settings) -> None:
    """Take requests over HTTP and put them into the queue that all processes share. Start as many gateways as you like.

    A gateway has no TARGET: workers do. It serves every model that a worker of the fleet reports, and stores nothing on disk. Any
    load balancer can distribute requests to several gateways. /readyz answers 200 once the gateway knows of a healthy worker.

    While the broker is unreachable, the gateway calls --fallback itself. Without a fallback, requests get 503 immediately.

    headway gateway --broker redis://127.0.0.1:6379/0 --fallback http://10.0.0.9:9100/batch

    On SIGTERM, the gateway accepts no new connection, answers the requests that it holds, leaves the fleet and exits.

    --max-batch-size, --tiers and --shards must be the same for all processes.

    Exit codes: 0 stopped by a signal, 1 the broker or the database of keys does not answer, 3 a bad setting.
    """
    run(settings, Role.GATEWAY)


@command()
@targets_argument
@with_settings_of(Role.WORKER)
def worker(settings: Settings, targets: Sequence[str]) -> None:
    """Run TARGET on this machine's GPUs, in one process per GPU, for all gateways with the same broker. Start one per machine.

    For TARGET, also for several models, see headway serve. Headway loads it and runs a trial batch before the worker claims its
    first batch. A worker opens no port for clients. On its admin port, /readyz answers 200 once one of its GPUs is healthy.

    headway worker model.py:Model --workers 8 --broker redis://10.0.0.1:6379/0

    On SIGTERM, the worker claims no more batches, finishes the running ones, leaves the fleet and exits. No request fails.
    If a worker is killed, the fleet notices within seconds, and other workers run its batches again.

    --max-batch-size, --tiers and --shards must be the same for all processes.

    Exit codes: 0 stopped by a signal, 1 the broker does not answer, 3 a bad setting, 4 the target cannot be loaded or breaks
    the rules.
    """
    run_targets(settings, Role.WORKER, targets)


@command()
@with_settings_of(Role.CONTROLLER)
def controller(settings: Settings) -> None:
    """Look after the fleet: count its workers and publish their capacity. Start two controllers; one of them leads.

    For each model, the leader counts the healthy workers, measures their capacity, and publishes --target-utilisation of it. It
    also returns the requests of dead workers to the queue. If the leader stops, another controller leads within 3 seconds.
    The fleet continues to serve requests even without a leader.

    headway controller --broker redis://127.0.0.1:6379/0

    --max-batch-size, --tiers and --shards must be the same for all processes.

    Exit codes: 0 stopped by a signal, 1 the broker does not answer, 3 a bad setting.
    """
    run(settings, Role.CONTROLLER)

"""`headway serve`: everything in one process."""

from __future__ import annotations

from collections.abc import Sequence

from headway.cli.commands import command
from headway.cli.role import run_targets, targets_argument, with_settings_of
from headway.config import Settings
from headway.model import Role


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

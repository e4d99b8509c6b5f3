"""`headway worker`: runs batches for gateways in other processes."""

from __future__ import annotations

from collections.abc import Sequence

from headway.cli.commands import command
from headway.cli.role import run_targets, targets_argument, with_settings_of
from headway.config import Settings
from headway.model import Role


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

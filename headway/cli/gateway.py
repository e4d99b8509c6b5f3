"""`headway gateway`: takes requests for workers in other processes."""

from __future__ import annotations

from headway.cli.commands import command
from headway.cli.role import run, with_settings_of
from headway.config import Settings
from headway.model import Role


@command()
@with_settings_of(Role.GATEWAY)
def gateway(settings: Settings) -> None:
    """Take requests over HTTP and put them into the queue that all processes share. Start as many as you like.

    A gateway has no TARGET: workers do. It serves all models that workers of the fleet report, as they come and go, keeps
    nothing on disk, and any balancer may stand before several of them. Ready (/readyz) means that it knows of a healthy
    worker.

    While the broker is away it asks --fallback itself, if there is one; otherwise requests get 503 at once.

    headway gateway --broker redis://127.0.0.1:6379/0 --fallback http://10.0.0.9:9100/batch

    On SIGTERM it takes no new connection, answers what it holds, leaves the fleet and exits.

    Every flag is also an environment variable (--broker: HEADWAY_BROKER) and a key of headway.toml (broker). A flag beats
    the environment, which beats the file. --max-batch-size, --tiers and --shards must be the same for all processes.

    Exit codes: 0 stopped in good order, 1 the broker or the database of keys does not answer, 3 a bad setting.
    """
    run(settings, Role.GATEWAY)

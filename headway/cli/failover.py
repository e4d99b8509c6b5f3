"""`headway failover`: promote a replica of the broker's Redis without losing an accepted request."""

from __future__ import annotations

import click

from headway.cli.commands import command, option
from headway.cli.flags import with_settings
from headway.config import Settings
from headway.errors import SettingError


@command()
@option("--within", default=10.0, metavar="SECONDS", help="Time limit for the catch-up and takeover of each primary.")  # fmt: skip
@option("--to", default="", metavar="HOST:PORT", help="Replica to promote, if the broker is one server. Default: the most current.")  # fmt: skip
@option("--only", default="", metavar="HOST",
    help="Replace only primaries on this host of a cluster. Default: all primaries.")  # fmt: skip
@with_settings(("broker",))
def failover(settings: Settings, within: float, to: str, only: str) -> None:
    """Promote a replica of the broker's Redis, for example to patch or restart the primary's host.

    The command checks that a replica is connected and in sync, pauses writes, waits until the replica has received all of them,
    promotes it (by REPLICAOF, SENTINEL FAILOVER or CLUSTER FAILOVER, as the URL requires), and checks the new primary. Requests
    wait for about a second; none is refused. If a check fails, the time limit passes or a signal comes before the promotion begins,
    the command resumes writes and changes nothing. Once the promotion has begun, the command completes it, unless a second
    signal comes. Writes are never paused longer than --within plus 5 seconds.

    The user in the URL needs the rights for INFO, CLIENT PAUSE, REPLICAOF and CLUSTER FAILOVER. Give an administrator, not the user
    of Headway's processes.

    Exit codes: 0 done, 1 refused or given up, 3 a bad setting.
    """
    import asyncio

    from headway.app.brokers import fail_over

    if not settings.broker:
        hint = "Set HEADWAY_BROKER or --broker to the URL of the servers, with an administrator as user."
        raise SettingError("broker", "", "must be given", hint)
    asyncio.run(fail_over(settings, within, click.echo, to, only))

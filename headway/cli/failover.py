"""`headway failover`: have a replica of the broker's Redis take over, without losing an accepted request."""

from __future__ import annotations

import click

from headway.cli.commands import command, option
from headway.cli.flags import with_settings
from headway.config import Settings
from headway.errors import SettingError


@command()
@option("--within", default=10.0, metavar="SECONDS", help="Most seconds for the catch-up and the takeover of each primary.")  # fmt: skip
@option("--to", default="", metavar="HOST:PORT", help="Replica that takes over, of one server; else the one that has most.")  # fmt: skip
@option("--only", default="", metavar="HOST", help="Host whose primaries hand over, of a cluster; else all do.")
@with_settings(("broker",))
def failover(settings: Settings, within: float, to: str, only: str) -> None:
    """Have a replica of the broker's Redis take over, to patch or restart the primary's host.

    Checks that a replica is connected and in sync, pauses the writes, waits until it has all that was written, has it take
    over (REPLICAOF, SENTINEL FAILOVER or CLUSTER FAILOVER, by the URL), and checks the new primary. Requests wait meanwhile,
    for a second or so, and none is refused. When a guard fails, the time is over, or a signal comes before the takeover is
    asked for, the pause is lifted and nothing has changed; afterwards the takeover is finished first, unless a second signal
    comes. Whatever happens, writes are paused for no longer than --within and 5 seconds.

    The user of the URL must be allowed INFO, CLIENT PAUSE, REPLICAOF and CLUSTER FAILOVER: an administrator, not that of the
    processes.

    Exit codes: 0 done, 1 refused or given up, 3 a setting is wrong.
    """
    import asyncio

    from headway.app.brokers import fail_over

    if not settings.broker:
        hint = "Set HEADWAY_BROKER, with an administrator of the servers in it, or --broker."
        raise SettingError("broker", "", "is needed: the URL of the servers", hint)
    asyncio.run(fail_over(settings, within, click.echo, to, only))

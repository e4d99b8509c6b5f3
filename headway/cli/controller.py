"""`headway controller`: tells the fleet what its workers can carry."""

from __future__ import annotations

from headway.cli.commands import command
from headway.cli.role import run, with_settings_of
from headway.config import Settings
from headway.model import Role


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

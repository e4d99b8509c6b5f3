"""Table of roles, with the parts of each. Nothing else in Headway asks for the role of a process.

Every process has an admin port, a place in the fleet and the loop that reaps, whatever its role.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headway.config import FIELDS
from headway.config.fields import RolePart
from headway.model import Role


class Parts(msgspec.Struct, frozen=True):
    """Parts of which a process of one role is made.

    Attributes:
        headline: first line of the banner, with places for `target`, `name` and `model`.
        gateway: whether it has a gateway and its public port, and a fallback if one is set.
        batchers: whether it has batchers, one for each slot, and so a TARGET.
        controller: whether it has a controller.
        alone: whether it can do without a broker in another process, as no other process has to see its queue.
    """

    headline: str
    gateway: bool = False
    batchers: bool = False
    controller: bool = False
    alone: bool = False

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings of such a process. Those of batches matter to a gateway's fallback, too."""
        has = {RolePart.GATEWAY: self.gateway, RolePart.BATCHERS: self.batchers, RolePart.CONTROLLER: self.controller}
        return tuple(name for name, one in FIELDS.items() if one.parts is None or any(has[part] for part in one.parts))

    @property
    def needs_workers(self) -> bool:
        """Whether such a process is ready only while a worker is healthy."""
        return self.gateway or self.batchers

    @property
    def needs_own_workers(self) -> bool:
        """Whether that worker has to be one of its own."""
        return self.batchers and not self.gateway


ROLES: Mapping[Role, Parts] = {
    Role.SERVE: Parts("Headway serves {target} as {model}", gateway=True, batchers=True, controller=True, alone=True),
    Role.GATEWAY: Parts("Headway gateway {name} takes requests for {model}", gateway=True),
    Role.WORKER: Parts("Headway worker {name} runs {target} as {model}", batchers=True),
    Role.CONTROLLER: Parts("Headway controller {name} looks after the workers of {model}", controller=True),
}
"""Each role and its parts. A new role is a member of `Role`, a row here, and a command in `headway/cli`."""

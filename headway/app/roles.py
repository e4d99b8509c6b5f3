"""Roles, and the parts of a process in each role. No other module depends on the role of a process. In any role, a process
has an admin port, joins the fleet, and runs the loop that reaps the broker."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headway.config import FIELDS
from headway.config.fields import RolePart
from headway.model import Role


class Parts(msgspec.Struct, frozen=True):
    """The parts of a process in one role. Batchers need a TARGET. If `alone`, the process works without a shared broker, because no
    other process needs its queue. `headline` is the first line of the banner."""

    headline: str
    gateway: bool = False
    batchers: bool = False
    controller: bool = False
    alone: bool = False

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings that apply to this role."""
        has = {RolePart.GATEWAY: self.gateway, RolePart.BATCHERS: self.batchers, RolePart.CONTROLLER: self.controller}
        return tuple(
            name for name, field in FIELDS.items() if field.parts is None or any(has[part] for part in field.parts)
        )

    @property
    def needs_workers(self) -> bool:
        """True if the process is ready only while a worker is healthy."""
        return self.gateway or self.batchers

    @property
    def needs_own_workers(self) -> bool:
        """True if the process is ready only while one of its own workers is healthy."""
        return self.batchers and not self.gateway


ROLES: Mapping[Role, Parts] = {  # A new role needs a member of `Role`, a row here, and a command in `headway/cli`.
    Role.SERVE: Parts("Headway serves {target} as {model}", gateway=True, batchers=True, controller=True, alone=True),
    Role.GATEWAY: Parts("Headway gateway {name} takes requests for {model}", gateway=True),
    Role.WORKER: Parts("Headway worker {name} runs {target} as {model}", batchers=True),
    Role.CONTROLLER: Parts("Headway controller {name} looks after the workers of {model}", controller=True),
}

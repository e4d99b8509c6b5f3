"""Table of roles, with the parts of each. Nothing else in Headway asks for the role of a process.

Every process has an admin port, a place in the fleet and the loop that reaps, whatever its role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.config import FIELDS
from headway.model import Role

_OF_CLIENTS = (
    "version_weights",
    "host",
    "port",
    "grpc_port",
    "grpc_max_age_s",
    "keys",
    "jwt",
    "max_queue",
    "queue_timeout_ms",
    "request_timeout_ms",
    "max_body_bytes",
    "max_header_bytes",
    "cors_origins",
    "max_connections",
    "header_timeout_ms",
    "body_timeout_ms",
    "keep_alive_ms",
    "lame_duck_ms",
    "fallback",
    "fallback_version",
    "fallback_concurrency",
    "access_log",
    "chat_template",
    "control_chars",
    "input_policy",
    "keys_retention_days",
    "max_bodies_mb",
    "max_caller_connections",
    "max_input_chars",
    "max_parameters",
    "tier_rates",
    "user_rate",
    "user_burst",
)
_OF_SLOTS = (
    "target_arguments",
    "workers",
    "devices",
    "reload",
    "recycle_rss_mb",
    "recycle_after_s",
    "arena_mb",
    "lease_ms",
)
_OF_BATCHES = (
    "model_version",
    "start_timeout_ms",
    "gpu_timeout_ms",
    "max_wait_ms",
    "policy",
    "reserved_share",
    "remote_format",
    "remote_model",
    "remote_rate",
    "remote_token",
    "remote_headers",
    "remote_headers_file",
    "remote_ca",
    "remote_cert",
    "remote_key",
)
_OF_CONTROL = (
    "target_utilisation",
    "scale_policy",
    "scale_rules",
    "scale_cooldown_s",
    "scale_start_s",
    "scale_target",
    "scale_slots",
)
_OF_NUMBER = ("autoscale", "min_workers", "max_workers")
_OF_REQUESTS = ("zone",)


@dataclass(frozen=True, slots=True)
class Parts:
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
        unused = (
            *(() if self.gateway else _OF_CLIENTS),
            *(() if self.batchers else _OF_SLOTS),
            *(() if self.gateway or self.batchers else _OF_BATCHES),
            *(() if self.controller else _OF_CONTROL),
            *(() if self.controller or self.batchers else _OF_NUMBER),
            *(() if self.gateway or self.batchers else _OF_REQUESTS),
        )
        return tuple(name for name in FIELDS if name not in unused)

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

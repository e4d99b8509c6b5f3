"""Names of the queues of a broker."""

from __future__ import annotations

import msgspec


class QueueName(msgspec.Struct, frozen=True, gc=False):
    """Name of a queue. As a text it is `MODEL@VERSION+ZONE`, without what it has not.

    Attributes:
        model: name of the model that answers what waits there.
        version: version of the model that answers; empty: any.
        zone: zone of the queue, inside the broker; empty: that of processes without one.
    """

    model: str
    version: str = ""
    zone: str = ""

    def in_zone(self, zone: str) -> QueueName:
        """Name of the queue for the same entries in another zone."""
        return self if self.zone == zone else QueueName(self.model, self.version, zone)

    def __str__(self) -> str:
        """Return the text for people and for digests."""
        version = f"@{self.version}" if self.version else ""
        return f"{self.model}{version}+{self.zone}" if self.zone else f"{self.model}{version}"

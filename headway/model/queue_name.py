"""Names of the queues of a broker."""

from __future__ import annotations

import msgspec


class QueueName(msgspec.Struct, frozen=True, gc=False):
    """Name of a queue. As a text it is `MODEL@VERSION`, or `MODEL` for any version.

    Attributes:
        model: name of the model that answers what waits there.
        version: version of the model that answers; empty: any.
    """

    model: str
    version: str = ""

    def __str__(self) -> str:
        """Return the text for people and for digests."""
        return f"{self.model}@{self.version}" if self.version else self.model

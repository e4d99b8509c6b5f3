"""Room in memory for waiting entries: a budget in bytes that tenants share.

A tenant may hold at most as many bytes as remain free. So one tenant alone gets half of the whole, and n that want all they can get
end up with one part of n + 1 each, which leaves one part for the next. This is the dynamic threshold of shared packet buffers
(Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM Transactions on Networking,
1998)."""

from __future__ import annotations

from headway.core.fair_queue import GONE, QueuedEntry
from headway.core.values import room
from headway.model import Entry

OVERHEAD = 1000  # Bytes that an entry takes besides its input and parameters.
SMALL = 2048  # Characters of input and parameters up to which an entry needs no reservation, as entries are few enough.

QUEUE_BYTES = 1 << 30  # Default limit in bytes on entries without an outcome.
ROOM_WAIT = 1.0  # Seconds that a client is told to wait for room.


def bytes_of(entry: Entry) -> int:
    """Return the bytes that an entry must reserve; 0 if none."""
    if len(entry.input) + len(entry.parameters) <= SMALL:
        return 0
    return _size(entry)


class Reservation:
    """Reserved bytes of an entry, freed when nothing refers to the reservation any more."""

    __slots__ = ("_room", "_size", "_tenant")

    def __init__(self, room: Room, tenant: str, size: int) -> None:
        self._room, self._tenant, self._size = room, tenant, size

    def give_to(self, queued: QueuedEntry) -> None:
        """Let an admitted entry hold the reservation, unless it has its outcome already."""
        if queued.state != GONE:
            queued.reservation = self

    def __del__(self) -> None:
        self._room.give_back(self._tenant, self._size)


class Room:
    """Bytes that entries take, in all and by tenant, up to `most`."""

    def __init__(self, most: int) -> None:
        self.free = most
        self._used: dict[str, int] = {}

    @property
    def in_use(self) -> bool:
        return bool(self._used)

    def take(self, entry: Entry) -> Reservation | None:
        """Reserve bytes for an entry larger than SMALL; None if its tenant would hold more than is free."""
        tenant, size = entry.tenant, _size(entry)
        used = self._used.get(tenant, 0) + size
        if used > self.free:
            return None
        self._used[tenant] = used
        self.free -= size
        return Reservation(self, tenant, size)

    def give_back(self, tenant: str, size: int) -> None:
        self.free += size
        left = self._used[tenant] - size
        if left:
            self._used[tenant] = left
        else:
            del self._used[tenant]


def _size(entry: Entry) -> int:
    return OVERHEAD + room(entry.input) + len(entry.parameters)

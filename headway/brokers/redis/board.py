"""The departure board of a fleet, in the server: two bounded streams."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from headway.brokers.redis import wire
from headway.brokers.redis.connection import OutOfMemory, RedisConnection
from headway.core.departure_board import coarse
from headway.model.board import Notice, Posted

PAGE = 1000
"""Most notices that are read in one call."""


class RedisBoard:
    """Board in Redis. See `headway.ports.Board`.

    Arguments:
        connection: connection to the server.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._key = f"{connection.prefix}:{{fleet}}:"

    async def post(self, notice: Notice) -> Posted:
        """See Board. A server without memory gets no notices, so that they take none from requests."""
        connection, kept = self._connection, coarse(notice)
        whole = b"" if notice.empty else wire.encode(notice)
        part = b"" if kept is None else wire.encode(kept)
        try:
            watched, records = await connection.call(
                "post", self._key, connection.clock_text(), notice.process, whole, part
            )
        except OutOfMemory:
            return Posted(watched=False, records=False)
        return Posted(watched=bool(watched), records=bool(records))

    async def history(self) -> Sequence[Notice]:
        """See Board."""
        return (await self._all("history", b"-"))[0]

    async def read(self, after: str) -> tuple[Sequence[Notice], str]:
        """See Board."""
        await self._connection.call("watch", self._key, self._connection.clock_text())
        if not after:
            return await self._all("board", b"-")
        found = await self._connection.stream(f"{self._key}board", after.encode())
        return _read(found), found[-1][0].decode() if found else after

    async def _all(self, name: str, start: bytes) -> tuple[list[Notice], str]:
        """All notices of a stream, and the id of the last one."""
        notices: list[Notice] = []
        last = b"0-0"
        while True:
            found = await self._connection.entries(f"{self._key}{name}", start, PAGE)
            notices += _read(found)
            if found:
                last = found[-1][0]
            if len(found) < PAGE:
                return notices, last.decode()
            start = b"(" + last


def _read(found: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[Notice]:
    """Notices of stream entries; those that a later release has written in another way are left out."""
    return wire.readable(_stamped, [fields[b"t"] + b"\0" + fields[b"n"] for _, fields in found])


def _stamped(packed: bytes) -> Notice:
    at, _, notice = packed.partition(b"\0")
    return replace(wire.read_notice(notice), at=float(at))

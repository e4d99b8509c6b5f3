"""The fleet's departure board in the server: a stream of notices with limited size, and a row for each step of the history.
The server sums the counts of all processes, so the history doesn't grow with the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from headway.brokers.redis import wire
from headway.brokers.redis.connection import OutOfMemory, RedisConnection
from headway.core.departure_board import add_to, counts
from headway.model.board import FleetFigures, HistoryRow, News, Notice, Posted
from headway.ports import Board

PAGE = 1000  # Maximum number of notices read in one call.
DECISION = b"s:"  # Prefix of the fields of a row that contain the autoscaler's decisions.
ROWS = 150  # Maximum number of rows read in one call, because a call blocks the server.


class RedisBoard(Board):
    """Board in Redis. See `headway.ports.Board`."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._key = f"{connection.prefix}:{{fleet}}:"
        self._born = b""

    async def post(self, notice: Notice) -> Posted:
        """See Board. Nothing is posted while the server is short of memory, because requests need the memory that is left."""
        connection = self._connection
        whole = b"" if notice.empty else wire.encode(notice)
        try:
            # A joined call would be made even if memory is short.
            post = connection.call if not notice.empty and connection.memory.pressure else connection.join
            watched, records, born = await post(
                "post", self._key, connection.clock_text(), notice.process, whole, self._born, *_fields(notice)
            )
        except OutOfMemory:
            return Posted(watched=False, records=False)
        self._born = born[1:]
        return Posted(watched=bool(watched), records=bool(records))

    async def history(self) -> tuple[Sequence[HistoryRow], News]:
        connection = self._connection
        lost_at = await self._watch()
        rows: list[HistoryRow] = []
        step = b""
        while True:
            flat, step, last = await connection.call("history", self._key, connection.clock_text(), step, ROWS)
            rows += [_row(number, fields) for number, fields in zip(flat[::2], flat[1::2], strict=True)]
            if not step:
                return rows, News(await self._up_to(last), last.decode(), lost_at)

    async def read(self, after: str) -> News:
        lost_at = await self._watch()
        entries = await self._connection.reads.stream(f"{self._key}board", after.encode())
        return News(_read(entries), entries[-1][0].decode() if entries else after, lost_at)

    async def _watch(self) -> float:
        """Return when the current board began if the broker has lost an earlier one, otherwise 0."""
        born: bytes = await self._connection.call("watch", self._key, self._connection.clock_text())
        return float(born[1:]) if born[:1] == b"1" else 0.0

    async def _up_to(self, last: bytes) -> list[Notice]:
        notices: list[Notice] = []
        start = b"-"
        while True:
            entries = await self._connection.entries(f"{self._key}board", start, PAGE, last)
            notices += _read(entries)
            if len(entries) < PAGE:
                return notices
            start = b"(" + entries[-1][0]


def _fields(notice: Notice) -> list[Any]:
    """Return the arguments for a notice's row: the number of arguments for counts, the counts, and the fleet's numbers, if any."""
    if not counts(notice):
        return []
    row = HistoryRow(0)
    add_to(row, notice)
    named = [("e", row.ended), ("a", row.answered), ("r", row.refused), ("f", row.failed), *row.latencies.items()]
    counted = [part for name, count in named if count for part in (name, count)]
    figures: list[Any] = []
    if (fleet := row.fleet) is not None:
        figures = [
            "w", ",".join(map(str, fleet.waiting)), "o", ",".join(map(str, fleet.oldest)), "c", fleet.capacity,
            "u", fleet.usable, "h", fleet.healthy, "n", fleet.workers,
        ]  # fmt: skip
    for change in row.scalings:  # Each has a separate field, because several processes may decide in one step.
        figures += [DECISION + wire.encode(change), ""]
    return [len(counted), *counted, *figures]


def _row(step: bytes, flat: Sequence[bytes]) -> HistoryRow:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    figures = None
    if b"w" in fields:
        figures = FleetFigures(
            tuple(int(number) for number in fields[b"w"].split(b",")), tuple(float(number) for number in fields[b"o"].split(b",")),
            float(fields[b"c"]), float(fields[b"u"]), int(fields[b"h"]), int(fields[b"n"]),
        )  # fmt: skip
    ended, answered, refused, failed = (int(fields.get(name, 0)) for name in (b"e", b"a", b"r", b"f"))
    latencies = {int(name): int(count) for name, count in fields.items() if name.isdigit()}
    decisions = [name[len(DECISION) :] for name in fields if name.startswith(DECISION)]
    scalings = wire.readable(wire.read_scaling_change, decisions)
    return HistoryRow(int(step), ended, answered, refused, failed, latencies, figures, list(scalings))


def _read(entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[Notice]:
    return wire.readable(_stamped, [fields[b"t"] + b"\0" + fields[b"n"] for _, fields in entries])


def _stamped(packed: bytes) -> Notice:
    at, _, notice = packed.partition(b"\0")
    return replace(wire.read_notice(notice), at=float(at))

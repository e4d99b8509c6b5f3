"""Lines of bulk files: how they are read, interpreted, and queued in fair turns until they run."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from headway.bulk.folder import BulkFolder
from headway.core import failures, values
from headway.core.json_pages import Steps
from headway.gateway.client_quotas import too_large
from headway.model import Failure, Reply
from headway.model.bulk import BulkJob, BulkLine

AT_ONCE = 1 << 16  # Bytes of a record to write before yielding to the event loop.

Making = Iterator[tuple[bool, bytes] | None]  # Yields None every AT_ONCE bytes, then `(succeeded, JSON record)`.

_BOM = b"\xef\xbb\xbf"  # Byte order mark, which some editors write at the start of UTF-8 files.
_Jobs = OrderedDict[str, deque[BulkLine]]


class LineSplitter:
    """Splits pieces of text into lines. A line longer than `most` bytes is cut after `most` + 1 bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tail: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that this piece completes, without line breaks."""
        *lines, tail = piece.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._tail, lines[0]))
            self._tail, self._size = [], 0
        if tail and self._size <= self._most:
            self._tail.append(tail)
            self._size += len(tail)
        return [line[: self._most + 1] for line in lines]

    def end(self) -> bytes:
        """Return the text after the last line break."""
        return b"".join(self._tail)[: self._most + 1]


async def pages(folder: BulkFolder, name: str, most: int) -> AsyncGenerator[list[tuple[int, bytes]], None]:
    """Yield pages of the non-blank lines of a file with their numbers, counted from 1. Raises FolderUnavailable."""
    splitter, number, mark = LineSplitter(most), 0, _BOM
    async with aclosing(folder.pieces(name)) as pieces:
        async for piece in pieces:
            lines, mark = splitter.feed(piece.removeprefix(mark)), b""
            yield [(at, line) for at, line in enumerate(lines, number + 1) if line and not line.isspace()]
            number += len(lines)
    last = splitter.end()
    if last and not last.isspace():
        yield [(number + 1, last)]


class LineSet:
    """Set of numbers from 0 up, stored as a bitmap."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and bool(self._bits[place] & (1 << (number & 7)))

    def add(self, number: int) -> bool:
        """Add a number. Return False if it was already in the set."""
        place, bit = number >> 3, 1 << (number & 7)
        if place >= len(self._bits):
            self._bits += bytes(place - len(self._bits) + 1 + len(self._bits) // 8)
        if self._bits[place] & bit:
            return False
        self._bits[place] |= bit
        return True


class NotYet(Exception):
    """A line can't be checked yet. The message says why."""


class AskedLine(msgspec.Struct):
    """A valid line of `size` bytes. Each of its parts requests one output. `record` writes the line's record from the
    replies to all parts in order, or from the line's failure. If there are several parts, their outputs may have `most`
    bytes in total; so far they have `held` bytes."""

    parts: Sequence[BulkLine]
    size: int
    record: Callable[[Sequence[Reply] | Failure], Making]
    most: int = 0
    held: int = 0
    failure: Failure | None = None
    _replies: dict[int, Reply] = {}

    def take(self, part: int, reply: Reply) -> Making | None:
        """Handle the reply to a part. Return the iterator that writes the record, or None if more replies are needed."""
        count = len(self.parts)
        if self.failure is not None:
            return None
        if reply.output is None:
            self.failure = failures.of_input(part, count, failures.failure_of(reply))
        elif count > 1:
            self.held += values.room(reply.output)
            if self.held > self.most:
                self.failure = too_large(self.most)
        if self.failure is not None:
            self._replies = {}
            return self.record(self.failure)
        self._replies[part] = reply
        if len(self._replies) < count:
            return None
        replies, self._replies = self._replies, {}
        return self.record([replies[at] for at in range(count)])


class LineForm(Protocol):
    """Reads lines and writes error records in the format of one API."""

    def read(self, job: BulkJob, number: int, text: bytes) -> Steps[AskedLine | bytes]:
        """Read a line in small steps. Return the JSON record of an error if the line is invalid. Raises NotYet."""

    def expired(self, number: int, text: bytes) -> bytes:
        """Return the JSON record for a line that didn't run before its job expired."""


class Turns:
    """Lines that are ready to run. Tenants take turns, and so do the jobs of each tenant."""

    def __init__(self) -> None:
        self._models: dict[str, OrderedDict[str, _Jobs]] = {}

    def __contains__(self, model: str) -> bool:
        return model in self._models

    def add(self, lines: Iterable[BulkLine]) -> None:
        """Add lines. A job's lines run in the order in which they were added."""
        for line in lines:
            tenants = self._models.setdefault(line.model, OrderedDict())
            tenants.setdefault(line.tenant, OrderedDict()).setdefault(line.job, deque()).append(line)

    def take(self, model: str, rests: Callable[[str], object]) -> BulkLine | None:
        """Remove and return the next line for a model. Skip tenants for which `rests` is true. None if no line is left."""
        tenants = self._models.get(model, OrderedDict())
        tenant = next((name for name in tenants if not rests(name)), None)
        if tenant is None:
            return None
        jobs = tenants[tenant]
        job, lines = next(iter(jobs.items()))
        line = lines.popleft()
        jobs.move_to_end(job)
        tenants.move_to_end(tenant)
        if not lines:
            del jobs[job]
        if not jobs:
            del tenants[tenant]
        if not tenants:
            del self._models[model]
        return line

    def drop(self, tenant: str, job: str) -> None:
        for model, tenants in [*self._models.items()]:
            jobs = tenants.get(tenant)
            if jobs is None or jobs.pop(job, None) is None:
                continue
            if not jobs:
                del tenants[tenant]
            if not tenants:
                del self._models[model]

"""Log of the answers of one job: its answers and errors as they come, so that who holds the job next goes on where they end.

Each holder has two files of its own, `out.GENERATION.part` and `err.GENERATION.part` (in a bucket more, by number), with a record a line: the number of
the line that it answers, and what stands in the file in the end. So two that take themselves for the holder never write to
one file. The last record of a holder that was killed may be torn, and is no record. A line may have records of two holders;
then the first one that is found counts, answers before errors.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from headway.bulk.folder import BulkFolder, PartLog
from headway.bulk.line_reader import LineSet, LineSplitter

OUT, ERR = "out", "err"
"""Kinds of records: answers, and errors."""

_PART = re.compile(r"(out|err)\.([0-9]+)(?:\.([0-9]+))?\.part")
_RECORD = re.compile(rb"([0-9]+) (\{.*\})", re.DOTALL)
_MOST = 1 << 40
MOST_WAITING, MOST_WAITING_BYTES = 8_192, 64 << 20
"""Records that wait to be written, and their bytes, beyond which a log is full."""
TOGETHER = 64
"""Records that are written at once."""

Record = tuple[str, int, bytes]
"""Kind, number of the line, and the JSON that stands in the file in the end."""


class AnswerLog:
    """Log of the answers of a job, as one of its holders writes it.

    Arguments:
        folder: folder of bulk jobs.
        job: id of the job.
        generation: generation of the holder.

    Attributes:
        answered: lines that have a record.
        counts: numbers of records by kind.
    """

    def __init__(self, folder: BulkFolder, job: str, generation: int) -> None:
        self._folder, self._job, self._generation = folder, job, generation
        self._logs: dict[str, PartLog] = {}
        self._waiting: dict[str, list[tuple[int, bytes]]] = {OUT: [], ERR: []}
        """Records that are not written, with the numbers of their lines."""
        self._bytes = 0
        """Bytes of the records that are not written."""
        self.answered = LineSet()
        self.counts = {OUT: 0, ERR: 0}

    @property
    def dirty(self) -> bool:
        """Whether there are records that are not written."""
        return any(self._waiting.values())

    @property
    def waiting(self) -> int:
        """Records that are not written."""
        return sum(map(len, self._waiting.values()))

    @property
    def full(self) -> bool:
        """Whether so many records wait that no line should be read before they are written."""
        return self.waiting >= MOST_WAITING or self._bytes >= MOST_WAITING_BYTES

    async def recover(self) -> None:
        """Read which lines have a record. Raises FolderUnavailable."""
        await self._folder.do(lambda: self._folder.begin_log(self._job))
        async with aclosing(self.records()) as found:
            async for page in found:
                for kind, number, _ in page:
                    self.answered.add(number)
                    self.counts[kind] += 1

    def add(self, kind: str, number: int, record: bytes) -> None:
        """Add a record of a line that has none."""
        if self.answered.add(number):
            self._waiting[kind].append((number, record))
            self._bytes += len(record)
            self.counts[kind] += 1

    async def flush(self) -> None:
        """Write what has been added, so that it survives a loss of power.

        Raises:
            FolderUnavailable: the disk did not take it; it waits for the next call.
        """
        for kind, waiting in self._waiting.items():
            if records := [*waiting]:
                await self._folder.do(partial(self._put, kind, records))
                del waiting[: len(records)]
                self._bytes -= sum(len(record) for _, record in records)

    def close(self) -> None:
        """Close the files. What has not been written is let go."""
        for log in self._logs.values():
            log.close()

    async def records(self) -> AsyncGenerator[list[Record], None]:
        """Records in the files of all holders, one a line, some at a time. Raises FolderUnavailable."""
        seen = LineSet()
        for kind, path in await self._folder.do(self._parts):
            splitter = LineSplitter(_MOST)
            async with aclosing(self._folder.pieces(path)) as pieces:
                async for piece in pieces:
                    found = (_RECORD.fullmatch(line) for line in splitter.feed(piece) if b"\0" not in line)
                    records = [(kind, int(one[1]), one[2]) for one in found if one is not None]
                    yield [one for one in records if seen.add(one[1])]

    def _parts(self) -> list[tuple[str, str]]:
        names = [one for name in self._folder.parts(self._job) if (one := _PART.fullmatch(name))]
        names.sort(key=lambda one: (one[1] != OUT, int(one[2]), int(one[3] or 0)))
        return [(one[1], self._folder.part(self._job, one[0])) for one in names]

    def _put(self, kind: str, records: Sequence[tuple[int, bytes]]) -> None:
        log = self._logs.get(kind)
        if log is None:
            log = self._logs[kind] = self._folder.log(self._job, f"{kind}.{self._generation}")
        together = range(0, len(records), TOGETHER)
        log.append(b"".join([b"%d %b\n" % one for one in records[at : at + TOGETHER]]) for at in together)

"""Log of a job's answers and errors as they come, from which the job's next holder continues.

Each holder writes its own two files, `out.GENERATION.part` and `err.GENERATION.part` (in a bucket several, numbered), so two
processes that both believe they hold the job never write to the same file. A record is one line: the number of the input
line, and the JSON for the final file. A torn last record of a killed holder doesn't count. If two holders answered a line,
the record that is read first counts. Answers are read before errors.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from headway.bulk.folder import BulkFolder, PartLog
from headway.bulk.lines import LineSet, LineSplitter

OUT, ERR = "out", "err"
"""Kinds of records: answers, and errors."""

_PART = re.compile(r"(out|err)\.([0-9]+)(?:\.([0-9]+))?\.part")
_RECORD = re.compile(rb"([0-9]+) (\{.*\})", re.DOTALL)
_MOST = 1 << 40
MOST_WAITING, MOST_WAITING_BYTES = 8_192, 64 << 20
"""Bounds on unwritten records and their bytes, beyond which a log is full."""
TOGETHER = 64
"""Records to write at once."""

Record = tuple[str, int, bytes]
"""Kind, number of the input line, and JSON for the final file."""


class AnswerLog:
    """Log of a job, as the holder of a generation writes it. The lines in `answered` have a record."""

    def __init__(self, folder: BulkFolder, job: str, generation: int) -> None:
        self._folder, self._job, self._generation = folder, job, generation
        self._logs: dict[str, PartLog] = {}
        self._waiting: dict[str, list[tuple[int, bytes]]] = {OUT: [], ERR: []}
        """Unwritten records with their line numbers."""
        self._bytes = 0
        self.answered = LineSet()
        self.counts = {OUT: 0, ERR: 0}

    @property
    def dirty(self) -> bool:
        return any(self._waiting.values())

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def full(self) -> bool:
        """True if no further lines should be read, because too many records are unwritten."""
        return self.waiting >= MOST_WAITING or self._bytes >= MOST_WAITING_BYTES

    async def recover(self) -> None:
        """Find out which lines already have a record. Raises FolderUnavailable."""
        await self._folder.do(lambda: self._folder.begin_log(self._job))
        async with aclosing(self.records()) as pages:
            async for page in pages:
                for kind, number, _ in page:
                    self.answered.add(number)
                    self.counts[kind] += 1

    def add(self, kind: str, number: int, record: bytes) -> None:
        """Add a record, unless its line already has one."""
        if self.answered.add(number):
            self._waiting[kind].append((number, record))
            self._bytes += len(record)
            self.counts[kind] += 1

    async def flush(self) -> None:
        """Write the added records durably. If this raises FolderUnavailable, the next call writes them."""
        for kind, waiting in self._waiting.items():
            if records := [*waiting]:
                await self._folder.do(partial(self._put, kind, records))
                del waiting[: len(records)]
                self._bytes -= sum(len(record) for _, record in records)

    def close(self) -> None:
        """Close the files and drop unwritten records."""
        for log in self._logs.values():
            log.close()

    async def records(self) -> AsyncGenerator[list[Record], None]:
        """Yield the records of all holders in pages, one per line. Raises FolderUnavailable."""
        seen = LineSet()
        for kind, path in await self._folder.do(self._parts):
            splitter = LineSplitter(_MOST)
            async with aclosing(self._folder.pieces(path)) as pieces:
                async for piece in pieces:
                    matches = (_RECORD.fullmatch(line) for line in splitter.feed(piece) if b"\0" not in line)
                    records = [(kind, int(match[1]), match[2]) for match in matches if match is not None]
                    yield [record for record in records if seen.add(record[1])]

    def _parts(self) -> list[tuple[str, str]]:
        names = [match for name in self._folder.parts(self._job) if (match := _PART.fullmatch(name))]
        names.sort(key=lambda match: (match[1] != OUT, int(match[2]), int(match[3] or 0)))
        return [(match[1], self._folder.part(self._job, match[0])) for match in names]

    def _put(self, kind: str, records: Sequence[tuple[int, bytes]]) -> None:
        log = self._logs.get(kind)
        if log is None:
            log = self._logs[kind] = self._folder.log(self._job, f"{kind}.{self._generation}")
        together = range(0, len(records), TOGETHER)
        log.append(b"".join([b"%d %b\n" % record for record in records[at : at + TOGETHER]]) for at in together)

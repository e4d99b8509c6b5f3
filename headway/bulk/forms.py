"""Form of an API's lines: what the feeder of jobs asks of the API whose bodies they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from headway.core import failures, values
from headway.core.json_pages import Steps
from headway.gateway.client_quotas import too_large
from headway.model import Failure, Reply
from headway.model.bulk import BulkJob, BulkLine

AT_ONCE = 1 << 16
"""Bytes of a record that are made in one turn of the event loop."""

Making = Iterator[tuple[bool, bytes] | None]
"""Record of a line as it is made: None after each AT_ONCE bytes, then whether the line has an answer, and the record in JSON."""


class NotYet(Exception):
    """Error of a line of which nobody can tell yet whether it can run; its text says why."""


class AskedLine(msgspec.Struct):
    """A line that asks for an output, or for one of each of its parts.

    Attributes:
        parts: what runs.
        size: its bytes in the file.
        record: makes its record from the replies to all parts in order, each with an output, or from its failure.
        most: most bytes that the outputs of several parts may have together.
        held: bytes of the outputs that have come.
        failure: why the line has none.
    """

    parts: Sequence[BulkLine]
    size: int
    record: Callable[[Sequence[Reply] | Failure], Making]
    most: int = 0
    held: int = 0
    failure: Failure | None = None
    _replies: dict[int, Reply] = {}

    def take(self, part: int, reply: Reply) -> Making | None:
        """Take the reply to a part. Returns the making of the line's record, once nothing more is to come."""
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
    """Reader and writer of lines."""

    def read(self, job: BulkJob, number: int, text: bytes) -> Steps[AskedLine | bytes]:
        """Read a line, a little at a time; the record of its error, in JSON, where it is not one that can run. Raises NotYet."""
        ...

    def expired(self, number: int, text: bytes) -> bytes:
        """Record, in JSON, of the error of a line that was not run in time."""
        ...

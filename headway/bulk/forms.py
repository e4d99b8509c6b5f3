"""Form of lines: what the feeder of jobs needs from the API whose request bodies they are. The API implements it."""

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
"""Bytes of a record made in one turn of the event loop."""

Making = Iterator[tuple[bool, bytes] | None]
"""A record in the making: None after each AT_ONCE bytes, then whether the line succeeded, and the record in JSON."""


class NotYet(Exception):
    """Error of a line that can't be judged yet; its text says why."""


class AskedLine(msgspec.Struct):
    """A line that asks for an output, or for one for each of its parts.

    Attributes:
        parts: the inputs that run.
        size: its bytes in the file.
        record: makes its record from the replies to all parts in order, or from its failure.
        most: limit in bytes on the outputs of several parts together.
        held: bytes of the outputs so far.
        failure: why the line failed, if it did.
    """

    parts: Sequence[BulkLine]
    size: int
    record: Callable[[Sequence[Reply] | Failure], Making]
    most: int = 0
    held: int = 0
    failure: Failure | None = None
    _replies: dict[int, Reply] = {}

    def take(self, part: int, reply: Reply) -> Making | None:
        """Take the reply to a part. Returns the line's record in the making once no reply is missing, else None."""
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
        """Read a line, a little at a time. Returns the record of its error, in JSON, if it can't run. Raises NotYet."""
        ...

    def expired(self, number: int, text: bytes) -> bytes:
        """Return the error record, in JSON, of a line that didn't run in time."""
        ...

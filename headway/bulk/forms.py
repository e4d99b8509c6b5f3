"""Form of an API's lines: what the feeder of jobs asks of the API whose bodies they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from headway.model import Reply
from headway.model.bulk import BulkJob, BulkLine


class NotYet(Exception):
    """Error of a line of which nobody can tell yet whether it can run; its text says why."""


class AskedLine(msgspec.Struct):
    """A line that asks for an output.

    Attributes:
        line: what runs.
        size: its bytes in the file.
        record: from the reply, whether it is an answer, and the record of it in JSON.
    """

    line: BulkLine
    size: int
    record: Callable[[Reply], tuple[bool, bytes]]


class LineForm(Protocol):
    """Reader and writer of lines."""

    def read(self, job: BulkJob, number: int, text: bytes) -> AskedLine | bytes:
        """Read a line; the record of its error, in JSON, where it is not one that can run. Raises NotYet."""
        ...

    def expired(self, number: int, text: bytes) -> bytes:
        """Record, in JSON, of the error of a line that was not run in time."""
        ...

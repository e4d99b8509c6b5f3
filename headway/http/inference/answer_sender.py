"""Sender of a large answer: makes it and sends it, in turns of the event loop that it shares with large bodies.

    make ──▶ make ──▶ … ──▶ the header ──▶ send ──▶ send ──▶ … ──▶ the connection goes on
                                            └── the client takes nothing: when it has taken all that was sent ──▶ send

Between two turns the loop is left to everything else for as long as the one before took, and other tenants have theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.errors import RequestError
from headway.http.inference.codecs import no_text
from headway.http.inference.inference_head import HEAD
from headway.http.server.connection import WRITING
from headway.http.server.large_answers import LargeAnswer

if TYPE_CHECKING:
    from headway.http.inference.fast_path import FastPathConnection


class AnswerSender:
    """Sender of one answer.

    Arguments:
        connection: connection that it goes over, which forgets its sender when its request has ended.
        answer: the answer.
        kind: lines of its header that say what it is.
        marks: further lines, which the header of its failure has, too.

    Attributes:
        since: monotonic instant at which the client first left some of it, in seconds; 0.0: it has not.
        total: bytes of its body.
    """

    __slots__ = ("_answer", "_connection", "_kind", "_marks", "since", "total")

    def __init__(self, connection: FastPathConnection, answer: LargeAnswer, kind: bytes, marks: bytes) -> None:
        self._connection, self._answer, self._kind, self._marks = connection, answer, kind, marks
        self.since, self.total = 0.0, 0

    @property
    def left(self) -> int:
        """Bytes that are made, and not sent."""
        return self._answer.length

    def make_later(self) -> None:
        """Make some of the answer in a later turn of the loop."""
        self._connection.inference.large_bodies.wait(self._connection.owner or "", self._make)

    def send_later(self) -> None:
        """Send some of the answer in a later turn of the loop, unless the client leaves what was sent."""
        if self._connection.phase == WRITING and not self._connection.unread.since:
            self._connection.inference.large_bodies.wait(self._connection.owner or "", self._send)

    def _make(self) -> None:
        connection, answer = self._connection, self._answer
        if connection.sender is not self:
            return
        try:
            if not answer.make():
                self.make_later()
                return
            fields = self._marks + self._kind
            ending, opening = connection.ending_of(connection.codec), connection.inference.bare_opening
            head = HEAD % (opening, connection.id.encode(), ending, fields, answer.length)
        except UnicodeEncodeError:
            connection.write_error(no_text(), self._marks)
        except RequestError as exc:
            connection.write_error(exc)
        except Exception as exc:
            connection.fault(exc)
            return
        else:
            connection.phase, self.total = WRITING, answer.length
            connection.transport.write(head)
            self.send_later()
            return
        connection.rest_from()

    def _send(self) -> None:
        connection, answer = self._connection, self._answer
        if connection.sender is not self or connection.phase != WRITING or connection.unread.since:
            return
        connection.transport.write(answer.take())
        if answer.length:
            self.send_later()
        else:
            connection.rest_from()

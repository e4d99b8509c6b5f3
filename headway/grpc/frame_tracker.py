"""Tracker of HTTP/2 frames as they pass: where one ends, and which streams are open."""

from __future__ import annotations

FRAME_HEADER = 9
"""Bytes of a frame of HTTP/2 before its payload; the first three are the payload's length."""

PREFACE = 24
"""Bytes that a client sends before its first frame."""

PING = bytes.fromhex("000008 06 00 00000000") + b"headway."
"""PING frame of the relay. A client that has answered it has read all that was sent before."""

_DATA, _HEADERS, _RESET, _PING = 0, 1, 3, 6
"""Types of frames."""
_PONG = PING[:4] + b"\1" + PING[5:]
"""Answer to the PING."""
_NOTED = frozenset((_HEADERS, _RESET))
_END = 1
"""Flag of the last frame that one side sends on a stream."""


class FrameTracker:
    """Place in one direction of a connection, as its bytes pass in pieces, and the streams that are open.

    Arguments:
        streams: numbers of the open streams, which both directions of a connection share.
        begins: whether it is the direction in which streams begin: from the client.

    Attributes:
        whole: whether at least one frame has passed, and the last one as a whole.
        last: number of the last stream that has begun.
        answered: whether the answer to the relay's PING has passed.
    """

    __slots__ = ("_begins", "_left", "_part", "_streams", "answered", "last", "whole")

    def __init__(self, streams: set[int], begins: bool) -> None:
        self._streams = streams
        self._begins = begins
        self.last = 0
        self._left = PREFACE if begins else 0
        self._part = b""
        self.whole = self.answered = False

    def pass_on(self, data: bytes) -> None:
        """Note the next bytes."""
        at = self._left
        if self._part:
            data = self._part + data
            self._part = b""
        length = len(data)
        while at + FRAME_HEADER <= length:
            kind = data[at + 3]
            if kind in _NOTED or (kind == _DATA and data[at + 4] & _END):
                self._note(kind, data[at + 4] & _END, int.from_bytes(data[at + 5 : at + 9], "big"))
            elif kind == _PING:
                if at + len(_PONG) > length:
                    break  # Its payload tells whose it is.
                self.answered = self.answered or data.startswith(_PONG, at)
            at += FRAME_HEADER + (data[at] << 16 | data[at + 1] << 8 | data[at + 2])
        if at < length:
            self._part = data[at:]
            self._left = 0
            self.whole = False
        else:
            self._left = at - length
            self.whole = at == length

    def _note(self, kind: int, end: int, stream: int) -> None:
        if kind == _RESET:
            self._streams.discard(stream)
        elif not self._begins:
            if end:
                self._streams.discard(stream)
        elif kind == _HEADERS and stream > self.last:
            self.last = stream
            self._streams.add(stream)

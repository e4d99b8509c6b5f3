"""Events of the departure board as the dashboard gets them, read beside the screen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgspec

from headway.cli.admin import Admin, AdminError

PATH = "/internal/events"
AGAIN_AFTER = 1.0
"""Seconds after which a stream that has ended is opened again."""


class BoardEvent(NamedTuple):
    """Event of the stream.

    Attributes:
        kind: `start`, `tick` or `dropped`; `error` where the port does not answer.
        told: its data; of an error, the reason.
        id: its id.
    """

    kind: str
    told: Any
    id: str = ""


def events(port: Admin, last: str = "") -> Generator[BoardEvent, None, None]:
    """Events of a port's stream, from the one after `last` on if the port still has it.

    Raises:
        AdminError: the port does not answer, refuses, or has ended the stream.
    """
    fields: dict[str, str] = {}
    asked = {"accept": "text/event-stream", **({"last-event-id": last} if last else {})}
    for line in port.stream(PATH, asked):
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "event" in fields:
            yield BoardEvent(fields["event"], msgspec.json.decode(fields["data"]), fields.get("id", ""))
            fields = {}
    raise AdminError("the process has ended the stream")


class BoardFollower:
    """Follower of a port's stream, in a thread of its own; opens the stream again when it ends.

    Arguments:
        port: the admin port.
        sleep: waits between two streams.
    """

    def __init__(self, port: Admin, sleep: Callable[[float], None] = time.sleep) -> None:
        self._port, self._sleep = port, sleep
        self._heard: SimpleQueue[BoardEvent] = SimpleQueue()

    def start(self) -> None:
        """Follow until the process of this command ends."""
        threading.Thread(target=self._follow, name="board events", daemon=True).start()

    def heard(self) -> Iterator[BoardEvent]:
        """Events that have come since the last call."""
        while True:
            try:
                yield self._heard.get_nowait()
            except Empty:
                return

    def _follow(self) -> None:
        last = ""
        while True:
            try:
                for event in events(self._port, last):
                    last = event.id or last
                    self._heard.put(event)
            except AdminError as exc:
                self._heard.put(BoardEvent("error", str(exc)))
            self._sleep(AGAIN_AFTER)

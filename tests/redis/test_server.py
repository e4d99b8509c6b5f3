"""Errors of a client of one server: which of them say that another server is the one to ask."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import BusyLoadingError, MasterDownError, ReadOnlyError, ResponseError
from redis.exceptions import ConnectionError as NoConnection

from headway.brokers.redis.server import Deposed, Server


class Line:
    """Connection whose every answer is this error; under Sentinels, redis-py raises another one while it handles it."""

    host, port, is_connected, _reader = "10.0.0.1", 6379, True, None

    def __init__(self, error: Exception, instead: Exception | None = None) -> None:
        self._error = error
        self._instead = instead
        self.disconnects = 0

    async def send_packed_command(self, command: object) -> None: ...

    async def disconnect(self, nowait: bool = False) -> None:
        self.disconnects += 1

    async def read_response(self) -> None:
        try:
            raise self._error
        except Exception:
            if self._instead is not None:
                raise self._instead  # noqa: B904 - as redis-py does, which leaves it to the context
            raise


def call(line: Line) -> None:
    redis: Any = SimpleNamespace(connection_pool=SimpleNamespace(make_connection=lambda: line))
    asyncio.run(Server(redis).call("PING"))


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        (Line(ReadOnlyError("READONLY You can't write")), False),
        (Line(MasterDownError("MASTERDOWN Link is down")), False),
        (Line(ResponseError("NOREPLICAS Not enough good replicas")), False),
        (Line(BusyLoadingError("LOADING")), True),
        (Line(ReadOnlyError("READONLY"), NoConnection("The previous master is now a slave")), True),
    ],
    ids=["replica", "without-its-primary", "without-replicas", "loading", "replica-under-sentinels"],
)
def test_a_server_that_takes_no_writes_is_told_with_its_address(line: Line, broken: bool) -> None:
    with pytest.raises(Deposed) as caught:
        call(line)
    assert caught.value.address == ("10.0.0.1", 6379)
    assert bool(line.disconnects) == broken


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (Line(NoConnection("Connection reset by peer")), NoConnection),
        (Line(OSError("reset"), NoConnection("Connection reset by peer")), NoConnection),
        (Line(ResponseError("ERR unknown command")), ResponseError),
    ],
    ids=["broken", "broken-with-a-cause", "a-refused-command"],
)
def test_an_error_that_says_nothing_of_the_primary_stays_what_it_is(line: Line, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        call(line)
    assert not isinstance(caught.value, Deposed)

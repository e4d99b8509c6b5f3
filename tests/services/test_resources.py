"""Resources of a process beside its broker: when they are open, and when they are closed."""

from __future__ import annotations

import asyncio

import pytest

from headway.app.lifecycle import CONNECT_EVERY, CONNECT_WITHIN, Service
from headway.config import Settings
from headway.errors import SettingError, StoreUnavailable
from headway.runtime.supervisor import Supervisor
from tests.services.fake_backend import FakeBackend
from tests.services.roles import FakeDoor
from tests.services.stand import Stand
from tests.virtual_time import Clock


class Noting:
    """A resource that notes what is done with it; `failures` are raised by its first openings."""

    def __init__(self, name: str, notes: list[str], *failures: Exception) -> None:
        self._name = name
        self._notes = notes
        self._failures = list(failures)

    def _note(self, what: str) -> None:
        self._notes.append(f"{what} {self._name}")

    async def open(self) -> None:
        self._note("open")
        if self._failures:
            raise self._failures.pop(0)

    def start(self, supervisor: Supervisor) -> None:
        self._note("start")
        supervisor.start(self._name, self._loop)

    async def _loop(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._note("end")

    async def close(self) -> None:
        self._note("close")


def service(clock: Clock, notes: list[str], *resources: Noting) -> Service:
    stand = Stand(clock, FakeBackend(0.1))
    return Service(Settings(), stand.broker, stand.gateway, stand.pool, [FakeDoor("door", notes)], resources=resources)


async def test_resources_are_there_before_the_first_request_and_until_after_the_last(clock: Clock) -> None:
    notes: list[str] = []
    process = service(clock, notes, Noting("a", notes), Noting("b", notes))
    await process.start()
    await asyncio.sleep(1)
    await process.stop()
    await process.stop()
    assert notes == [
        *("door binds", "open a", "open b", "start a", "start b", "door opens"),
        *("door closes", "end a", "end b", "close b", "close a", "door closes"),
    ]


async def test_a_store_that_does_not_come_ends_the_start(clock: Clock) -> None:
    notes: list[str] = []
    away = [StoreUnavailable("it is away.")] * 1000
    began = clock()
    with pytest.raises(StoreUnavailable, match=r"it is away; given up after 30 s\. Start it") as caught:
        await service(clock, notes, Noting("a", notes), Noting("b", notes, *away)).start()
    assert "--ledger" in str(caught.value)
    assert clock() - began == pytest.approx(CONNECT_WITHIN, abs=CONNECT_EVERY)
    assert notes[-2:] == ["close b", "close a"]
    assert "door opens" not in notes


async def test_one_that_will_not_do_ends_the_start_at_once(clock: Clock) -> None:
    notes: list[str] = []
    with pytest.raises(SettingError):
        await service(clock, notes, Noting("a", notes, SettingError("x", 1, "is wrong", "Fix it."))).start()
    assert notes == ["door binds", "open a", "door closes", "close a"]

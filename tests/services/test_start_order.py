"""Order of a start: what comes before the workers load, and what waits for them."""

from __future__ import annotations

import asyncio

import pytest

from headway.errors import SettingError
from tests.services.fake_backend import FakeBackend
from tests.services.roles import Fleets


async def test_a_taken_port_is_found_before_anything_loads(fleets: Fleets) -> None:
    backend = FakeBackend()
    service = fleets.worker("host", backend)

    async def taken() -> None:
        raise SettingError("admin_port", 9000, "is taken by another program", "Stop it.")

    service._others[0].bind = taken  # type: ignore[method-assign]
    with pytest.raises(SettingError, match="taken by another"):
        await service.start()
    assert backend.starts == 0
    assert fleets.told == ["admin closes"]


async def test_a_process_is_not_up_before_its_workers_are(fleets: Fleets) -> None:
    backend = FakeBackend()
    backend.start_seconds = 60.0
    service = fleets.worker("host", backend)
    starting = asyncio.ensure_future(service.start())
    await asyncio.sleep(59.0)
    assert fleets.told == ["admin binds", "admin opens"]
    before = service.up
    await starting
    assert (before, service.up) == (False, True)
    await service.drain()
    await service.stop()

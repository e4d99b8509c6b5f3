"""Services that tests are given on virtual time."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.scenes import Played, Scene
from tests.services.fake_backend import FakeBackend
from tests.services.fleet import Fleet
from tests.services.roles import Fleets
from tests.virtual_time import Clock


@pytest.fixture
def fleets(clock: Clock, virtual_runner: asyncio.Runner) -> Iterator[Fleets]:
    """Makes gateways, workers and controllers; stops in the end those that a test has made and left."""
    made = Fleets(clock)
    yield made
    virtual_runner.run(made.close())


@pytest.fixture
def fleet(clock: Clock, virtual_runner: asyncio.Runner) -> Played:
    """Two gateways and a GPU that takes a second."""

    async def play(test: Scene) -> None:
        async with Fleet(clock, FakeBackend(1.0), gateways=2, model="m") as fleet:
            await test(fleet)

    return Played(lambda test: virtual_runner.run(play(test)))

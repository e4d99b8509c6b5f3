"""Fixtures for services that run on virtual time."""

import asyncio
from collections import ChainMap
from collections.abc import Iterator
from typing import Any

import pytest

from tests.scenes import Played, Scene
from tests.services.fake_backend import FakeBackend
from tests.services.fleet import Fleet
from tests.services.roles import Fleets
from tests.services.stand import served
from tests.virtual_time import Clock


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fleet: seconds that the batches of each GPU take, and options of the fleet")
    config.addinivalue_line("markers", "stand: settings of the stand")


def marked(request: pytest.FixtureRequest, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the nearest mark with this name that has any, and the merged options of all of them."""
    marks = [*request.node.iter_markers(name)]
    return next((mark.args for mark in marks if mark.args), ()), {**ChainMap(*(mark.kwargs for mark in marks))}


@pytest.fixture
def fleets(clock: Clock, virtual_runner: asyncio.Runner) -> Iterator[Fleets]:
    """Creates gateways, workers and controllers, and stops them all when the test ends."""
    made = Fleets(clock)
    yield made
    virtual_runner.run(made.close())


@pytest.fixture
def fleet(request: pytest.FixtureRequest, clock: Clock, virtual_runner: asyncio.Runner) -> Played:
    """A gateway and a GPU that takes 0.1 s per batch, unless marks say otherwise. `fallback` is in seconds, too."""
    seconds, options = marked(request, "fleet")
    if "fallback" in options:
        options["fallback"] = FakeBackend(options["fallback"])

    async def play(test: Scene) -> None:
        async with Fleet(clock, *map(FakeBackend, seconds or (0.1,)), **options) as fleet:
            await test(fleet)

    return Played(lambda test: virtual_runner.run(play(test)))


@pytest.fixture
def stand(request: pytest.FixtureRequest, clock: Clock, virtual_runner: asyncio.Runner) -> Played:
    """A service with one backend and the settings from the marks."""

    async def play(test: Scene) -> None:
        async with served(clock, **marked(request, "stand")[1]) as stand:
            await test(stand)

    return Played(lambda test: virtual_runner.run(play(test)))

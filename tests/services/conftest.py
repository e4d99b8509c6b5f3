"""Services that tests are given on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.services.roles import Fleets
from tests.virtual_time import Clock


@pytest.fixture
def fleets(clock: Clock, virtual_runner: asyncio.Runner) -> Iterator[Fleets]:
    """Makes gateways, workers and controllers; stops in the end those that a test has made and left."""
    made = Fleets(clock)
    yield made
    virtual_runner.run(made.close())

"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.brokers import HARNESSES, Harness
from tests.servers.redis import SharedServers


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest, servers: SharedServers) -> Iterator[Harness]:
    """A fresh broker of each kind."""
    made = HARNESSES[request.param](servers)
    yield made
    made.close()

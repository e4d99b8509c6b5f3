"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.brokers import HARNESSES, Harness


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """A fresh broker of each kind."""
    made = HARNESSES[request.param]()
    yield made
    made.close()

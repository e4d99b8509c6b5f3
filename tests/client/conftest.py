"""Runs each test that takes `kind` with both clients."""

import pytest

from tests.client.asking import CLIENTS


@pytest.fixture(params=CLIENTS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found

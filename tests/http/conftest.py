"""What tests of these ports are played on, where no decorator asks for another."""

import pytest

from tests.http.stand import served
from tests.http.test_admin import played
from tests.scenes import Played


@pytest.fixture
def stand() -> Played:
    return Played(served)


@pytest.fixture
def port() -> Played:
    """An admin port, with the stand behind it."""
    return Played(played)

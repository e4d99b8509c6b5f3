"""What tests of this port are played on, where no decorator asks for another."""

import pytest

from tests.grpc.stand import served
from tests.scenes import Played


@pytest.fixture
def port() -> Played:
    return Played(served)

"""The default port for the tests in this folder."""

import pytest

from tests.grpc.stand import served
from tests.scenes import Played


@pytest.fixture
def port() -> Played:
    return Played(served)

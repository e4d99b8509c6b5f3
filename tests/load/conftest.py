"""Settings of the tests of the load generator."""

import pytest

from headway.load import connection


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for some seconds costs no connection."""
    for name in ("_CONNECT_WITHIN", "_STALE"):
        monkeypatch.setattr(connection, name, 60.0)

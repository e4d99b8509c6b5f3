import pytest

from headway.load import connection


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep connections open even if the machine stalls for a few seconds."""
    for name in ("_CONNECT_WITHIN", "_STALE"):
        monkeypatch.setattr(connection, name, 60.0)

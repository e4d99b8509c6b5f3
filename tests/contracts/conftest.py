"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headway import folder_lock
from headway.ledgers import postgres_link, sqlite_file, sqlite_hand
from tests.contracts.brokers import HARNESSES, Harness
from tests.servers.redis import SharedServers


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest, servers: SharedServers) -> Iterator[Harness]:
    """A fresh broker of each kind."""
    made = HARNESSES[request.param](servers)
    yield made
    endless = made.endless()
    made.close()
    assert endless == []


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and databases are waited for, however slow the disk is."""
    for module, names in (
        (folder_lock, ["LOCK_WITHIN"]),
        (postgres_link, ["CALL_WITHIN", "CLOSE_WITHIN"]),
        (sqlite_file, ["BUSY_WITHIN"]),
        (sqlite_hand, ["CALL_WITHIN", "CLOSE_WITHIN"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, 60.0)

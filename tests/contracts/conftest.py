"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headway.identity import keys_file
from headway.ledgers import postgres_link, sqlite_file
from tests.contracts.brokers import HARNESSES, Harness
from tests.servers.redis import SharedServers


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest, servers: SharedServers) -> Iterator[Harness]:
    """A fresh broker of each kind."""
    made = HARNESSES[request.param](servers)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and databases are waited for, however slow the disk is."""
    for module, names in (
        (keys_file, ["LOCK_WITHIN"]),
        (postgres_link, ["CALL_WITHIN", "CLOSE_WITHIN"]),
        (sqlite_file, ["BUSY_WITHIN", "CALL_WITHIN", "CLOSE_WITHIN"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, 60.0)

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.brokers.redis import function_library
from headway.runtime import shared_files
from headway.storage import postgres as postgres_store
from headway.storage import sqlite as sqlite_store
from tests.contracts.brokers import EXAMPLES, HARNESSES, Harness
from tests.contracts.ledgers import DATABASES, Database
from tests.servers.postgres import SharedPostgres
from tests.servers.redis import SharedServers


@pytest.fixture
def bounds() -> dict[str, Any]:
    """Bounds of the broker that differ from the defaults."""
    return {}


@pytest.fixture(params=EXAMPLES)
def harness(request: pytest.FixtureRequest, servers: SharedServers, bounds: dict[str, Any]) -> Iterator[Harness]:
    """Run a test with a fresh in-process broker, and with one on a server. A test may choose other HARNESSES."""
    made = HARNESSES[request.param](servers, **bounds)
    yield made
    endless = made.endless()
    made.close()
    assert endless == []


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, tmp_path: Path, postgres: SharedPostgres) -> Database:
    return DATABASES[request.param](tmp_path, postgres)


SAVED = "  s.memory.figures = figures\nend\n"
ALL_WRITTEN = """
  local all, tiers = {}, %d
  for i, section in ipairs(order) do
    all[i] = section <= tiers and pack_section[section](q) or pack_tier(q, section - tiers)
  end
  assert(redis.call('GET', key) == table.concat(all), 'figures were changed and not written')
"""


@pytest.fixture
def all_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every Redis step fail that changes a figure without writing it."""
    before, found, after = function_library._BODY.partition(SAVED)
    assert found
    check = ALL_WRITTEN % function_library.figure_numbers()["TIERS"]
    monkeypatch.setattr(function_library, "_BODY", before + check + SAVED + after)
    monkeypatch.setattr(function_library, "VERSION", "all_written")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Don't time out on files and databases, however slow the disk is."""
    for module, names in (
        (shared_files, ["LOCK_WITHIN"]),
        (postgres_store, ["CALL_WITHIN", "CLOSE_WITHIN"]),
        (sqlite_store, ["BUSY_WITHIN", "CALL_WITHIN", "CLOSE_WITHIN"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, 60.0)

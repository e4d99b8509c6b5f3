"""Settings of the whole test run, and the servers that it shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.servers.postgres import SharedPostgres
from tests.servers.redis import SharedServers

# The machine that checks is shared and slow at times: a case may take long, and the same cases run every time.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("house")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    """One Valkey and one Redis for all tests that do no harm to them."""
    shared = SharedServers(tmp_path_factory.mktemp("servers"))
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[SharedPostgres]:
    """One PostgreSQL for all tests that do no harm to it."""
    shared = SharedPostgres()
    yield shared
    shared.close()

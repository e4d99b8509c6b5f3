"""Settings of the whole test run, and the servers that it shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.servers.postgres import SharedPostgres
from tests.servers.redis import SharedServers

# The machine that checks is shared and slow at times: a case may take long, and the same cases run every time.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("house")
# Mutants are tried in forks of one process, in which each test is called again; a mutant is known after few cases, of
# which nobody wants to see the smallest.
settings.register_profile(
    "mutants",
    settings.get_profile("house"),
    max_examples=30,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.differing_executors],
)
# Cases are drawn from literals in the sources too, as far as these have been imported: other cases after every change,
# and where a test runs alone.
providers._get_local_constants = Constants


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

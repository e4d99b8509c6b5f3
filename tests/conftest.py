"""Settings of the whole test run, the servers that it shares, and which tests start processes.

Tests may run side by side in several workers of pytest-xdist. Each worker is a process with servers, ports and folders of
its own; see `servers`, `postgres` and `tests.servers`.
"""

import asyncio
import gc
import inspect
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.contracts.ledgers import DATABASES, POOLED
from tests.explore import DRAWS, draws
from tests.scenes import Played
from tests.servers.postgres import SharedPostgres
from tests.servers.reaper import the_reaper
from tests.servers.redis import FOREIGN, KINDS, WORKERS, SharedServers
from tests.virtual_time import Clock, VirtualLoop

# The machine that checks is shared and slow at times: a case may take long, and the same cases run every time. They are few:
# what tests/mutants.md tells of was noticed with 30. `make explore` draws more of them.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True, max_examples=40)
settings.load_profile("house")
# A shell leaves SIGINT ignored in what it starts in the background, and so it would stay in all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
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

MOST_WORKERS = 8
"""Most workers of `-n auto`: more cost more servers and memory than they bring, and some machines show cores that they
do not lend.
"""
PROCESSES = "processes"
"""Mark of the tests that start processes, servers among them."""
OF_PROCESSES = ("tests/charts/", "tests/clients/", "tests/e2e/", "tests/redis/", "tests/servers/")
"""Folders whose tests all have it."""
WAITING = ("tests/e2e/", "tests/cli/", "tests/dashboard/", "tests/docs/")
"""Folders whose tests wait for most of their time: first the one whose files go to workers one by one, as they share nothing."""
SKIPPED = "HEADWAY_TEST_SKIPPED"
"""File to which the ids of the tests that were skipped are written in the end."""
ONLY = "HEADWAY_TEST_ONLY"
"""File with the ids of the tests to run, as a run with SKIPPED has written it; all others are left out."""
SERVERS = frozenset((*KINDS, "apart")) | (DATABASES.keys() | POOLED.keys()) - {"sqlite"}
"""Parameters that name a real server; the tests that are given one have it, too."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Number of workers of `-n auto`: tests wait for most of their time, so three for each core.

    Tests that start no process seldom wait, and every worker more collects all tests once more: one more than there are cores.
    """
    cores = os.cpu_count() or 1
    workers = cores + 1 if config.option.markexpr.startswith(f"not {PROCESSES}") else 3 * cores
    return 1 if FOREIGN in os.environ else min(workers, MOST_WORKERS)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage among what all tests consist of: it stays until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ONLY does not name. Mark what starts processes by its folder or its parameters; what else does so has
    the mark in its file. Mark what draws cases.

    What waits for most of its time comes first at every second worker, while the others compute.
    """
    if ONLY in os.environ:
        wanted = {*Path(os.environ[ONLY]).read_text(encoding="utf-8").splitlines()}
        kept = {item for item in items if not wanted.isdisjoint((item.nodeid, item.nodeid.partition("::")[0]))}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    items[:] = _dealt(items, int(os.environ.get(WORKERS, "1")))
    for item in items:
        given = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        if item.nodeid.startswith(OF_PROCESSES) or any(isinstance(value, str) and value in SERVERS for value in given):
            item.add_marker(PROCESSES)
        if draws(item):
            item.add_marker(DRAWS)


def _dealt(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order of the tests. xdist gives each worker an equal part of them in this order; whoever is done takes from the end of another's."""
    folders = {folder: [item for item in items if item.nodeid.startswith(folder)] for folder in WAITING}
    waiting = [
        *(list(own) for _, own in itertools.groupby(folders.pop(WAITING[0]), lambda item: item.path)),
        *folders.values(),
    ]
    rest = [item for item in items if not item.nodeid.startswith(WAITING)]
    dealt: list[pytest.Item] = []
    for number in range(workers):
        if number % 2 == 0:
            dealt += itertools.chain(*waiting[number // 2 :: (workers + 1) // 2])
        share = max(0, (number + 1) * len(items) // workers - len(dealt))
        dealt += rest[:share]
        del rest[:share]
    return dealt + rest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell which tests were skipped. A file that was skipped as a whole is told by its path."""
    if SKIPPED in os.environ:
        ids = sorted({report.nodeid for report in terminalreporter.stats.get("skipped", [])})
        Path(os.environ[SKIPPED]).write_text("".join(f"{one}\n" for one in ids), encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hold tests to their mark: without it, whoever starts a process fails. With it, nothing outlives the test run."""
    if item.get_closest_marker(PROCESSES):
        the_reaper()
        return (yield)
    with mock.patch.object(subprocess.Popen, "__init__", _unmarked):
        return (yield)


def _unmarked(*arguments: object, **options: object) -> None:
    raise AssertionError(f"a test that starts processes has the mark `{PROCESSES}`")


@pytest.fixture
def virtual_runner() -> Iterator[asyncio.Runner]:
    """A loop whose clock jumps, for one test. See `tests.virtual_time`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        yield runner


@pytest.fixture
def clock(virtual_runner: asyncio.Runner) -> Clock:
    """Time in seconds of the loop in which a test runs that is a coroutine function."""
    return virtual_runner.get_loop().time


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function: on a stand, by its `harness` or `stage`, on virtual time if it takes the `clock`, or on any loop."""
    if not inspect.iscoroutinefunction(test := pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    played = {name: value for name, value in given.items() if isinstance(value, Played)}
    if played:
        *_, last = played.values()
        last.play(lambda *made: test(**given | dict(zip(played, made, strict=True))))
    else:
        runner: Any = given.get("harness") or given.get("stage") or pyfuncitem.funcargs.get("virtual_runner", asyncio)
        runner.run(test(**given))
    return True


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    """One Valkey and one Redis for all tests that do no harm to them."""
    shared = SharedServers(tmp_path_factory.mktemp("servers"))
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[SharedPostgres]:
    shared = SharedPostgres()
    yield shared
    shared.close()


@pytest.fixture
def postgres(shared_postgres: SharedPostgres) -> Iterator[SharedPostgres]:
    """One PostgreSQL for all tests that do no harm to it. Its databases are free again when a test has ended."""
    yield shared_postgres
    shared_postgres.free()

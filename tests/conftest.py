"""Settings of the whole test run, the servers that the tests share, and which tests start processes.

Tests can run in parallel in several pytest-xdist workers. Each worker is a process with its own servers, ports and folders;
see `servers`, `postgres` and `tests.servers`.
"""

import asyncio
import contextlib
import gc
import importlib
import inspect
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
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

# No deadline: the machine that runs the checks is shared, and sometimes slow. Every run tries the same cases. 40 are enough:
# the mutants in tests/mutants.md were caught with 30. `make explore` draws more.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True, max_examples=40)
settings.load_profile("house")
# A shell makes its background jobs ignore SIGINT, and every process that the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# mutmut runs each test again in forks of one process. A few cases are enough to kill a mutant, and nobody needs the smallest.
settings.register_profile(
    "mutants",
    settings.get_profile("house"),
    max_examples=30,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.differing_executors],
)
# Hypothesis also draws from literals in imported sources: the cases would change with every edit, and in a test run alone.
providers._get_local_constants = Constants

MOST_WORKERS = 8
"""Maximum workers of `-n auto`. More would cost more in servers and memory than they gain, and some machines report cores that they
don't provide.
"""
PROCESSES = "processes"
"""Marks tests that start processes, including servers."""
OF_PROCESSES = ("tests/charts/", "tests/clients/", "tests/e2e/", "tests/redis/", "tests/servers/")
"""Folders whose tests all have this mark."""
WAITING = ("tests/e2e/", "tests/cli/", "tests/dashboard/", "tests/docs/")
"""Folders whose tests mostly wait. The files of the first folder share nothing, so they go to workers one by one."""
SKIPPED = "HEADWAY_TEST_SKIPPED"
"""The file that the ids of skipped tests are written to."""
ONLY = "HEADWAY_TEST_ONLY"
"""A file with the ids of the tests to run, as written by a run with SKIPPED."""
SERVERS = frozenset((*KINDS, "apart")) | (DATABASES.keys() | POOLED.keys()) - {"sqlite"}
"""Parameters that name a real server; tests with one of them get the mark, too."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the worker count for `-n auto`. Many tests wait, so it is two for each core and one more.

    Tests that start no process rarely wait, and each worker collects all tests again: they get one more than there are cores.
    """
    cores = os.cpu_count() or 1
    workers = cores + 1 if config.option.markexpr.startswith(f"not {PROCESSES}") else 2 * cores + 1
    return 1 if FOREIGN in os.environ else min(workers, MOST_WORKERS)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Keep the garbage collector off what collection creates, which lives until the end. Later it runs less often than usual."""
    gc.disable()
    try:
        if session.config.args_source is pytest.Config.ArgsSource.TESTPATHS and hasattr(session.config, "workerinput"):
            import_from(session.config.workerinput)
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000)
        gc.enable()


def import_from(worker: Mapping[str, Any]) -> None:
    """Import all test files, beginning with a different one in each worker. The first import of a file compiles it for all
    workers: in the same order, each would compile every file."""
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in (*files[first:], *files[:first]):
        with contextlib.suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):  # Collection reports it.
            importlib.import_module(".".join(file.relative_to(Path(__file__).parents[1]).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop tests that ONLY doesn't name. Mark those that start processes, by their folder or parameters, and those that draw cases.

    (Other tests that start processes are marked in their files.) Tests that mostly wait come first at every second worker.
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
    """Return the tests in order. xdist gives each worker an equal part, in this order; an idle one takes from the end of another's."""
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
    """Write the list of skipped tests. A file that was skipped as a whole appears as its path."""
    if SKIPPED in os.environ:
        ids = sorted({report.nodeid for report in terminalreporter.stats.get("skipped", [])})
        Path(os.environ[SKIPPED]).write_text("".join(f"{one}\n" for one in ids), encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fail unmarked tests that start a process. For marked ones, make sure that nothing outlives the test run."""
    if item.get_closest_marker(PROCESSES):
        the_reaper()
        return (yield)
    with mock.patch.object(subprocess.Popen, "__init__", _unmarked):
        return (yield)


def _unmarked(*arguments: object, **options: object) -> None:
    raise AssertionError(f"a test that starts processes has the mark `{PROCESSES}`")


@pytest.fixture
def virtual_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        yield runner


@pytest.fixture
def clock(virtual_runner: asyncio.Runner) -> Clock:
    """The loop's time in seconds, for tests that are coroutine functions."""
    return virtual_runner.get_loop().time


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on a stand (if it has a `harness` or `stage`), in virtual time (if it takes `clock`) or on any loop."""
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
    """One Valkey and one Redis, for all tests that don't harm them."""
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
    """One PostgreSQL, for all tests that don't harm it. A test's databases are released when it ends."""
    yield shared_postgres
    shared_postgres.free()

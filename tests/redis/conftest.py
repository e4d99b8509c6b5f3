"""Servers that these tests may do anything to, and fleets on them."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.redis.stand import Stand, run
from tests.servers.redis import TESTED, RedisServer


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisServer]]:
    """Gives an empty server of a kind that nobody else is using. One of each kind is started for all tests."""
    running: dict[str, RedisServer] = {}
    with ExitStack() as stack:

        def of(kind: str) -> RedisServer:
            if kind not in running:
                running[kind] = stack.enter_context(RedisServer(kind, tmp_path_factory.mktemp("own") / kind))
            running[kind].command("FLUSHALL")
            return running[kind]

        yield of


@pytest.fixture(params=TESTED)
def kind(request: pytest.FixtureRequest) -> str:
    """Kind of the server. A test that must run on all of them is parametrized with KINDS."""
    found: str = request.param
    return found


@pytest.fixture
def shards() -> int:
    return 1


@pytest.fixture
def apart_from() -> float:
    return math.inf


@pytest.fixture
def harness(kind: str, own: Callable[[str], RedisServer], shards: int, apart_from: float) -> Iterator[Stand]:
    """A fleet on virtual time. It must leave nothing in the server that never expires."""
    made = Stand(own(kind), shards, apart_from)
    yield made
    endless = made.endless()
    made.close()
    assert endless == []


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests in real time, unless a fixture puts them on virtual time."""
    test, given = pyfuncitem.obj, pyfuncitem.funcargs
    if not inspect.iscoroutinefunction(test) or {"harness", "virtual_runner"} & given.keys():
        return None
    run(test(**{name: given[name] for name in inspect.signature(test).parameters}))
    return True

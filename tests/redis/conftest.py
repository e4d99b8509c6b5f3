"""Servers that these tests may do to what they like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.servers.redis import RedisServer


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisServer]]:
    """Gives a server of a kind that nobody else uses, with nothing in it. One of each is started for all tests."""
    running: dict[str, RedisServer] = {}
    with ExitStack() as stack:

        def of(kind: str) -> RedisServer:
            if kind not in running:
                running[kind] = stack.enter_context(RedisServer(kind, tmp_path_factory.mktemp("own") / kind))
            running[kind].command("FLUSHALL")
            return running[kind]

        yield of

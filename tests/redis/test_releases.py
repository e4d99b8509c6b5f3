"""Two releases side by side: each brings functions of its own, and both work on the same queue."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headway.brokers.redis import function_library
from headway.brokers.redis.connection import RedisConnection
from headway.model import ItemResult, Lease
from tests.contracts.brokers import AT_ONCE, ask, drained, output, slot, story
from tests.redis.stand import Stand

ANOTHER = f"{function_library.LAYOUT}_another"


def of_another_release(connection: RedisConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a connection bring and call functions of another name, which differ in nothing that is stored."""
    call = RedisConnection._run.__get__(connection)

    async def run(client: Any, function: str, key: str, arguments: tuple[Any, ...]) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(function_library, "VERSION", ANOTHER)
            return await call(client, function, key, arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(function_library, "VERSION", ANOTHER)
        monkeypatch.setattr(connection, "_source", function_library.source())
    monkeypatch.setattr(connection, "_run", run)


@story
async def test_two_releases_serve_one_queue(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    of_another_release(harness._links[1], monkeypatch)
    entries = [ask(tier=number % 3, tenant="ab"[number % 2]) for number in range(20)]
    offered, ran = iter(entries), 0
    brokers = itertools.cycle([harness.broker, harness.peer(), harness.peer(), harness.broker, harness.peer()])
    while ran < len(entries):
        for entry in itertools.islice(offered, 2):
            assert await next(brokers).enqueue([entry]) == [None]
        assert await next(brokers).depths() == await next(brokers).depths()
        lease = await next(brokers).claim(slot(limit=3), AT_ONCE)
        assert isinstance(lease, Lease)
        assert await next(brokers).extend(lease)
        done = await next(brokers).complete(lease, [ItemResult(output(entry.input)) for entry in lease.entries])
        ran += done.answered
        await harness.advance(0.01)
    libraries = str(harness.server.command("FUNCTION", "LIST"))
    assert function_library.VERSION in libraries
    assert ANOTHER in libraries
    replies = await drained(harness)
    assert {id: reply.output for id, reply in replies.items()} == {entry.id: output(entry.input) for entry in entries}

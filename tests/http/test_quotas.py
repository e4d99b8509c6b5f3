"""Limits on what one client costs the others: early rate checks, body bytes, and connections."""

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest
import structlog

from headway.config import Settings
from headway.errors import RequestError
from headway.gateway.client_quotas import REFUSED, Quotas
from headway.http.server.connection import UNCOUNTED
from tests.http.stand import ADA, BOB, LAST, MEBIBYTE, TENANTS, Client, Stand, chunked, get, on_stand, post, settled

BODY = '{"input": "a"}'
SLOW_KEY: dict[str, dict[str, Any]] = {"ada": {"rate": 1.0, "burst": 1.0}}


def by(key: str, body: bytes | str = BODY, length: int | None = None) -> bytes:
    return post(body, "/v1/inference", key, length=length)


async def gone(stand: Stand) -> None:
    """Disconnect all clients, and check that the budgets are back to their initial values."""
    for client in stand.clients:
        client.writer.transport.abort()
    await settled(lambda: not stand.door._connections())
    quotas = stand.context.quotas
    assert stand.nothing_held
    assert quotas._connections.free == quotas._total
    assert not quotas._strangers
    assert not quotas._slow


@on_stand(keys=SLOW_KEY, whole=True)
async def test_a_body_over_the_limit_is_refused_before_it_is_read(stand: Stand) -> None:
    assert (await stand.ask(by(ADA))).status == 200
    answer = await stand.ask(by(ADA, "", length=1_000_000))
    assert (answer.status, answer.error) == (429, "RATE_LIMITED")
    assert answer.header["x-headway-dropped-reason"] == "rate"
    assert answer.header["ratelimit"].startswith('"key";r=0;')
    counts = stand.counters.gateway
    assert (counts.refusals, counts.requests["", "paid", "rate_limited"]) == ({("rate", "paid", ""): 1}, 1)
    await gone(stand)


@pytest.mark.parametrize("in_chunks", [False, True])
@on_stand(keys=TENANTS)
async def test_a_body_that_is_too_large_is_counted_under_its_callers_tier(stand: Stand, in_chunks: bool) -> None:
    head = chunked(fields=[ADA], end=b"200000\r\n") if in_chunks else by(ADA, "", length=2_000_000)
    assert (await stand.ask(head)).status == 413
    assert stand.counters.gateway.refusals == {("payload_too_large", "paid", ""): 1}


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (by(ADA, "{"), 400),
        (post(BODY, "/v1/inference", ADA, "X-Request-Tier: gold"), 400),
        (by(ADA, "", 9_000_000), 413),
    ],
)
@on_stand(keys=SLOW_KEY, whole=True)
async def test_what_is_wrong_counts_towards_the_limit(stand: Stand, wrong: bytes, status: int) -> None:
    for expected in (status, 429, 429):
        answer = await stand.ask(wrong)
        assert answer.status == expected
        assert answer.header["ratelimit"].startswith('"key";r=0;')
    assert (await stand.ask(by(ADA))).status == 429


@on_stand(keys={"ada": {"rate": 1.0, "burst": 3.0}}, whole=True)
async def test_what_is_wrong_counts_on_a_connection_that_is_known_too(stand: Stand) -> None:
    client, wrong = await stand.connect(), by(ADA, '{"model": "nowhere", "input": "a"}')
    requests = by(ADA), by(ADA, "{"), wrong, by(ADA, "{"), by(ADA)
    assert [(await client.ask(request)).status for request in requests] == [200, 400, 404, 429, 429]


@pytest.mark.parametrize("comes", [True, False])
@on_stand(keys=SLOW_KEY, whole=True)
async def test_a_body_counts_as_a_request_from_its_beginning_on(stand: Stand, comes: bool) -> None:
    whole = by(ADA, " " * 100_000 + BODY)
    first, second = await stand.connect(), await stand.connect()
    await first.send(whole[:1000])
    await settled(lambda: bool(stand.real.limiter.debts))
    assert (await second.ask(whole[:1000])).header["x-headway-dropped-reason"] == "rate"
    if comes:
        answer = await first.ask(whole[1000:])
        assert (answer.status, answer.header["ratelimit"]) == (200, '"key";r=0;t=60')
    else:
        stand.later(60)
        answer = await first.answer()
        assert (answer.status, "ratelimit" in answer.header) == (408, True)
    assert (await stand.ask(by(ADA))).status == 429


async def uploading(stand: Stand, key: str, number: int, length: int = MEBIBYTE) -> list[Client]:
    """Return clients that have announced a body and sent part of it."""
    clients = [await stand.connect() for _ in range(number)]
    for client in clients:
        await client.send(by(key, "{", length=length))
    return clients


def held_of(stand: Stand, tenant: str = "acme") -> int:
    return stand.bodies.used(tenant)


@on_stand(keys=TENANTS, memory_mb=40)
async def test_unfinished_bodies_of_one_tenant_leave_room_for_others(stand: Stand) -> None:
    await uploading(stand, ADA, 9)
    await settled(lambda: held_of(stand) == 9 * MEBIBYTE)
    (refused,) = await uploading(stand, ADA, 1)
    answer = await refused.answer()
    assert (answer.status, answer.error) == (429, "RATE_LIMITED")
    assert answer.header["x-headway-dropped-reason"] == "bodies"
    assert await refused.ended(), "its body is not waited for"
    whole = by(BOB, " " * 500_000 + BODY)
    assert (await stand.ask(whole[:100_000], whole[100_000:])).status == 200
    assert (await stand.ask(by(ADA))).status == 200, "what comes whole is not on its way"
    assert stand.counters.gateway.refusals["bodies", "paid", ""] == 1
    await gone(stand)


@on_stand(keys=TENANTS, memory_mb=9)
async def test_bytes_are_given_back_when_the_body_is_there_or_refused(stand: Stand) -> None:
    whole = by(ADA, " " * 200_000 + BODY)
    for _ in range(20):
        client = await stand.connect()
        assert (await client.ask(whole[:1000], whole[1000:])).status == 200
    (client,) = await uploading(stand, ADA, 1)
    await settled(lambda: held_of(stand) > 0)
    stand.later(60)
    assert (await client.answer()).status == 408
    assert held_of(stand) == 0
    await gone(stand)


@on_stand(keys=TENANTS, memory_mb=8, max_body_bytes=900_000)
async def test_chunks_are_counted_as_they_come(stand: Stand) -> None:
    begun = chunked(b" " * 0x64000, fields=[ADA])
    clients = [await stand.connect() for _ in range(4)]
    for client in clients:
        await client.send(begun)
    await settled(lambda: held_of(stand) == 4 * 0x64000)
    answer = await stand.ask(begun)
    assert (answer.status, answer.header["x-headway-dropped-reason"]) == (429, "bodies")
    assert (await clients[0].ask(b"e\r\n" + BODY.encode() + b"\r\n" + LAST)).status == 200
    await gone(stand)


@on_stand(keys=TENANTS, memory_mb=9)
async def test_a_body_of_chunks_that_is_whole_when_it_is_too_much_is_refused_once(stand: Stand) -> None:
    stand.bodies.free = 0
    with structlog.testing.capture_logs() as logs:
        client = await stand.connect()
        answer = await client.ask(chunked(BODY.encode(), fields=[ADA], end=LAST))
        assert answer.header["x-headway-dropped-reason"] == "bodies"
        assert await client.ended()
    assert logs == []


@on_stand(memory_mb=16, max_connections=5)
async def test_without_keys_an_address_has_all_connections_and_bounded_bytes(stand: Stand) -> None:
    for client in [await stand.connect() for _ in range(stand.settings.max_connections)]:
        assert (await client.ask(post(BODY))).status == 200
    await gone(stand)
    stand.clients.clear()
    await uploading(stand, "X: y", 3)
    await settled(lambda: held_of(stand, "127.0.0.1") == 3 * MEBIBYTE)
    (refused,) = await uploading(stand, "X: y", 1)
    assert (await refused.answer()).error == "RATE_LIMITED"
    await gone(stand)


@on_stand(keys=TENANTS, memory_mb=9)
async def test_what_is_sent_ahead_counts_with_the_bodies_and_is_dropped_beyond(stand: Stand) -> None:
    stand.gateway.hold = True
    while not any(connection.writer.last for connection in stand.door._connections()):
        client = await stand.connect()
        await client.send(by(ADA), by(ADA, " " * 200_000 + BODY))
        connections: list[Any] = stand.door._connections()
        await settled(lambda: all(known.writer.last or known.reserved > 200_000 for known in connections))  # noqa: B023
        kept = [known.reader.waiting for known in connections if not known.writer.last]
        assert held_of(stand) == sum(kept)
    assert 3 < len(stand.clients) <= 30
    stand.gateway.hold = False
    stand.gateway.release()
    answer = await client.answer()
    assert (answer.status, answer.header["connection"]) == (200, "close")
    assert await client.ended()
    assert (await stand.clients[0].answer()).status == 200
    assert (await stand.clients[0].answer()).status == 200
    await gone(stand)


@on_stand(keys=TENANTS, max_connections=20)
async def test_one_tenant_leaves_connections_for_others(stand: Stand) -> None:
    for _ in range(18):
        assert (await stand.ask(by(ADA))).status == 200
    refused = await stand.connect()
    answer = await refused.ask(by(ADA))
    assert (answer.status, answer.error) == (429, "RATE_LIMITED")
    assert (answer.header["x-headway-dropped-reason"], answer.header["connection"]) == ("connections", "close")
    assert await refused.ended()
    await settled(lambda: len(stand.door._connections()) == 18)
    assert (await stand.ask(get("/v1/result/x", ADA))).error == "RATE_LIMITED", "an ordinary route counts as well"
    await settled(lambda: len(stand.door._connections()) == 18)
    assert (await stand.ask(by(BOB))).status == 200
    assert (await stand.clients[0].ask(by(ADA))).status == 200, "those that it has are kept"
    await gone(stand)


@on_stand(keys=TENANTS)
async def test_a_connection_is_the_tenants_who_asked_last(stand: Stand) -> None:
    proxy = await stand.connect()
    for key, tenant in ((ADA, "acme"), (BOB, "other"), (ADA, "acme")):
        for _ in range(2):
            assert (await proxy.ask(by(key))).status == 200
        assert stand.context.quotas._connections.used(tenant) == 1
    await gone(stand)


@on_stand(keys=TENANTS, max_connections=20)
async def test_silent_strangers_make_room_for_those_who_come(stand: Stand) -> None:
    silent = [await stand.connect() for _ in range(18)]
    await settled(lambda: len(stand.door._connections()) == 18)
    assert (await stand.ask(by(BOB))).status == 200
    assert await silent[0].ended(), "the one that came first"
    assert (await silent[1].ask(by(BOB))).status == 200
    for client in await asyncio.gather(*(stand.connect() for _ in range(12))):
        assert (await client.ask(by(BOB))).status == 200
    await gone(stand)


@on_stand(keys=TENANTS)
async def test_few_bytes_ahead_are_not_counted_and_many_leave_what_a_body_has_reserved(stand: Stand) -> None:
    client = await stand.hold(by(ADA) * 3)
    connection = stand.connection
    assert 0 < len(connection.reader.buffer) < UNCOUNTED
    assert held_of(stand) == 0
    assert stand.context.quotas.reserve(connection, MEBIBYTE)
    await client.send(by(ADA, " " * (2 * UNCOUNTED) + BODY))
    await settled(lambda: connection.reader.waiting > UNCOUNTED)
    assert held_of(stand) == MEBIBYTE


async def deaf(stand: Stand, key: str) -> Client:
    """Return a client whose answer exceeds the socket buffers, and which reads nothing until `listen` is called."""
    client = await stand.connect_deaf()
    asked = len(stand.gateway.asked)
    await client.send(by(key))
    await stand.gateway.until(lambda: len(stand.gateway.asked) > asked)
    await settled(lambda: all(one.unread.since for one in stand.door._connections()))
    return client


@on_stand(keys=TENANTS, memory_mb=192)
async def test_answers_that_nobody_reads_cost_their_tenant_the_oldest_of_them(stand: Stand) -> None:
    stand.gateway.output = "x" * 12_000_000
    first = await deaf(stand, BOB)
    mine = [await deaf(stand, ADA) for _ in range(6)]
    await settled(lambda: len(stand.door._connections()) < 7)
    assert held_of(stand) < 0.9 * 48 * MEBIBYTE
    for client in (first, mine[-1]):  # The other tenant's is kept, although it is older than those that were closed.
        client.listen()
        assert len((await client.answer()).json["output"]) == 12_000_000
    mine[0].listen()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await mine[0].answer()
    await gone(stand)


@on_stand(keys=TENANTS, memory_mb=9)
async def test_one_answer_may_wait_however_large_it_is(stand: Stand) -> None:
    stand.gateway.output = "x" * 12_000_000
    first, second = await deaf(stand, ADA), await deaf(stand, ADA)
    for client in (first, second):
        client.listen()
    assert (await second.answer()).status == 200
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await first.answer()
    await gone(stand)


@on_stand(keys=TENANTS)
async def test_what_is_fetched_is_counted_no_more(stand: Stand) -> None:
    stand.gateway.output = "x" * 12_000_000
    client = await deaf(stand, ADA)
    before = held_of(stand)
    assert before > 6_000_000
    client.listen()
    await settled(lambda: len(client.reader._buffer) > 4_000_000)  # type: ignore[attr-defined]
    stand.later(1.0)
    assert held_of(stand) < before
    assert (await client.answer()).status == 200
    await settled(lambda: held_of(stand) == 0)
    await gone(stand)


class Counted:
    silent = True

    def __init__(self) -> None:
        self.owner: str | None = None
        self.reserved = self.unfetched = 0
        self.cut = False

    def shutdown(self) -> None:
        self.cut = True


def belonging(shared: Quotas, tenant: str, number: int) -> list[Counted]:
    """Open connections for a tenant. Those above its limit wait for their answer or are closed."""
    found = [Counted() for _ in range(number)]
    for one in found:
        assert shared.enter(one, "10.0.0.1")
        with contextlib.suppress(RequestError):
            shared.belong(one, tenant)
    return found


def test_connections_are_shared_as_far_as_there_are_descriptors_for_them() -> None:
    shared = Quotas(Settings(max_connections=1000, keys="k"))
    shared.fit(5000)
    shared.fit(100)
    greedy = belonging(shared, "acme", 200)
    assert sum(one.owner == "acme" for one in greedy) == 90
    assert not any(one.cut for one in belonging(shared, "globex", 6))


def test_few_of_those_that_are_too_many_wait_for_their_answer() -> None:
    shared = Quotas(Settings(max_connections=960, keys="k"))
    greedy = belonging(shared, "acme", 2000)
    assert Counter(one.owner for one in greedy if not one.cut) == {"acme": 864, REFUSED: 30}
    for one in greedy:
        shared.leave(one)
    assert shared._connections.free == 960

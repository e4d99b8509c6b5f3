"""Turns of connections that have sent many requests at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from typing import Any

import pytest

from headway.http.server.connection import REQUESTS_PER_TURN, WAITING, Connection, RouteInHand
from headway.http.server.reader import MOST_BUFFERED
from headway.runtime.fair_turns import Begin, FairTurns
from tests.http.stand import Client, Stand, get, on_stand, post, served, settled

BODY = '{"input": "a"}'
ADA = "Authorization: Bearer ada"
KEYS: dict[str, dict[str, Any]] = {"ada": {"rate": 0.0}}
DENIED = post("")
MANY = 1000
UNWANTED = post("u" * 4_000_000)


def answered(stand: Stand) -> int:
    """Refusals so far."""
    return sum(stand.counters.gateway.refusals.values())


async def crowd(stand: Stand, request: bytes, connections: int = 1) -> list[Client]:
    """Clients that have sent many requests each, of which the first few have been begun."""
    clients = [await stand.connect() for _ in range(connections)]
    for client in clients:
        client.writer.write(request * MANY)
    await settled(lambda: any(connection.phase == WAITING for connection in stand.door._connections()))
    return clients


@pytest.mark.parametrize("connections", [1, 3, 20])
@on_stand(keys=KEYS)
async def test_who_asks_once_is_not_behind_those_who_ask_a_thousand_times(stand: Stand, connections: int) -> None:
    single = await stand.connect()
    await crowd(stand, DENIED, connections)
    single.writer.write(post(BODY, "/v1/inference", ADA))
    assert (await single.answer()).json["output"] == "A"
    assert answered(stand) < (connections + 16) * REQUESTS_PER_TURN


@on_stand(keys=KEYS)
async def test_a_tenant_that_sends_ahead_is_not_behind_all_connections_of_others(stand: Stand) -> None:
    friend = await stand.connect()
    wrong = post("{", "/v1/inference", ADA)
    friend.writer.write(wrong)
    assert (await friend.answer()).status == 400  # From now on it is known whose connection it is.
    await crowd(stand, DENIED, 20)
    before = answered(stand)
    friend.writer.write(wrong * 40)
    for _ in range(40):
        assert (await friend.answer()).status == 400
    assert answered(stand) - before < 40 + 30 * REQUESTS_PER_TURN


@pytest.mark.parametrize("method", ["GET", "PUT"])
@on_stand(keys=KEYS)
async def test_ordinary_routes_take_turns_too(stand: Stand, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = count()
    go_on = RouteInHand._end
    monkeypatch.setattr(RouteInHand, "_end", lambda self: (next(answered), go_on(self))[1])
    single = await stand.connect()
    (many,) = await crowd(stand, get("/openapi.json", method=method))
    single.writer.write(post(BODY, "/v1/inference", ADA))
    assert (await single.answer()).json["output"] == "A"
    assert next(answered) < 100
    for _ in range(20):
        assert (await many.answer()).status == (200 if method == "GET" else 405)


@on_stand(keys=KEYS)
async def test_every_request_is_answered_in_its_order(stand: Stand) -> None:
    client = await stand.connect()
    kinds = [
        (DENIED, 401),
        (post(BODY, "/v1/inference", ADA), 200),
        (post("{", "/v1/inference", ADA), 400),
        (get("/livez"), 200),
        (get("/nowhere"), 404),
        (DENIED, 401),
    ]
    chosen = [kinds[(index * index + index // 7) % len(kinds)] for index in range(MANY)]
    client.writer.write(b"".join(request for request, _ in chosen))
    for _, status in chosen:
        assert (await client.answer()).status == status
    await client.send(post(BODY, "/v1/inference", ADA))
    assert (await client.answer()).status == 200
    lane: Any = stand.door._context
    assert lane.quotas.bytes.free == stand.settings.bodies_bytes


@on_stand(keys=KEYS)
async def test_little_is_read_from_who_waits_and_all_is_answered(stand: Stand) -> None:
    (client,) = await crowd(stand, DENIED)
    for _ in range(4):
        client.writer.write(DENIED * MANY)
    (connection,) = stand.door._connections()
    await settled(lambda: connection.gate.paused)
    lane: Any = stand.door._context
    most = stand.settings.bodies_bytes
    assert MOST_BUFFERED < most - lane.quotas.bytes.free < 1 << 20
    for _ in range(5 * MANY):
        assert (await client.answer()).status == 401
    assert lane.quotas.bytes.free == most


@on_stand(keys=KEYS)
async def test_no_deadline_runs_for_who_waits(stand: Stand) -> None:
    (client,) = await crowd(stand, DENIED)
    stand.later(1e6)
    for _ in range(MANY):
        assert (await client.answer()).status == 401


@on_stand(keys=KEYS)
async def test_a_closing_door_answers_once_more(stand: Stand) -> None:
    (client,) = await crowd(stand, DENIED)
    before = answered(stand)
    stand.door.retire()
    for index in range(before + 1):
        assert (await client.answer()).header.get("connection") == ("close" if index == before else None)
    assert await client.ended()


@on_stand(keys=KEYS)
async def test_requests_of_a_client_that_left_are_not_answered_in_later_turns(stand: Stand) -> None:
    (client,) = await crowd(stand, DENIED)
    client.writer.transport.abort()
    await settled(lambda: not stand.door._connections())
    assert answered(stand) < MANY
    lane: Any = stand.door._context
    assert lane.quotas.bytes.free == stand.settings.bodies_bytes


@on_stand(keys=KEYS)
async def test_who_waits_with_more_than_its_owner_may_hold_is_told(stand: Stand) -> None:
    lane: Any = stand.door._context
    client = await stand.connect()
    lane.quotas.bytes.take("another", lane.quotas.bytes.free - 1)
    client.writer.write(DENIED * MANY)
    for _ in range(REQUESTS_PER_TURN):
        assert (await client.answer()).status == 401
    answer = await client.answer()
    assert answer.header["x-headway-dropped-reason"] == "bodies"
    assert answer.header["connection"] == "close"
    assert await client.ended()


def test_what_refused_clients_still_send_is_read_by_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them together would hold up a turn of the event loop, and so everybody's requests, for milliseconds."""
    turns, reads, drop = [0], Counter[int](), Connection.drop

    def note(connection: Connection) -> None:
        if connection.reader.buffer:
            reads[turns[0]] += 1
        drop(connection)

    monkeypatch.setattr(Connection, "drop", note)

    async def main(stand: Stand) -> None:
        loop = asyncio.get_running_loop()

        def turn() -> None:
            turns[0] += 1
            loop.call_soon(turn)

        turn()
        clients = [await stand.connect() for _ in range(8)]
        for client in clients:
            client.writer.write(UNWANTED)
        for client in clients:
            assert (await client.answer()).status == 401
        await settled(lambda: reads.total() > 40)

    served(main, keys=KEYS)
    assert max(reads.values()) == 1


@on_stand(keys=KEYS)
async def test_a_refused_tenant_that_is_known_takes_turns_with_all_others(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its answer could be lost: a client that still sends when it is cut off may not see it."""
    lines, wait = dict[FairTurns, set[str]](), FairTurns.wait

    def note(line: FairTurns, tenant: str, begin: Begin) -> None:
        lines.setdefault(line, set()).add(tenant)
        wait(line, tenant, begin)

    monkeypatch.setattr(FairTurns, "wait", note)
    friend, other = await stand.connect(), await stand.connect()
    friend.writer.write(post(BODY, "/v1/inference", ADA))
    assert (await friend.answer()).json["output"] == "A"
    friend.writer.write(post("u" * 4_000_000, "/v1/inference", ADA))
    assert (await friend.answer()).status == 413
    other.writer.write(UNWANTED)
    assert (await other.answer()).status == 401
    context = stand.door._context
    assert context is not None
    await settled(lambda: len(lines.get(context.drops, ())) == 2)
    assert "acme" in lines[context.drops]

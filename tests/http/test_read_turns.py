"""Connections with many pipelined requests: their turns, and clients that leave while their connection isn't being read."""

import asyncio
import socket
import struct
from collections import Counter
from itertools import count

import pytest

from headway.http.inference.fast_path import FastPathConnection
from headway.http.server.connection import REQUESTS_PER_TURN, WAITING, Connection, RouteInHand
from headway.http.server.connection_context import Hangups
from headway.http.server.reader import MOST_BUFFERED
from headway.runtime.fair_turns import FairTurns
from tests.http.stand import ADA, MEBIBYTE, Client, Keys, Stand, get, on_stand, post, settled
from tests.http.test_listener import on_loop

BODY = '{"input": "a"}'
KEYS: Keys = {"ada": {"rate": 0.0}}
DENIED = post("")
MANY = 1000
UNWANTED = post("u" * 4_000_000)


def answered(stand: Stand) -> int:
    return sum(stand.counters.gateway.refusals.values())


async def crowd(stand: Stand, request: bytes, connections: int = 1) -> list[Client]:
    """Return clients that have each sent many requests, the first few of which have started."""
    clients = [await stand.connect() for _ in range(connections)]
    for client in clients:
        client.writer.write(request * MANY)
    await settled(lambda: any(connection.phase == WAITING for connection in stand.door._connections()))
    return clients


@pytest.mark.parametrize("connections", [1, 20])
@on_stand(keys=KEYS)
async def test_who_asks_once_is_not_behind_those_who_ask_a_thousand_times(stand: Stand, connections: int) -> None:
    single = await stand.connect()
    await crowd(stand, DENIED, connections)
    assert (await single.ask(post(BODY, "/v1/inference", ADA))).json["output"] == "A"
    assert answered(stand) < (connections + 16) * REQUESTS_PER_TURN


@on_stand(keys=KEYS)
async def test_a_tenant_that_sends_ahead_is_not_behind_all_connections_of_others(stand: Stand) -> None:
    friend = await stand.connect()
    wrong = post("{", "/v1/inference", ADA)
    assert (await friend.ask(wrong)).status == 400  # From now on the connection's tenant is known.
    await crowd(stand, DENIED, 20)
    before = answered(stand)
    friend.writer.write(wrong * 40)
    for _ in range(40):
        assert (await friend.answer()).status == 400
    assert answered(stand) - before < 40 + 30 * REQUESTS_PER_TURN


@on_stand(keys=KEYS)
async def test_ordinary_routes_take_turns_too(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    answered, go_on = count(), RouteInHand._end
    monkeypatch.setattr(RouteInHand, "_end", lambda self: (next(answered), go_on(self))[1])
    single = await stand.connect()
    (many,) = await crowd(stand, get("/openapi.json"))
    assert (await single.ask(post(BODY, "/v1/inference", ADA))).json["output"] == "A"
    assert next(answered) < 100
    for _ in range(20):
        assert (await many.answer()).status == 200


@on_stand(keys=KEYS)
async def test_every_request_is_answered_in_its_order(stand: Stand) -> None:
    client, good = await stand.connect(), post(BODY, "/v1/inference", ADA)
    wrong, missing = post("{", "/v1/inference", ADA), get("/nowhere")
    kinds = [(DENIED, 401), (good, 200), (wrong, 400), (get("/livez"), 200), (missing, 404), (DENIED, 401)]
    chosen = [kinds[(index * index + index // 7) % len(kinds)] for index in range(MANY)]
    client.writer.write(b"".join(request for request, _ in chosen))
    for _, status in chosen:
        assert (await client.answer()).status == status
    assert (await client.ask(good)).status == 200
    assert stand.nothing_held


@on_stand(keys=KEYS)
async def test_little_is_read_from_who_waits_and_all_is_answered(stand: Stand) -> None:
    (client,) = await crowd(stand, DENIED)
    stand.later(1e6)  # No deadline applies while waiting.
    for _ in range(4):
        client.writer.write(DENIED * MANY)
    connection = stand.connection
    await settled(lambda: connection.gate.paused)
    assert MOST_BUFFERED < stand.settings.bodies_bytes - stand.bodies.free < MEBIBYTE
    for _ in range(5 * MANY):
        assert (await client.answer()).status == 401
    assert stand.nothing_held


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
    assert stand.nothing_held


@on_stand(keys=KEYS)
async def test_who_waits_with_more_than_its_owner_may_hold_is_told(stand: Stand) -> None:
    client = await stand.connect()
    stand.bodies.take("another", stand.bodies.free - 1)
    client.writer.write(post("", "/v1/completions") * MANY)
    for _ in range(REQUESTS_PER_TURN):
        assert (await client.answer()).status == 401
    answer = await client.answer()
    assert answer.error == "SERVICE_OVERLOADED", "a problem document, as the route of the next is not read"
    assert answer.header["x-headway-dropped-reason"] == "bodies"
    assert answer.header["connection"] == "close"
    assert await client.ended()


@on_stand(keys=KEYS)
async def test_what_refused_clients_still_send_is_read_by_one_at_a_time(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading from all of them in the same turn would block the event loop, and so all requests, for milliseconds."""
    turns, reads, drop, loop = 0, Counter[int](), Connection.drop, asyncio.get_running_loop()

    def note(connection: Connection) -> None:
        reads[turns] += bool(connection.reader.buffer)
        drop(connection)

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    monkeypatch.setattr(Connection, "drop", note)
    turn()
    clients = [await stand.connect() for _ in range(8)]
    for client in clients:
        client.writer.write(UNWANTED)
    for client in clients:
        assert (await client.answer()).status == 401
    await settled(lambda: reads.total() > 40)
    assert max(reads.values()) == 1


@on_stand(keys=KEYS)
async def test_a_refused_known_tenant_takes_turns_with_others(stand: Stand, turns: list[tuple[FairTurns, str]]) -> None:
    """Otherwise its answer could be lost: a client that is still sending when it is cut off may not see it."""
    friend, other = await stand.connect(), await stand.connect()
    assert (await friend.ask(post(BODY, "/v1/inference", ADA))).json["output"] == "A"
    friend.writer.write(post("u" * 4_000_000, "/v1/inference", ADA))
    assert (await friend.answer()).status == 413
    other.writer.write(UNWANTED)
    assert (await other.answer()).status == 401
    await settled(lambda: len({tenant for line, tenant in turns if line is stand.context.drops}) == 2)
    assert (stand.context.drops, "acme") in turns


AHEAD = post(" " * 100_000 + BODY)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit reading ahead of an answer to the minimum."""
    monkeypatch.setattr(FastPathConnection, "far", MOST_BUFFERED)


@pytest.mark.parametrize("size", [70_000, 1_000_000, 3_500_000])
@pytest.mark.parametrize("small", [False, True])
async def test_a_departure_is_seen_behind_all_that_was_sent(stand: Stand, size: int, small: bool) -> None:
    client = await stand.hold(post(BODY))
    piece = post(BODY) * 10 if small else AHEAD
    for _ in range(size // len(piece) + 1):
        client.writer.write(piece)
    client.leave()
    await departed(stand)


async def departed(stand: Stand) -> None:
    """Wait until a client has left. The gateway must be notified once, and nothing may remain."""
    await stand.gateway.until(lambda: not stand.gateway.waiting)
    assert stand.gateway.abandoned == [("default", stand.gateway.asked[0].id)]
    await settled(lambda: not stand.door._connections())
    assert stand.nothing_held


@pytest.mark.parametrize("how", ["close", "reset", "half", "close behind more"])
@pytest.mark.usefixtures("near")
async def test_the_departure_of_a_client_is_seen_while_nothing_is_read_from_it(stand: Stand, how: str) -> None:
    client = await stand.hold(post(BODY))
    await client.send(AHEAD)
    connection = stand.connection
    await settled(lambda: connection.gate.paused)
    if how == "reset":
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "close behind more":
        client.writer.write(b" " * 10_000)  # This isn't read, and the end of the stream follows it.
    if how == "half":
        client.writer.write_eof()
    else:
        client.leave()
    await departed(stand)


@pytest.mark.parametrize("number", [1, 30, 90])
async def test_who_stays_gets_every_answer_in_order(stand: Stand, number: int) -> None:
    """The inputs are held, far ahead, or not read yet."""
    client = await stand.hold(post(BODY))
    texts = [f"{index}".ljust(60_000, ".") for index in range(number)]
    sending = asyncio.ensure_future(client.send(*(post(f'{{"input": "{text}"}}') for text in texts)))
    connection = stand.connection
    await settled(lambda: connection.gate.paused or connection.reader.waiting > number * 60_000)
    assert connection.gate.paused == (number == 90)
    stand.gateway.hold = False
    stand.gateway.release()
    assert (await client.answer()).json["output"] == "A"
    for text in texts:
        assert (await client.answer()).json["output"] == text
    await sending
    client.writer.write_eof()
    assert await client.ended()
    assert stand.gateway.abandoned == []
    await settled(lambda: not stand.door._connections())
    assert stand.nothing_held


@on_loop
async def test_a_watch_tells_once_and_forgets() -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    hangups = Hangups(asyncio.get_running_loop())
    pairs = {name: socket.socketpair() for name in ("left", "forgotten", "closed", "last")}
    for name, (here, _) in pairs.items():
        hangups.watch(here.fileno(), lambda name=name: told.put_nowait(name))  # type: ignore[misc]
    for _ in range(2):
        hangups.forget(pairs["forgotten"][0].fileno())
    number = pairs["closed"][0].fileno()
    pairs["closed"][0].close()
    hangups.forget(number)
    for name in ("left", "forgotten", "last"):
        pairs[name][1].close()
        if name != "forgotten":
            assert await told.get() == name
    for _ in range(2):
        hangups.close()
    assert told.empty()
    for pair in pairs.values():
        for end in pair:
            end.close()

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from time import monotonic
from typing import Any

import pytest
import structlog
import uvloop

from headway.config import Settings
from headway.errors import SettingError
from headway.http.routing import ClientLeft, Handler, Request, Route, RouteAnswer, Router, StreamedAnswer
from headway.http.server import connection
from headway.http.server.connection_context import GRACE
from headway.http.server.listener import Listener
from headway.runtime.counters import GatewayCounts
from headway.runtime.listening import HANDLES
from tests.http.stand import PATIENCE, Client, Stand, chunked, get, post, settled
from tests.scenes import Scene, as_test, scene

BODY = '{"input": "a"}'


def admin_door(app: Handler, **settings: Any) -> Listener:
    return Listener.admin(
        Settings(**{"admin_port": 0, **settings}), app, lambda: "00000000-0000-7000-8000-000000000000", GatewayCounts()
    )


def behind(app: Handler | Route, main: Callable[[Listener, Client], Awaitable[None]]) -> None:
    """Run `main` with a client of an admin door that serves an app or a single route."""

    async def bounded() -> None:
        door = admin_door(Router([app]) if isinstance(app, Route) else app, admin_host="localhost")
        await door.open()
        client = Client(*await asyncio.open_connection("127.0.0.1", door.port))
        try:
            async with asyncio.timeout(PATIENCE):
                await main(door, client)
        finally:
            client.writer.transport.abort()
            await door.close()

    run(bounded)


async def here(_: Request) -> RouteAnswer:
    return RouteAnswer(b"here")


async def whole(request: Request) -> bytes:
    return b"".join([piece async for piece in request.pieces()])


def on_loop(main: Scene) -> Callable[..., None]:
    return as_test(main, lambda **given: run(lambda: main(**given)), 0)


def on_door(app: Handler | Route) -> Callable[[Scene], Callable[..., None]]:
    return scene(lambda main: behind(app, main), 2)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@on_loop
async def test_an_address_that_cannot_be_had() -> None:
    for host, says in (("a" * 64 + ".invalid", "is not an address here"), ("192.0.2.1", "be bound on 192.0.2.1")):
        door = admin_door(Router(()), admin_host=host, admin_token="t")
        with pytest.raises(SettingError) as caught:
            await door.open()
        assert caught.value.setting == "admin_host"
        assert says in caught.value.reason and caught.value.hint
        await door.close()


def test_who_waits_when_the_door_closes_is_cut_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    asked = asyncio.Event()

    async def waits(_: Request) -> RouteAnswer:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody tells it")

    async def main(door: Listener, client: Client) -> None:
        await client.send(get("/"))
        await asked.wait()
        await door.close()
        assert await client.reader.read() == b""

    behind(Route("/", waits), main)
    assert not caplog.records


@on_loop
async def test_an_address_that_was_taken_refuses_callers_until_the_door_opens() -> None:
    door = admin_door(Router([Route("/", here)]))
    await door.bind()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", door.port)
    port = door.port
    await door.open()
    assert door.port == port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.transport.abort()
    await door.close()


@on_loop
async def test_a_door_that_was_never_opened_can_be_drained_and_closed() -> None:
    door = admin_door(Router(()))
    await door.drain()
    for _ in range(2):
        await door.close()


@on_loop
async def test_of_two_that_took_a_port_the_one_that_listens_first_has_it() -> None:
    first = admin_door(Router(()))
    await first.bind()
    second = admin_door(Router(()), admin_port=first.port)
    await second.bind()
    await second.open()
    with pytest.raises(SettingError, match="taken by another program"):
        await first.open()
    await first.close()
    await second.close()


@on_door(Route("/", here))
async def test_all_addresses_of_a_name_share_one_port_and_the_root_needs_no_path(
    door: Listener, client: Client
) -> None:
    for _, _, _, _, address in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM):
        other = Client(*await asyncio.open_connection(str(address[0]), door.port))
        assert (await other.ask(get("/"))).body == b"here"
        other.leave()
    for target in (b"http://a", b"http://a?x=1"):
        answer = await client.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % target)
        assert (answer.status, answer.body) == (200, b"here")


async def test_a_listener_that_dies_is_replaced(stand: Stand) -> None:
    (listener,) = stand.door._sockets
    client = await stand.connect()
    assert (await client.ask(post(BODY))).status == 200
    for server in listener._servers:
        server.close()
    stand.door.look_after()
    assert (await stand.ask(post(BODY))).status == 200
    assert (await client.ask(post(BODY))).status == 200, "open connections do not notice"


@on_door(Route("/", here))
async def test_drain_answers_who_was_not_accepted_yet(door: Listener, _: Client) -> None:
    callers = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(50)]
    for caller in callers:
        caller.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    # The loop hasn't run since then, so it can't have accepted them.
    await door.drain()
    for caller in callers:
        caller.settimeout(PATIENCE)
        with caller, caller.makefile("rb") as answer:
            assert answer.read().endswith(b"here")


@on_door(Route("/", here))
async def test_a_request_that_came_while_the_process_stood_still_is_answered(
    door: Listener, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    assert (await client.ask(request)).body == b"here"
    monkeypatch.setattr("headway.http.server.listener.monotonic", lambda: monotonic() + 3600.0)
    looked = asyncio.Event()

    def wake() -> None:
        """Send the request just before the door checks how late it is, so that it is still unread."""
        client.writer.write(request)
        door.look_after()
        looked.set()

    asyncio.get_running_loop().call_later(0.0, wake)
    await looked.wait()
    assert (await client.answer()).body == b"here"


async def test_drain_answers_what_is_held_or_begun_warns_who_is_active_and_takes_no_new_connection(
    stand: Stand,
) -> None:
    held = await stand.hold(post(BODY))
    stand.gateway.hold = False
    begun, active, refused, cold = [await stand.connect() for _ in range(4)]
    for client in (active, refused, cold):
        await client.ask(get("/livez"))
    whole = post(BODY)
    await begun.send(whole[:-3])
    await settled(lambda: any(open_.reader.open for open_ in stand.door._connections()))
    drained = asyncio.ensure_future(stand.door.drain())
    await asyncio.sleep(0)
    with pytest.raises(ConnectionError):
        await stand.connect()
    assert not drained.done()
    stand.gateway.release()
    await begun.send(whole[-3:])
    await active.send(post(BODY))
    await refused.send(post("{}"))
    await cold.send(get("/livez"))
    for client, status in ((held, 200), (begun, 200), (active, 200), (refused, 400), (cold, 200)):
        answer = await client.answer()
        assert (answer.status, answer.header["connection"]) == (status, "close")
        assert await client.ended()
    await drained


async def test_a_retired_door_takes_new_clients_keeps_idle_ones_and_ends_each_with_its_answer(stand: Stand) -> None:
    idle, active = await stand.connect(), await stand.connect()
    for client in (idle, active):
        assert "connection" not in (await client.ask(post(BODY))).header
    stand.door.retire()
    stand.later(GRACE + 1)
    for client in (active, await stand.connect(), idle):
        answer = await client.ask(post(BODY))
        assert (answer.status, answer.header["connection"]) == (200, "close")
        assert await client.ended()
    await stand.door.drain()


async def test_drain_leaves_idle_clients(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "GRACE", 0.0)
    silent, idle = await stand.connect(), await stand.connect()
    await idle.ask(post(BODY))
    await settled(lambda: len(stand.door._connections()) == 2)
    await stand.door.drain()
    assert await silent.ended()
    assert await idle.ended()


async def broken(request: Request) -> RouteAnswer:
    raise ZeroDivisionError


@on_door(Route("/", broken))
async def test_a_fault_of_the_app_is_answered_and_its_connection_kept(door: Listener, client: Client) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            assert (await client.ask(get("/"))).status == 500
    assert [line["event"] for line in logs] == ["a route failed"] * 2


async def breaks_off(request: Request) -> RouteAnswer:
    async def body() -> AsyncGenerator[bytes, None]:
        yield b"x"
        raise ZeroDivisionError

    return StreamedAnswer(body, {}, "text/plain")


@on_door(Route("/", breaks_off))
async def test_a_fault_in_the_middle_of_an_answer_cuts_the_connection(door: Listener, client: Client) -> None:
    await client.send(get("/"))
    assert (await client.reader.read()).endswith(b"1\r\nx\r\n")


async def echo(request: Request) -> RouteAnswer:
    return RouteAnswer(await whole(request))


@on_door(Route("/", echo, ("POST",)))
async def test_an_app_that_reads_its_body_gets_all_of_it(door: Listener, client: Client) -> None:
    large = b"x" * 900_000
    for sent, received in (
        (post(large, "/"), large),
        (post(b"abc", "/", "Connection: Upgrade", "Upgrade: h2c"), b"abc"),
        (chunked(b"abc", path="/", end=b"0\r\nX-T: u\r\n\r\n"), b"abc"),
        (post(b"", "/"), b""),
    ):
        assert (await client.ask(sent[:100], sent[100:])).body == received
    whole = post(b"abc", "/", "Expect: 100-continue")
    assert (await client.ask(whole[:-3])).status == 100
    assert (await client.ask(whole[-3:])).body == b"abc"


@pytest.mark.parametrize(
    ("more", "later", "code"),
    [(b"200000\r\n" + b"x" * 1_200_000, 0.0, "PAYLOAD_TOO_LARGE"), (b"5\r\nx", 11.0, "REQUEST_TIMEOUT"), (b"zz\r\n", 0.0, "BAD_REQUEST")],
)  # fmt: skip
def test_an_app_whose_client_oversteps_sees_it_leave(more: bytes, later: float, code: str) -> None:
    entered, left = asyncio.Event(), asyncio.Event()
    doors: list[Listener] = []

    async def reads(request: Request) -> RouteAnswer:
        entered.set()
        with pytest.raises(ClientLeft):
            await whole(request)
        assert doors[0]._connections(), "it is told before the connection is gone"
        left.set()
        return RouteAnswer(b"too late")

    async def main(door: Listener, client: Client) -> None:
        doors.append(door)
        await client.send(chunked(path="/"))
        await entered.wait()
        await client.send(more)
        door.sweep(monotonic() + later)
        assert (await client.answer()).error == code
        assert await client.ended()
        await left.wait()

    behind(Route("/", reads, ("POST",)), main)


async def talks(request: Request) -> RouteAnswer:
    async def body() -> AsyncGenerator[bytes, None]:
        yield b"x"
        async for _ in request.pieces():
            yield b"y"

    return StreamedAnswer(body, {}, "text/plain")


@on_door(Route("/", talks, ("POST",)))
async def test_a_bad_body_in_the_middle_of_an_answer_cuts_the_connection(door: Listener, client: Client) -> None:
    await client.send(chunked(path="/"))
    assert (await client.reader.readuntil(b"1\r\nx\r\n")).startswith(b"HTTP/1.1 200 ")
    await client.send(b"zz\r\n")
    with contextlib.suppress(ConnectionError):
        assert await client.reader.read() == b""


async def test_connections_that_have_come_together_are_accepted_several_in_a_turn(stand: Stand) -> None:
    callers = [socket.create_connection(("127.0.0.1", stand.door.port)) for _ in range(8 * HANDLES)]
    turns = 0
    while len(stand.door._connections()) < len(callers):
        turns += 1
        await asyncio.sleep(0)
    assert turns <= 16
    for caller in callers:
        caller.close()

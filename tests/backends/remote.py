"""Remote APIs that misbehave, real servers on loopback."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.targets.faults import NO_TEXT

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler, path: str = "/batch") -> AsyncIterator[str]:
    """URL at which `handler` answers POST and GET requests."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post(path, handler)
    app.router.add_get(path, handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
    finally:
        await runner.cleanup()


Raw = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served_raw(talk: Raw, path: str = "/batch") -> AsyncIterator[str]:
    """URL at which `talk` is had with each connection, which is reset after it."""
    tasks: set[asyncio.Task[Any]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await talk(reader, writer)
            linger_not = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_not)
        except (asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        await server.wait_closed()


def faulty(read: Callable[[bytes], list[str]], write: Callable[[list[Any]], web.Response]) -> Handler:
    """Goes wrong like `tests.targets.faults`, as far as a remote API can, in the dialect that `read` and `write` speak."""

    async def handle(request: web.Request) -> web.StreamResponse:
        inputs = read(await request.read())
        wrong = next((text for text in inputs if text in _BATCH), None)
        answer = [output_of(text) for text in inputs] if wrong is None else await _BATCH[wrong](request, inputs)
        return write(answer) if isinstance(answer, list) else answer

    return handle


def output_of(text: str) -> Any:
    """Output for a text, which may be none that a remote API may give."""
    given = NO_TEXT.get(text, text.upper())
    return None if isinstance(given, bytes | Exception) else given


async def _raise(request: web.Request, inputs: list[str]) -> web.StreamResponse:
    return web.Response(status=400, text="what is\nthis")


async def _exit(request: web.Request, inputs: list[str]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _hang(request: web.Request, inputs: list[str]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _short(request: web.Request, inputs: list[str]) -> list[str]:
    return ["one"] * (len(inputs) - 1)


async def _long(request: web.Request, inputs: list[str]) -> list[str]:
    return ["one"] * (len(inputs) + 1)


async def _dict(request: web.Request, inputs: list[str]) -> web.StreamResponse:
    return web.json_response(dict.fromkeys(inputs, "one"))


async def _text(request: web.Request, inputs: list[str]) -> web.StreamResponse:
    return web.json_response("x" * len(inputs))


_BATCH: dict[str, Callable[[web.Request, list[str]], Awaitable[web.StreamResponse | list[str]]]] = {
    "raise": _raise,
    "exit": _exit,
    "hang": _hang,
    "short": _short,
    "long": _long,
    "dict": _dict,
    "text": _text,
}

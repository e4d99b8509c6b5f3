"""Real HTTP servers on loopback that act as misbehaving remote APIs."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.targets.faults import NO_TEXT

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler, path: str = "/batch", tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve POST and GET requests with `handler`, and yield the URL."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post(path, handler)
    app.router.add_get(path, handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}{path}"
    finally:
        await runner.cleanup()


Raw = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served_raw(talk: Raw, path: str = "/batch", scheme: str = "http") -> AsyncIterator[str]:
    """Call `talk` for each connection, then reset it. Yields the URL."""
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
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        await server.wait_closed()


def faulty(read: Callable[[bytes], list[str]], write: Callable[[list[Any]], web.Response]) -> Handler:
    """Return a handler that fails like `tests.targets.faults`, as far as possible, in the dialect of `read` and `write`."""

    async def handle(request: web.Request) -> web.StreamResponse:
        inputs = read(await request.read())
        for text in inputs:
            match text:
                case "raise":
                    return web.Response(status=400, text="what is\nthis")
                case "exit":
                    assert request.transport is not None
                    request.transport.abort()
                case "hang":
                    await asyncio.Event().wait()
                case "short" | "long":
                    return write(["one"] * (len(inputs) + (1 if text == "long" else -1)))
                case "dict":
                    return web.json_response(dict.fromkeys(inputs, "one"))
                case "text":
                    return web.json_response("x" * len(inputs))
        return write([output_of(text) for text in inputs])

    return handle


def output_of(text: str) -> Any:
    """Return the output for an input. Some inputs get an output that no remote API may give."""
    given = NO_TEXT.get(text, text.upper())
    return None if isinstance(given, bytes | Exception) else given

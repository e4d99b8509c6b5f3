"""A network between client and server that is slow, silent or cut when a test wants it."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from tests.e2e.client import PATIENCE
from tests.servers.ports import LOOPBACK

T = TypeVar("T")

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes `close` send RST."""


class ChaosProxy:
    """A TCP proxy to a loopback port, in its own thread. Its thread-safe methods return once they have taken effect."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.latency = 0.0
        self.open = asyncio.Event()
        self._links: set[_Link] = set()
        self._listener = socket.create_server((LOOPBACK, 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)

    def delay(self, seconds: float) -> None:
        self._do(self._set(seconds, self.open.is_set()))

    def black_hole(self) -> None:
        """From now on accept connections, but pass nothing in either direction (half-open)."""
        self._do(self._set(self.latency, False))

    def normal(self) -> None:
        """Pass everything without delay again; what a black hole held back arrives late."""
        self._do(self._set(0.0, True))

    def cut(self) -> int:
        """Reset all connections and lose what is on its way. New ones are accepted. Returns how many were reset."""
        return self._do(self._cut())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _do(self, act: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(PATIENCE)

    async def _set(self, latency: float, open: bool) -> None:
        self.latency = latency
        if open:
            self.open.set()
        else:
            self.open.clear()

    async def _cut(self) -> int:
        links = list(self._links)
        for link in links:
            link.cut()
        await asyncio.gather(*(link.task for link in links))
        return len(links)

    def _run(self) -> None:
        self.open.set()
        accepting = self._loop.create_task(self._accept())
        try:
            self._loop.run_forever()
        finally:
            accepting.cancel()
            self._loop.run_until_complete(self._cut())
            self._listener.close()
            self._loop.close()

    async def _accept(self) -> None:
        while True:
            accepted, _ = await self._loop.sock_accept(self._listener)
            link = _Link(self, accepted)
            self._links.add(link)
            link.task.add_done_callback(lambda _, link=link: self._links.discard(link))  # type: ignore[misc]


class _Link:
    def __init__(self, proxy: ChaosProxy, accepted: socket.socket) -> None:
        self._proxy = proxy
        self._near = accepted
        self._far = socket.socket()
        self._far.setblocking(False)
        for end in (self._near, self._far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.task = asyncio.get_running_loop().create_task(self._serve())

    def cut(self) -> None:
        if self.task.done():  # It is closed, and about to be forgotten.
            return
        for end in (self._near, self._far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.task.cancel()

    async def _serve(self) -> None:
        with self._near, self._far, contextlib.suppress(OSError, asyncio.CancelledError):
            await self._proxy.open.wait()
            try:
                await asyncio.get_running_loop().sock_connect(self._far, (LOOPBACK, self._proxy.target))
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass(self._near, self._far))
                    both.create_task(self._pass(self._far, self._near))
            except* OSError:
                # If one end takes no more, the other needn't send it.
                self._near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    async def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        """Read immediately, and write when due, in the same order."""
        loop = asyncio.get_running_loop()
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                due, chunk = await held.get()
                await asyncio.sleep(due - loop.time())
                await self._proxy.open.wait()
                if not chunk:
                    sink.shutdown(socket.SHUT_WR)
                    return
                await loop.sock_sendall(sink, chunk)

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            chunk = b"."
            while chunk:
                chunk = await loop.sock_recv(source, _CHUNK)
                held.put_nowait((loop.time() + self._proxy.latency, chunk))

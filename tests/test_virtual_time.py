"""The clock jumps only when nothing else can happen."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tests.servers.redis import RedisServer, SharedServers
from tests.virtual_time import ServedLoop, run

T = TypeVar("T")


def served(url: str, main: Callable[[ServedLoop, Any], Coroutine[Any, Any, T]]) -> T:
    """Run `main(loop, client)` on a loop that waits for a server."""

    async def connected() -> T:
        async with Redis.from_url(url, socket_timeout=None, retry=Retry(NoBackoff(), 0)) as asked:
            return await main(loop, asked)

    loop = ServedLoop(url)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(connected())


def test_to_wait_for_nothing_is_an_error() -> None:
    async def main(clock: Callable[[], float]) -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="stands still"):
        run(main)


@pytest.mark.processes
def test_an_answer_comes_before_time_passes_and_where_none_comes_the_timer_fires_at_once(
    servers: SharedServers,
) -> None:
    async def main(loop: ServedLoop, asked: Any) -> None:
        start = loop.time()
        for number in range(1, 101):
            words = [b"x" * 50 * number] * 100
            assert await asyncio.wait_for(asked.rpush("list", *words), 0.001) == 100
            assert await asyncio.wait_for(asked.lrange("list", 0, -1), 0.001) == words
            await asked.delete("list")
        assert loop.time() == start
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asked.execute_command("BLPOP", "nothing", 0), 3600.0)
        assert loop.time() == start + 3600.0

    served(servers.of("valkey").url, main)


@pytest.mark.processes
def test_a_command_that_has_come_in_part_is_waited_for(servers: SharedServers) -> None:
    url = servers.of("valkey").url
    loop, address = ServedLoop(url), urlsplit(url)
    try:
        with socket.create_connection((address.hostname, address.port)) as line:
            assert loop.hear()
            line.sendall(b"*2\r\n$4\r\nECHO\r\n")  # Ends with an argument: nothing is left in the server's buffer.
            assert not loop.hear()
            line.sendall(b"$2\r\nhi\r\n")
            assert line.recv(64) == b"$2\r\nhi\r\n"
            assert loop.hear()
    finally:
        loop.close()


@pytest.mark.processes
def test_who_is_woken_by_another_is_woken_before_time_passes(servers: SharedServers) -> None:
    async def main(loop: ServedLoop, asked: Any) -> None:
        start = loop.time()
        for number in range(100):
            name = f"list-{number % 3}"
            waiting = asyncio.create_task(asyncio.wait_for(asked.execute_command("BLPOP", name, 0), 10.0))
            if number % 2:
                await loop.settle()
                assert not waiting.done()
            await asked.rpush(name, number)
            assert (await waiting)[1] == str(number).encode()
        assert loop.time() == start

    served(servers.of("valkey").url, main)


@pytest.mark.processes
def test_not_even_a_server_is_waited_for_for_ever(servers: SharedServers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(loop: ServedLoop, asked: Any) -> None:
        await asked.execute_command("BLPOP", "nothing", 0)

    monkeypatch.setattr(ServedLoop, "patience", 0.01)
    with pytest.raises(RuntimeError, match="stands still"):
        served(servers.of("valkey").url, main)


@pytest.mark.processes
def test_a_server_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer("valkey", tmp_path) as server:

        async def main(loop: ServedLoop, asked: Any) -> None:
            await asyncio.sleep(1.0)
            server.pause()
            loop._lines[0].close()
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="does not answer"):
                patch.setattr("tests.virtual_time.PATIENCE", 0.05)
                loop.hear()
            loop._lines[0].close()
            server.resume()

        served(server.url, main)

"""Coming up and going down: no accepted request is failed, nothing is left behind, and a bad start says why."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import NamedTuple

from headway.http.server.connection_context import GRACE
from tests.e2e.client import PATIENCE, Gate, request, wait_until
from tests.e2e.server import ROOT, launched
from tests.targets.gates import SETUP_GATE

UNHAPPY = {"batch failed", "worker process ended"}


class Line(NamedTuple):
    """A connection that is kept, and when a request last left on it, in seconds of the loop."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: float


class Load:
    """Open-loop load on connections that are kept, one request at a time on each.

    Attributes:
        sent, answered: how many, up to now.
        wrong: what was answered and is not the right answer, or what befell a connection that carried a request; but who
            is silent for so long that a draining service leaves it without a word cannot know that.
    """

    def __init__(self, port: int, rate: float) -> None:
        self._port, self._gap = port, 1.0 / rate
        self.sent = self.answered = 0
        self.wrong: list[object] = []

    async def run(self, connections: int, signal_after: int, send_signal: asyncio.Event) -> None:
        """Send requests until every connection has heard that it ends; set the event after so many answers."""
        idle: asyncio.Queue[Line] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for _ in range(connections):
            begun = loop.time()
            idle.put_nowait(Line(*await asyncio.open_connection("127.0.0.1", self._port), begun))
        self._left = connections
        due = loop.time()
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            while self._left:
                if self.answered >= signal_after:
                    send_signal.set()
                due += self._gap
                if (pause := due - loop.time()) > 0:
                    await asyncio.sleep(pause)
                if not idle.empty():
                    tasks.create_task(self._ask(idle, idle.get_nowait()))

    async def _ask(self, idle: asyncio.Queue[Line], line: Line) -> None:
        reader, writer, used = line
        self.sent += 1
        text = f"request {self.sent}"
        begun = asyncio.get_running_loop().time()
        writer.write(request(json.dumps({"input": text}).encode()))
        silent = asyncio.get_running_loop().time() - used > GRACE / 2
        last, head = True, b""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            answer = json.loads(await reader.readexactly(length))
            self.answered += 1
            if answer.get("output") != text.upper():
                self.wrong.append(answer)
            last = b"connection: close" in head
            if last and await reader.read():
                self.wrong.append("bytes after the last answer")
        except (OSError, asyncio.IncompleteReadError) as exc:
            if silent and not head and not getattr(exc, "partial", b""):
                self.sent -= 1
            else:
                self.wrong.append(exc)
        if last:
            self._left -= 1
            writer.close()
        else:
            idle.put_nowait(Line(reader, writer, begun))


def closed(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


def test_a_signal_under_load_fails_no_request(tmp_path: Path) -> None:
    flags = "--workers", "2", "--max-batch-size", "100"
    target, slow = str(ROOT / "examples/emulated_gpu.py:EmulatedGPU"), {"EMULATED_MS": "40"}
    with launched(tmp_path, *flags, target=target, environ=slow) as server:
        server.ready()
        load, now = Load(server.port, rate=400), asyncio.Event()

        async def main() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load.run(60, 300, now))
                await now.wait()
                server.signal()

        asyncio.run(main())
        assert load.wrong == []
        assert load.sent == load.answered > 300
        server.check_end()


def test_a_second_signal_ends_the_drain_with_503_for_what_is_held(tmp_path: Path) -> None:
    with launched(tmp_path) as server:
        server.ready()
        gate = Gate(tmp_path)
        held = [server.ask(gate.text())]
        gate.reached()
        held += [server.ask(f"waiting {number}") for number in range(50)]
        server.queued(50)
        server.signal()
        server.logged("draining")
        server.signal()
        server.logged("a second signal: ending at once")
        for one in held:
            assert one.refusal() == "DRAINING"
        server.expected = UNHAPPY
        server.check_end()


def test_silent_clients_and_one_that_does_not_read_do_not_hold_up_the_end(tmp_path: Path) -> None:
    with launched(tmp_path, "--read-timeout-ms", "1000") as server:
        server.ready()
        silent = [server.connect() for _ in range(20)]
        half = server.connect()
        half.send(b"POST /v1/inference HTTP/1.1\r\nHost: e2e\r\nContent-Le")
        server.answer_to = lambda text: "x" * 12_000_000
        deaf = server.ask("big 12000000")
        wait_until(lambda: server.metrics().value("requests_total", outcome="ok"))
        server.signal()
        assert server.ended() == 0
        deaf.leave()
        for connection in (*silent, half):
            connection.close()
        server.check_end()


def test_a_signal_ends_a_slow_start(tmp_path: Path) -> None:
    gate = Gate(tmp_path, SETUP_GATE)
    with launched(tmp_path, "--workers", "2") as server:
        gate.reached()
        server.signal(signal.SIGINT)
        assert server.ended() == 0
        assert server.banner() == ""
        server.expected = UNHAPPY
        server.check_end()


def test_a_killed_service_leaves_no_worker_behind(tmp_path: Path) -> None:
    with launched(tmp_path, "--workers", "2") as server:
        server.ready()
        server.ask("hang")
        wait_until(lambda: sum(worker["in_flight"] for worker in server.workers()))
        server.signal(signal.SIGKILL)
        assert server.ended() == -signal.SIGKILL
        wait_until(lambda: not server.processes())

"""A fake Redis server, for measuring what the client side costs. It runs in its own thread, so its work isn't counted.

It has one queue. When a test calls `depart`, everything enqueued so far leaves as a batch.
"""

import asyncio
import contextlib
import math
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import hiredis

from headway.brokers.redis import wire
from headway.brokers.redis.entry_wire import pack_entry, read_payloads
from headway.core.departure import Load
from headway.core.slot_factors import FACTORS
from headway.model import Entry

BORN = 1.0
READ_AT = 7
"""Position in an enqueue of what was read; then come the extras, and the head and payload of each entry."""


def load(now: float, slots: int = 1) -> bytes:
    """Return a queue's load as the Redis functions encode it."""
    known = Load(rate=2000.0, alpha=0.01, beta=0.0, slots=slots, max_batch=64)
    return struct.pack(wire.LOAD_FORMAT, now, BORN, *(getattr(known, name) for name in wire.LOAD), *[0] * len(FACTORS))


class Peer:
    """The server, as a context manager. `calls` counts calls by name. `blocked` is set once a client waits for a wake-up."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: dict[str, int] = {}
        self.blocked = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="peer", daemon=True)
        self._up = threading.Event()
        self._payloads: list[bytes] = []
        self._leases: list[list[bytes]] = []
        self._number = 0
        self._replies: list[tuple[bytes, list[bytes]]] = []
        self._wakeup = b""
        self._changed = asyncio.Condition()

    def __enter__(self) -> Self:
        self._thread.start()
        self._up.wait()
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def waiting(self) -> int:
        return len(self._payloads)

    def put(self, entries: Sequence[Entry]) -> None:
        self._payloads += map(pack_entry, entries)

    def depart(self, worker: str) -> None:
        """Make the queued entries leave as a batch, and wake `worker`, whose last claim returned nothing."""
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._depart(worker)))

    def answer(self, outputs: Callable[[Any], str]) -> None:
        payloads, self._payloads = self._payloads, []
        entries = read_payloads(payloads)
        run = wire.WireRun(wire.SCHEMA, "gpu-0", "", [
            wire.WireReply(position, entry.id, entry.tenant, outputs(entry.input), None, 0.001, entry.nonce)
            for position, entry in enumerate(entries)
        ])  # fmt: skip
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._send(wire.encode(run), len(entries))))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        self._up.set()
        self._loop.run_forever()
        server.close()
        serving = asyncio.all_tasks(self._loop)
        for task in serving:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*serving, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader()
        with contextlib.suppress(asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                commands.feed(data)
                while (command := commands.gets()) is not False:
                    writer.write(_packed(await self._do(command)))
        writer.transport.abort()

    async def _do(self, command: list[bytes]) -> Any:
        name = command[0].decode()
        if name == "FCALL":
            name = command[1].decode().rpartition("_")[2]
        self.calls[name] = self.calls.get(name, 0) + 1
        handler = getattr(self, f"_{name.lower()}", None)
        if handler is None:
            return wire.pack_numbers((self._now(), BORN))
        return await handler(command)

    def _now(self) -> float:
        return self._loop.time()

    async def _client(self, command: list[bytes]) -> str:
        return "OK"

    _function = _client

    async def _info(self, command: list[bytes]) -> bytes:
        return b"redis_version:7.0.15\r\nredis_mode:standalone\r\nmaxmemory:0\r\nused_memory:1\r\nmaxmemory_policy:noeviction\r\n"

    async def _config(self, command: list[bytes]) -> list[str]:
        return ["maxmemory-policy", "noeviction"]

    async def _enqueue(self, command: list[bytes]) -> list[Any]:
        names, tokens = (int(count) for count in command[READ_AT + 2 : READ_AT + 4])
        self._payloads += command[READ_AT + 4 + names + tokens + 1 :][1::2]
        return [wire.pack_numbers((self._now(), BORN, -1.0, 0.01)), [], b""]

    async def _claim(self, command: list[bytes]) -> list[Any]:
        now = self._now()
        if len(command[-1]) == 16:  # The claim has no departure rule.
            return [b"load", load(now)]
        if not self._leases:
            return [b"wait", wire.pack_numbers((math.inf,)), load(now)]
        payloads = self._leases.pop()
        self._number += 1
        numbers = wire.pack_numbers((now, self._number, now, now + 3.0, 5.0, 1))
        return [b"lease", numbers, b"early", wire.pack_numbers([now] * len(payloads)), payloads]

    async def _complete(self, command: list[bytes]) -> list[Any]:
        return [1, 0, load(self._now())]

    async def _together(self, command: list[bytes]) -> list[Any]:
        library, answers, rest = command[1].rpartition(b"_")[0], list[Any](), command[4:]
        while rest:
            (name, key, count), rest = rest[:3], rest[3:]
            arguments, rest = rest[: int(count)], rest[int(count) :]
            answers.append([1, await self._do([b"FCALL", library + b"_" + name, b"1", key, *arguments])])
        return answers

    async def _extend(self, command: list[bytes]) -> int:
        return 1

    async def _blpop(self, command: list[bytes]) -> list[bytes] | None:
        async with self._changed:
            self.blocked = True
            await self._changed.wait_for(lambda: self._wakeup)
            found, self._wakeup = self._wakeup, b""
        return [command[1], found]

    async def _xread(self, command: list[bytes]) -> list[Any]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._replies)
            found, self._replies = self._replies, []
        return [[command[4], [list(one) for one in found]]]

    async def _depart(self, worker: str) -> None:
        self._leases.append(self._payloads)
        self._payloads = []
        async with self._changed:
            self._wakeup = wire.pack_numbers((0.0,)) + load(self._now()) + worker.encode()
            self._changed.notify_all()

    async def _send(self, run: bytes, size: int) -> None:
        self._number += 1
        fields = {
            "v": b"1", "k": b"ran", "d": run, "t": b"1.0", "e": b"1.01", "n": b"%d" % size, "a": b"1", "x": b""
        }  # fmt: skip
        flat = [part for name, value in fields.items() for part in (name.encode(), value)]
        async with self._changed:
            self._replies.append((b"%d-0" % self._number, flat))
            self._changed.notify_all()


def _packed(answer: Any) -> bytes:
    """Encode an answer in the Redis protocol."""
    if answer is None:
        return b"*-1\r\n"
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, str) and answer == "OK":
        return b"+OK\r\n"
    if isinstance(answer, str | bytes):
        text = answer.encode() if isinstance(answer, str) else answer
        return b"$%d\r\n%b\r\n" % (len(text), text)
    assert isinstance(answer, Sequence)
    return b"*%d\r\n%b" % (len(answer), b"".join(map(_packed, answer)))

"""The same requests through all doors at once, of several tenants and tiers: each is answered for itself, and all are one to the
limits, the ledger and the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sqlite3
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.e2e.client import wait_until
from tests.e2e.server import TIERS, Server, launched
from tests.identity.writing import entry, key_of
from tests.promises import client
from tests.promises.calls import Stream, answered, channel
from tests.promises.journal import runs_in
from tests.promises.operation import mark_of, text_of
from tests.promises.ways_in import NATIVE, VECTOR, WAYS_IN, WayIn
from tests.servers.ports import Port
from tests.servers.redis import RedisServer

REQUESTS, CAPPED, AT_ONCE = 1000, 150, 96
BURST = 120
"""Requests that the tenant `capped` may send in all; it earns the next one after hours."""
MOST = 4
TIER = {"acme": "enterprise", "globex": "paid", "initech": "free", "capped": "paid"}
TARGET = "tests.targets.marked:Marked"
PATIENT = ("--request-timeout-ms", "30000", "--queue-timeout-ms", "30000", "--task-timeout-ms", "30000")


@dataclass
class Asked:
    """One request, and what became of it."""

    way: WayIn
    tenant: str
    texts: Sequence[str]
    tier: str
    task: bool = False
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: int = 0
    code: str = ""
    outputs: list[str] = field(default_factory=list)

    def fields(self) -> list[str]:
        """Header fields of every way."""
        found = [f"Authorization: Bearer {key_of(self.tenant)}"]
        found += [f"X-Request-Tier: {self.tier}"] if self.tier != TIER[self.tenant] else []
        return found

    def metadata(self, *more: str) -> list[tuple[str, str]]:
        """The same as metadata of a call."""
        named = (one.partition(": ") for one in (*self.fields(), *more))
        return [(name.lower(), value) for name, _, value in named]


class Gateway:
    """Connections of all clients to one gateway."""

    def __init__(self, http: int, grpc: int) -> None:
        self.door = client.Door("gateway", http)
        self.channels = itertools.cycle([channel(grpc) for _ in range(3)])
        self.streams: dict[tuple[str, str], Stream] = {}

    async def ask(self, asked: Asked, elsewhere: Gateway) -> None:
        """Ask one request; a task is asked for at another gateway."""
        sent = asked.way.write(asked.texts)
        chosen = f"X-Request-Id: req_{asked.id}"
        match asked.way.wire:
            case "http":
                await self._http(asked, elsewhere)
            case "call":
                method = next(self.channels).unary_unary(sent.path)
                found = await answered(asked.way, method(sent.body, metadata=asked.metadata(chosen), timeout=60.0))
                assert found.fields["x-request-id"] == f"req_{asked.id}"
                asked.status, asked.code, asked.outputs = found.status, found.code, found.told.outputs
            case _:
                found = await self._stream(asked, sent.path).ask(sent, asked.texts[0])
                asked.status, asked.code, asked.outputs = found.status, found.code, found.told.outputs

    async def close(self) -> None:
        """End the streams in order, and leave."""
        for stream in self.streams.values():
            await stream.close()
        for _ in range(3):
            await next(self.channels).close()
        while self.door.free:
            self.door.free.pop().leave("close")

    def _stream(self, asked: Asked, method: str) -> Stream:
        key = asked.tenant, asked.tier
        if key not in self.streams:
            self.streams[key] = Stream(next(self.channels).stream_stream(method)(metadata=asked.metadata()))
        return self.streams[key]

    async def _http(self, asked: Asked, elsewhere: Gateway) -> None:
        sent = asked.way.write(asked.texts)
        fields = [*sent.fields, *asked.fields(), f"X-Request-Id: req_{asked.id}"]
        fields += ["Prefer: respond-async"] if asked.task else []
        head, body = await self.exchange("POST", sent.path, fields, sent.body)
        assert head.fields["x-request-id"] == f"req_{asked.id}"
        if head.status == 202:
            path = f"/v1/result/req_{asked.id}?wait=30"
            head, body = await elsewhere.exchange("GET", path, asked.fields(), b"")
        told = asked.way.read(head.status, head.fields, body)
        asked.status, asked.code, asked.outputs = head.status, told.code, told.outputs

    async def exchange(self, method: str, path: str, fields: Sequence[str], body: bytes) -> tuple[client.Head, bytes]:
        """One exchange over HTTP, on a connection that carries nothing else meanwhile."""
        connection = await client.connect(self.door)
        connection.expect()
        lines = [f"{method} {path} HTTP/1.1", "Host: doors", f"Content-Length: {len(body)}", *fields, "", ""]
        connection.send("\r\n".join(lines).encode() + body)
        head, told = await connection.head, await connection.body
        assert not connection.unasked
        self.door.free.append(connection)
        return head, told


def requests(rng: random.Random) -> list[Asked]:
    """Requests by every way, tenant and tier, in any order."""
    made: list[Asked] = []
    tenants = [tenant for tenant in TIER if tenant != "capped"]
    for number in range(REQUESTS + CAPPED):
        way = WAYS_IN[number % len(WAYS_IN)]
        tenant = tenants[number % 3] if number < REQUESTS else "capped"
        word = VECTOR if way.numbers or rng.random() < 0.1 else "text"
        texts = [f"{word} {number}-{place} of {tenant}" for place in range(rng.randint(1, min(way.most, MOST)))]
        task = way.tasks and rng.random() < 0.4
        made.append(Asked(way, tenant, texts, rng.choice(("free", TIER[tenant])), task))
    rng.shuffle(made)
    return made


async def ask_all(gateways: Sequence[Gateway], asked: Sequence[Asked]) -> None:
    """Ask all of it, with many under way at once, each at a gateway of its own."""
    room = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int, one: Asked) -> None:
        async with room:
            await gateways[number % len(gateways)].ask(one, gateways[(number + 1) % len(gateways)])

    await asyncio.gather(*(ask(number, one) for number, one in enumerate(asked)))


def units(asked: Sequence[Asked]) -> int:
    """Inputs of all requests that were answered."""
    return sum(len(one.texts) for one in asked if one.status == 200)


def withdrawable(asked: Sequence[Asked]) -> int:
    """Inputs behind the first of lists that were refused. Where the broker refuses the first, they are withdrawn, and may have run."""
    return sum(len(one.texts) - 1 for one in asked if one.status != 200)


async def drive(gateways: Sequence[Gateway]) -> list[Asked]:
    """All requests; then what is left of the limit is used up by the native route, and each way finds it so."""
    asked = requests(random.Random(11))
    await ask_all(gateways, asked)
    capped = [one for one in asked if one.tenant == "capped"]
    assert BURST - MOST < units(capped) <= BURST, "what is refused is charged, or what is charged is not counted"
    rest = [Asked(NATIVE, "capped", [f"text rest {number}"], "paid") for number in range(BURST - units(capped))]
    await ask_all(gateways, rest)
    assert {one.status for one in rest} <= {200}
    over = [
        Asked(way, "capped", [f"{VECTOR} over {number} {way.name}"], "paid")
        for way in WAYS_IN
        for number in range(len(gateways))
    ]
    await ask_all(gateways, over)
    assert {(one.way.name, one.status, one.code) for one in over} == {
        (way.name, 429, "RATE_LIMITED") for way in WAYS_IN
    }
    for gateway in gateways:
        await gateway.close()
    return [*asked, *rest, *over]


@contextlib.contextmanager
def one_process(folder: Path, flags: Sequence[str]) -> Iterator[list[tuple[Server, int]]]:
    """One process with both ports."""
    with (
        contextlib.closing(Port()) as port,
        launched(folder, *flags, "--workers", "2", "--grpc-port", str(port.number), target=TARGET) as server,
    ):
        server.ready()
        yield [(server, port.number)]
        server.signal()
        server.check_end()


@contextlib.contextmanager
def two_gateways(folder: Path, flags: Sequence[str]) -> Iterator[list[tuple[Server, int]]]:
    """Two gateways and a worker host over Redis."""
    with ExitStack() as stack:
        ports = [stack.enter_context(contextlib.closing(Port())) for _ in range(2)]
        redis = stack.enter_context(RedisServer("valkey", folder / "redis"))
        broker = ("--broker", redis.url, "--broker-timeout-ms", "20000", *TIERS)
        worker = stack.enter_context(launched(folder, *broker, "--workers", "2", target=TARGET, role="worker"))
        gateways = [
            stack.enter_context(
                launched(
                    folder, *broker, *flags, "--name", f"gateway-{port.number}", "--grpc-port", str(port.number), role="gateway"
                )
            )
            for port in ports
        ]  # fmt: skip
        for server in (worker, *gateways):
            server.ready()
        yield [(server, port.number) for server, port in zip(gateways, ports, strict=True)]
        for server in (*gateways, worker):
            server.signal()
            server.check_end()


@pytest.mark.parametrize("service", [one_process, two_gateways], ids=["memory", "redis"])
def test_a_thousand_requests_through_all_doors_at_once(
    tmp_path: Path, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMISES_MS", "1")
    keys = [
        entry(name, name, name, tier, f"rate = 0.001\nburst = {BURST}" if name == "capped" else "rate = 0")
        for name, tier in TIER.items()
    ]
    (tmp_path / "keys.toml").write_text("\n".join(keys))
    flags = [*PATIENT, *TIERS, "--keys", "keys.toml", "--ledger", "sqlite:///ledger.db"]
    with service(tmp_path, flags) as servers:

        async def main() -> list[Asked]:
            return await drive([Gateway(server.port, grpc) for server, grpc in servers])

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            asked = runner.run(main())
        check_answers(tmp_path, asked)
        check_metrics([server for server, _ in servers], asked)
    check_ledger(tmp_path, asked)


def check_answers(folder: Path, asked: Sequence[Asked]) -> None:
    """Each text is answered for itself, by a run of its own."""
    marks: Counter[str] = Counter()
    for one in asked:
        if one.tenant != "capped":
            assert one.status == 200, (one.way.name, one.status, one.code)
        if one.status == 200:
            inputs = [one.way.input_of(text).upper() for text in one.texts]
            assert [text_of(output) for output in one.outputs] == inputs
            marks.update(mark_of(output) for output in one.outputs)
        else:
            assert (one.status, one.code) == (429, "RATE_LIMITED")
    ran = Counter(text for run in runs_in(folder / "journal") for text in run.inputs if " " in text)
    assert max(marks.values()) == max(ran.values()) == 1, "something ran twice, or one answer was given twice"
    assert marks.total() == units(asked)
    withdrawn = {text for one in asked if one.status != 200 for text in one.texts[1:]}
    answered = {one.way.input_of(text) for one in asked if one.status == 200 for text in one.texts}
    assert answered <= ran.keys() <= answered | withdrawn


def check_metrics(servers: Sequence[Server], asked: Sequence[Asked]) -> None:
    """What all gateways count together is what the clients saw."""
    wait_until(lambda: not any(server.health()["pending"] for server in servers))
    seen = Counter[tuple[str, str]]()
    for one in asked:
        ok = one.status == 200
        seen[(one.tier, "ok") if ok else ("", one.code.lower())] += len(one.texts) if ok else 1
    told = Counter[tuple[str, str]]()
    for sample in itertools.chain.from_iterable(server.metrics().samples for server in servers):
        if sample.name == "headway_requests_total" and sample.value:
            outcome = sample.labels["outcome"]
            # Who is over a limit is refused before it is known which tier the request asks for.
            told[sample.labels["tier"] if outcome == "ok" else "", outcome] += int(sample.value)
    assert told.pop(("", "cancelled"), 0) <= withdrawable(asked)
    assert told == seen
    refused = sum(server.metrics().value("refusals_total", reason="rate") for server in servers)
    assert refused == sum(one.status == 429 for one in asked)


def check_ledger(folder: Path, asked: Sequence[Asked]) -> None:
    """Each input that was answered has one row, each request that was refused is counted once."""
    query = "SELECT id, tenant, tier, status, error, requests FROM headway_requests"
    with contextlib.closing(sqlite3.connect(folder / "ledger.db")) as connection:
        rows = connection.execute(query).fetchall()
    completed = [row for row in rows if row[3] == "completed"]
    assert len({row[0] for row in completed}) == len(completed)
    expected = Counter[tuple[str, str]]()
    for one in asked:
        expected[one.tenant, one.tier] += len(one.texts) if one.status == 200 else 0
    assert Counter((tenant, tier) for _, tenant, tier, *_ in completed) == +expected
    firsts = {uuid.UUID(one.id).bytes for one in asked if one.status == 200 and one.way.wire != "stream"}
    assert firsts <= {row[0] for row in completed}
    failed = Counter[str]()
    for _, _, _, status, error, count in rows:
        failed[error] += count if status != "completed" else 0
    assert failed.pop("CANCELLED", 0) <= withdrawable(asked)
    assert +failed == {"RATE_LIMITED": sum(one.status == 429 for one in asked)}

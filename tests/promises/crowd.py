"""Many clients of several tenants that do everything at random and concurrently, and record what they did and got.

    crowd = Crowd(doors, {"acme": "Bearer …", "globex": "Bearer …"}, rate=200.0, seed=1)
    await crowd.run(10.0)
    await crowd.audit()
    violations = check(crowd.history)

The load is open-loop. Requests are synchronous or tasks, with or without their own id or an idempotency key. They have
one input, which may be unique or shared with other clients and tenants, or several. They use any API over HTTP, and
gRPC calls and streams. Ids and keys are reused on any gateway, during the first request and later, with the same inputs
and with others. The model rejects some inputs: alone, or with everything in their batch. Clients leave at every point.
"""

import asyncio
import contextlib
import json
import random
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway.core.failures import CULPRIT
from tests.promises import numbers_in
from tests.promises.calls import NOBODY, Answered, Stream, begin, channel
from tests.promises.client import (
    DEPARTURES,
    PATIENCE,
    STAYS,
    Connection,
    Departure,
    Door,
    Head,
    Point,
    Standing,
    connect,
    some_departure,
)
from tests.promises.known import Known, use
from tests.promises.look_up import look_up
from tests.promises.operation import BAD, History, Kind, Operation
from tests.promises.requests import WAYS, fields_of, request_of
from tests.promises.texts import SEVERAL, Texts
from tests.promises.ways_in import ROWS_IN, TENSORS_IN, VECTOR, WAYS_IN, WayIn, place_of_message, text_of_numbers
from tests.promises.ways_in import SEVERAL as LIST

WEIGHTS = {
    "ask": 26, "task": 16, "poll": 18, "wait": 6, "forget": 4, "reuse": 8, "keyed": 6, "again": 10, "common": 8,
    "foreign": 3, "knock": 1,
}  # fmt: skip
"""Relative weights of the clients' operations."""
RECENT = 60
"""Maximum number of reusable ids and keys per tenant."""
KEYED_POISON = 8.0
"""How much more often inputs with a key are poison, because their outcomes are asked for again."""
COMMON_SECONDS = 2.0
"""Seconds until the shared inputs change."""
UNSENT_SECONDS = 0.25
"""If a gateway is told to end this many seconds after a call began, the call may not have been sent yet."""
NAMED, LOOKED_UP, OTHERS = 0.25, 0.1, 0.4
"""Shares of requests that name a version, of answers whose status is looked up, and of requests for other models."""
ABSENT = "9"
"""A version that no worker runs."""
TASK_SECONDS, ASK_SECONDS = 30.0, 30.0
"""The service's longest timeouts for a task and for other requests."""
SAID = "text", "inputs", "words", "way", "wanted", "model", "parameters", "rows"
"""Fields that are the same in two operations that ask for the same thing."""


class Crowd:
    """All clients. Create it in a running event loop.

    Arguments:
        doors: the gateways; change the list as they come and go.
        tenants: maps names to the value of `Authorization`.
        rate: mean operations per second, Poisson.
        poison: share of inputs that make their batch raise. If not zero, clients share some of them.
        large: share of inputs that are large, and so are their outputs.
        ways: APIs that requests use. Those for a model that takes tensors send several inputs as its rows.
        versions, models: named by some requests; the others name none.
        parameters: call parameters of some of the requests for the default model.
        spread: maximum number of extra characters in an input.
    """

    def __init__(
        self,
        doors: list[Door],
        tenants: Mapping[str, str],
        rate: float,
        seed: int,
        *,
        poison: float = 0.0,
        large: float = 0.0,
        ways: Sequence[WayIn] = WAYS_IN,
        versions: Sequence[str] = (),
        models: Sequence[str] = (),
        parameters: Sequence[str] = (),
        spread: int = 0,
        history: History | None = None,
    ) -> None:
        self.history = history if history is not None else History()
        self.doors = doors
        self.latencies: list[float] = []
        self._tenants = tenants
        self._rate = rate
        self._poison = poison
        self._ways, self._versions, self._models = ways, versions, models
        self._parameters = parameters
        self._seed = seed
        self._rng = random.Random(f"crowd {seed}")
        self._texts = Texts(self._rng, f"{seed:x}", lambda: len(self.history.operations), poison, large, spread)
        self._ids: dict[str, deque[Known]] = {tenant: deque(maxlen=RECENT) for tenant in tenants}
        self._keys: dict[str, deque[Known]] = {tenant: deque(maxlen=RECENT) for tenant in tenants}
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        """Send requests for `seconds`, then wait until each operation has ended."""
        loop = asyncio.get_running_loop()
        due, end = loop.time(), loop.time() + seconds
        try:
            while (due := due + self._rng.expovariate(self._rate)) < end:
                if (pause := due - loop.time()) > 0.0:
                    await asyncio.sleep(pause)
                task = loop.create_task(self._act())
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
            while self._under_way:
                await asyncio.gather(*self._under_way)
        finally:
            for task in self._under_way:
                task.cancel()
            await self._close()

    async def audit(self, most: int = 20_000) -> None:
        """Look up what the service must still know, tasks and outcomes kept under keys: at most `most` of each."""
        tasks = {(one.tenant, one.id) for one in self.history.operations if one.kind is Kind.TASK and one.status == 202}
        keys = {
            (one.tenant, one.key): one
            for one in self.history.operations
            if one.key and one.status in (200, 422) and one.outcome and not one.turned_down
        }
        room = asyncio.Semaphore(64)
        asked = self._rng.sample(sorted(tasks), min(len(tasks), most))
        kept = self._rng.sample(sorted(keys), min(len(keys), most))

        async def look(operation: Operation, wait: float) -> None:
            async with room:
                await self._perform(operation, STAYS, wait)

        looks = [look(self._note(Kind.POLL, tenant, id=id), 40.0) for tenant, id in asked]
        for tenant, key in kept:
            same = {name: getattr(keys[tenant, key], name) for name in SAID}
            looks.append(look(self._note(Kind.ASK, tenant, key=key, timeout=ASK_SECONDS, **same), 0.0))
        try:
            await asyncio.gather(*looks)
        finally:
            await self._close()

    async def _act(self) -> None:
        rng = self._rng
        what = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        tenant = rng.choice(list(self._tenants))
        ids, keys = self._ids[tenant], self._keys[tenant]
        match what:
            case "poll" | "wait" | "forget" if ids:
                known = use(rng.choice(ids), ids)
                kind = Kind.FORGET if what == "forget" else Kind.POLL
                wait = rng.choice((0.05, 0.3, 5.0)) if what == "wait" else 0.0
                await self._perform(self._note(kind, tenant, id=known.name), some_departure(self._rng), wait)
            case "foreign":
                other = rng.choice([one for one in self._tenants if one != tenant] or [tenant])
                if self._ids[other]:
                    known = rng.choice(self._ids[other])
                    kind = rng.choice((Kind.POLL, Kind.FORGET))
                    await self._perform(self._note(kind, tenant, id=known.name), some_departure(self._rng))
            case "knock":
                await self._knock()
            case "reuse" if ids:
                known = use(rng.choice(ids), ids)
                same = rng.random() < 0.5
                words, key = (known.words, known.key) if same else (self._texts.some(), "")
                await self._submit(tenant, words, key, known.name, None, known.wanted, known.model, known.parameters)
            case "again" if keys:
                known = use(rng.choice(keys), keys)
                words = known.words if rng.random() < 0.85 else self._texts.some()
                wanted = known.wanted if rng.random() < 0.9 else self._version()
                values = known.parameters if rng.random() < 0.9 else self._values(known.model)
                await self._submit(tenant, words, known.name, "", None, wanted, known.model, values)
            case "keyed" | "again":
                words = self._texts.some(slow=0.2, poison=KEYED_POISON * self._poison)
                name, wanted = f"key-{self._seed:x}-{len(self.history.operations)}", self._version()
                model = self._model()
                keys.append(Known(name, words, wanted=wanted, model=model, parameters=self._values(model)))
                await self._submit(tenant, words, name, "", None, wanted, model, keys[-1].parameters)
            case "common":
                epoch = int(time.monotonic() / COMMON_SECONDS)
                number = rng.randrange(4 if self._poison else 3)
                text = f"{'common' if number < 3 else BAD[1]} {self._seed:x}-{epoch}-{number}"
                await self._submit(tenant, (text, *(self._texts.some() if rng.random() < SEVERAL else ())))
            case "task":
                await self._submit(tenant, (self._texts.one(),), kind=Kind.TASK)
            case _:
                await self._submit(tenant, self._texts.some(), kind=Kind.ASK)

    async def _submit(
        self, tenant: str, words: tuple[str, ...], key: str = "", id: str = "", kind: Kind | None = None,
        wanted: str | None = None, model: str | None = None, parameters: str | None = None,
    ) -> None:  # fmt: skip
        rng = self._rng
        model = self._model() if model is None else model
        wanted = self._version() if wanted is None else wanted
        parameters = self._values(model) if parameters is None else parameters
        kind = Kind.ASK if len(words) > 1 else kind or rng.choice((Kind.ASK, Kind.TASK))
        chosen = id or (str(uuid.UUID(int=rng.getrandbits(128), version=4)) if rng.random() < 0.4 else "")
        most = TASK_SECONDS if kind is Kind.TASK else ASK_SECONDS
        timeout = rng.uniform(0.05, 0.5) if rng.random() < 0.06 else most
        plain = not (key or chosen) and timeout == most
        ways = [way for way in self._ways if self._fits(way, words, kind, plain)]
        ways = [way for way in ways if (way.versions or not wanted) and (way.models or not model)]
        ways = [way for way in ways if way.members_of or not parameters]
        [way] = rng.choices(ways, [4 if way.numbers else 1 for way in ways])  # Few inputs have numeric outputs.
        texts = tuple(map(way.input_of, words))
        asked = self._note(
            kind,
            tenant,
            id=chosen,
            chosen=bool(chosen),
            text="\n".join(texts),
            inputs=texts if len(texts) > 1 else (),
            words=words,
            way=way.name,
            key=key,
            fresh=rng.random() < 0.2,
            timeout=timeout,
            wanted=wanted,
            model=model,
            parameters=parameters,
            rows=way in (numbers_in.ROWS_IN if self._ways is not TENSORS_IN else ROWS_IN),
        )
        known = Known(chosen, words, key, wanted, model, parameters)
        if chosen and not id:
            self._ids[tenant].append(known)
        await self._perform(asked, some_departure(self._rng), rng.choice((0.0, 0.0, 1.0)) if kind is Kind.TASK else 0.0)
        if kind is Kind.TASK and asked.status == 202 and not chosen:
            self._ids[tenant].append(replace(known, name=asked.id))
        if self._versions and asked.output is not None and not chosen:
            await self._look_up(asked)

    def _fits(self, way: WayIn, words: tuple[str, ...], kind: Kind, plain: bool) -> bool:
        """Return True if a request can use this API. A `plain` one could share a stream with others."""
        if way in (LIST, *numbers_in.LISTS) and len(words) == 1:
            return False  # Under a key, a list of one input is a different request from the input alone.
        if len(words) > way.most or (kind is Kind.TASK and not way.tasks):
            return False
        if way.wire != "http" and not any(door.grpc for door in self.doors):
            return False
        if way.wire == "stream" and not plain:
            return False
        return not way.numbers or all(text.startswith((VECTOR, *BAD)) for text in words)

    def _version(self) -> str:
        named = self._versions and self._rng.random() < NAMED
        return self._rng.choice((*self._versions, *self._versions, ABSENT)) if named else ""

    def _model(self) -> str:
        return self._rng.choice(self._models) if self._models and self._rng.random() < OTHERS else ""

    def _values(self, model: str) -> str:
        """Return the parameters of a request for a model. Only the default model gets any."""
        return self._rng.choice(("", *self._parameters)) if self._parameters and not model else ""

    async def _look_up(self, asked: Operation) -> None:
        """Occasionally ask the gateway that answered which version it recorded."""
        door = next((door for door in self.doors if door.name == asked.gateway and door.is_open()), None)
        if door is not None and door.admin and self._rng.random() < LOOKED_UP:
            found = await look_up(door, asked.tenant, asked.id)
            if found is not None:
                self.history.tellings.append(found)

    async def _knock(self) -> None:
        """Connect, send nothing or half a line, and disconnect."""
        door = self._door()
        if door is not None:
            with contextlib.suppress(OSError):
                connection = await connect(door)
                connection.send(self._rng.choice((b"", b"POST /v1/inf")))
                connection.leave(self._rng.choice(DEPARTURES))

    def _note(self, kind: Kind, tenant: str, **what: Any) -> Operation:
        operation = Operation(len(self.history.operations), kind, tenant, "", time.monotonic(), **what)
        self.history.operations.append(operation)
        return operation

    async def _perform(self, operation: Operation, departure: Departure, wait: float = 0.0) -> None:
        operation.lost = "never sent"
        if operation.kind is Kind.ASK and WAYS[operation.way].wire != "http":
            await self._call(operation, departure)
            return
        while (door := self._door()) is not None:
            operation.gateway = door.name
            try:
                async with asyncio.timeout(PATIENCE):
                    connection = await connect(door)
            except (OSError, TimeoutError):
                if not door.is_open():
                    continue
                operation.lost = "unreachable"
                return
            if door.is_open():
                break
            connection.leave("close")
        else:
            operation.lost = "torn"  # There was no gateway to ask.
            return
        request = request_of(operation, self._tenants[operation.tenant], wait)
        try:
            async with asyncio.timeout(PATIENCE):
                await self._exchange(operation, departure, connection, request)
        except TimeoutError:
            operation.lost = "silent"
            connection.leave("reset")
        except ConnectionError:
            operation.lost = "reset" if door.standing is Standing.KILLED else "cut"
        else:
            self._put_back(door, connection, operation)

    async def _call(self, operation: Operation, departure: Departure) -> None:
        """Make a gRPC call, or send a request on a stream. Leaving cancels it or closes the connection."""
        door = self._door()
        if door is None:
            operation.lost = "torn"
            return
        operation.gateway = door.name
        way, leaves = WAYS[operation.way], departure.point in (Point.HEAD, Point.BODY, Point.WAIT)
        closes = leaves and departure.way == "close"
        if door.channel is None:
            door.channel = channel(door.grpc)
        own = channel(door.grpc) if closes else door.channel
        sent = way.write(operation.words, operation.wanted, operation.model)
        fields = (one.partition(": ") for one in fields_of(operation, self._tenants[operation.tenant]))
        metadata = [(name.lower(), value) for name, _, value in fields]
        within = operation.timeout if operation.timeout < 1.0 and operation.number % 2 else PATIENCE
        operation.called = time.monotonic()
        operation.lost = ""
        cancel: Callable[[], object] | None = None
        began: Awaitable[Answered]
        if way.wire == "stream" and not leaves:
            began = self._stream(door, tuple(metadata), sent.path).ask(sent, operation.words[0])
        else:
            began, cancel = begin(way, own, sent, metadata, operation.words[0], within)
        answer = asyncio.ensure_future(began)
        try:
            await asyncio.wait([answer], timeout=departure.after if leaves else PATIENCE + 1.0)
            if answer.done():
                self._take_call(operation, answer.result(), door, within)
            else:
                operation.lost = "left" if leaves else "silent"
                if cancel is not None and not closes:
                    cancel()
        finally:
            if closes:
                await own.close()
            if cancel is not None:
                await asyncio.gather(answer, return_exceptions=True)

    def _stream(self, door: Door, metadata: tuple[tuple[str, str], ...], method: str) -> Stream:
        """Return the stream that clients with the same metadata share if they don't leave."""
        found = door.streams.get(metadata)
        if found is None or found.ended is not None:
            found = door.streams[metadata] = Stream(door.channel.stream_stream(method)(metadata=metadata))
        return found

    def _take_call(self, operation: Operation, answer: Answered, door: Door, within: float) -> None:
        now = time.monotonic()
        if not answer.taken:
            operation.lost = "torn"
        elif answer.status == 504 and not answer.fields and within == PATIENCE:
            operation.lost = "silent"
        elif not answer.status and NOBODY in answer.code:
            operation.lost = "unreachable" if door.is_open() else "torn"
        elif not answer.status and door.standing is Standing.KILLED:
            operation.lost = "reset"
        elif not answer.status:
            operation.lost = "left" if operation.called > door.shut - UNSENT_SECONDS else "cut"
            operation.code = f"{answer.code}, after {now - operation.called:.1f} s"
        else:
            operation.returned, operation.status, operation.code = now, answer.status, answer.code
            operation.id = operation.id or answer.fields.get("x-request-id", "").removeprefix("req_")
            operation.version = answer.told.version
            self._note_outputs(operation, answer.told.outputs, answer.blamed, answer.fields)

    async def _exchange(
        self, operation: Operation, departure: Departure, connection: Connection, request: bytes
    ) -> None:
        operation.called = time.monotonic()
        body = request.index(b"\r\n\r\n") + 4
        if departure.point is Point.HEAD or (departure.point is Point.BODY and body < len(request)):
            first, last = (1, body - 1) if departure.point is Point.HEAD else (body, len(request) - 1)
            operation.lost = "torn"
            connection.send(request[: self._rng.randint(first, last)])
            await asyncio.sleep(departure.after)
            connection.leave(departure.way)
            return
        operation.lost = ""
        connection.expect()
        if self._rng.random() < 0.1:
            connection.send(request[:body])
            await asyncio.sleep(self._rng.expovariate(200.0))
            connection.send(request[body:])
        else:
            connection.send(request)
        if departure.point is Point.WAIT:
            await asyncio.wait([connection.body], timeout=departure.after)
            if not connection.body.done():
                operation.lost = "left"
                connection.leave(departure.way)
                return
        head = await connection.head
        if departure.point is Point.ANSWER:
            connection.leave(departure.way)
            operation.lost = "left"
            if head.status == 202:  # It is a task, and its id is in the header.
                self._take(operation, head, b"{}")
            return
        self._take(operation, head, await connection.body)

    def _take(self, operation: Operation, head: Head, body: bytes) -> None:
        operation.returned, operation.status, operation.lost = time.monotonic(), head.status, ""
        if operation.kind in (Kind.ASK, Kind.TASK):
            operation.id = operation.id or head.fields["x-request-id"].removeprefix("req_")
        if operation.kind is Kind.ASK:
            outputs, operation.code, operation.version = WAYS[operation.way].read(head.status, head.fields, body)
            blamed = -1 if outputs else place_of_message(body.decode())
        else:
            told = json.loads(body) if body else {}
            outputs, blamed = [text_of_numbers(told["output"])] if "output" in told else [], -1
            error = told.get("error", "")
            operation.code = error["error"] if isinstance(error, dict) else error
        self._note_outputs(operation, outputs, blamed, head.fields)

    def _note_outputs(self, operation: Operation, outputs: list[str], blamed: int, fields: Mapping[str, str]) -> None:
        operation.output = "\n".join(outputs) if outputs else None
        operation.outputs = tuple(outputs) if operation.inputs else ()
        operation.blamed = blamed
        known = fields.get("x-headway-dropped-reason") == CULPRIT
        operation.turned_down = known and "idempotency-replayed" not in fields
        if operation.kind is Kind.ASK and operation.output is not None:
            self.latencies.append(time.monotonic() - operation.called)

    def _put_back(self, door: Door, connection: Connection, operation: Operation) -> None:
        if operation.lost:
            return
        if connection.unasked:
            self.history.unasked.append(f"{connection.unasked[:200]!r} after {operation}")
        if connection.fresh:
            door.free.append(connection)

    def _door(self) -> Door | None:
        open_ = [door for door in self.doors if door.is_open()]
        return self._rng.choice(open_) if open_ else None

    async def _close(self) -> None:
        for door in self.doors:
            while door.free:
                door.free.pop().leave("close")
            while door.streams:
                await door.streams.popitem()[1].close()
            if door.channel is not None:
                await door.channel.close()
                door.channel = None

"""Clients that behave badly: they leave before their answer, tear requests apart, and send what makes a model fail.

Each client has a connection, a way into the service and a request at a time; those over gRPC share a few connections. Every text is unique, and an
answer counts only when it is the right one for that very text. Where a way takes lists, a request has several texts. Each text that was sent
whole has one outcome:

    ok          the right answer
    an error    the code of a refusal or failure, such as rejected_by_model
    let go      another text of its request has failed, so nothing was told of this one
    left        the client closed the connection while it waited (half of them politely, half by a reset), or cancelled the call
    cut         the server closed the connection instead of answering
    silent      no answer within PATIENCE
"""

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import uvloop

from tests.promises import ways_in
from tests.promises.calls import Answered, Stream, begin, channel
from tests.promises.client import Connection, Door, connect
from tests.promises.ways_in import WayIn, place_of_message

PATIENCE = 15.0
SHOWN = 5
"""Violations that are kept word for word."""

MOST = 4
"""Most texts of a request."""
ALL_WAYS = tuple(way for way in ways_in.WAYS_IN if not way.numbers)
"""Ways by which texts come back as texts."""
WAYS = {"all": ALL_WAYS, "native": (ways_in.NATIVE,)}
"""Ways into the service, by the names of the command line."""
CLOSING = 1.0
"""Seconds in which gRPC closes connections after it has said that they are closed."""
CONNECTIONS = 8
"""gRPC connections that the clients share."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How clients behave.

    Attributes:
        leave, tear, reject, poison: shares of the requests whose client goes while it waits, that are broken off half-way, whose input the model
            refuses, and whose input makes its batch fail.
        stay: mean seconds until a client that leaves has left.
        pause: mean seconds between an answer and the client's next request.
    """

    leave: float = 0.1
    tear: float = 0.005
    reject: float = 0.005
    poison: float = 0.0001
    stay: float = 0.003
    pause: float = 0.0


class Tallied:
    """What became of all requests.

    Attributes:
        unsure: texts of calls that were cancelled, perhaps before they had left the client.
        torn: requests that were broken off, which have no outcome.
        by_way: right answers by way.
        wrong, unasked: answers to another request, and octets that came when no answer was due. None may be.
        blamed: fine inputs that were answered as failing.
        spared: failing inputs that were answered as fine. None may be.
    """

    def __init__(self) -> None:
        self.sent = self.unsure = self.torn = self.wrong = self.unasked = self.blamed = self.spared = 0
        self.outcomes: Counter[str] = Counter()
        self.by_way: Counter[str] = Counter()
        self.examples: list[str] = []

    def violation(self, text: str) -> None:
        """Keep a violation in words, if there is room."""
        if len(self.examples) < SHOWN:
            self.examples.append(text)


@dataclass(frozen=True, slots=True)
class Asked:
    """Texts of a request, each of them `plain`, `REJECT` or `POISON`."""

    way: WayIn
    texts: Sequence[str]
    kinds: Sequence[str]


class Crowd:
    """A crowd of clients for one server, to whom the ways are dealt in turn. Call `run` once."""

    def __init__(
        self,
        url: str,
        size: int,
        manners: Manners,
        seed: int,
        ways: Sequence[WayIn] = WAYS["native"],
        grpc_port: int = 0,
    ) -> None:
        self.counters = Tallied()
        self.manners = manners
        self.rng = random.Random(seed)
        place = urlsplit(url)
        self.door = Door("crowd", place.port or 80, place.hostname or "127.0.0.1", grpc_port)
        self.nonce = f"{seed:08x}"
        self.left_to_send = 0
        self._ways = [ways[number % len(ways)] for number in range(size)]

    async def run(self, requests: int, seconds: float) -> Tallied:
        """Send until `requests` were sent or `seconds` are over; returns when each has its outcome."""
        self.left_to_send = requests
        stop = asyncio.get_running_loop().call_later(seconds, self.stop)
        channels = [channel(self.door.grpc) for _ in range(CONNECTIONS)] if self.door.grpc else [None]
        try:
            async with asyncio.TaskGroup() as clients:
                for number, way in enumerate(self._ways):
                    clients.create_task(_Client(self, way, channels[number % len(channels)]).run())
        finally:
            stop.cancel()
            if self.door.grpc:
                await asyncio.gather(*(shared.close() for shared in channels if shared is not None))
                channels.clear()
                gc.collect()  # A connection lives as long as a call on it that nobody has let go of.
                await asyncio.sleep(CLOSING)
        return self.counters

    def stop(self) -> None:
        """Send no more."""
        self.left_to_send = 0

    def draw(self, way: WayIn) -> Asked:
        """Return texts for the next request."""
        rng, manners = self.rng, self.manners
        self.left_to_send -= 1
        texts, kinds = [], []
        for place in range(rng.randint(1, min(way.most, MOST))):
            luck = rng.random()
            kind = (
                "POISON" if luck < manners.poison else "REJECT" if luck < manners.poison + manners.reject else "plain"
            )
            kinds.append(kind)
            texts.append(f"{kind} {self.nonce}-{self.left_to_send:09d}.{place} Headway, s'il vous plait")
        return Asked(way, texts, kinds)

    def judge(self, asked: Asked, outputs: Sequence[str], code: str, blamed: int, answer: object) -> None:
        """Note the answer to a request. `blamed` is the place of the text that an error names, -1 if it names none."""
        counters, fine = self.counters, all(kind == "plain" for kind in asked.kinds)
        if outputs:
            self.count("ok", len(asked.texts))
            counters.by_way[asked.way.name] += 1
            if list(outputs) != [asked.way.input_of(text).upper() for text in asked.texts]:
                counters.wrong += 1
                counters.violation(f"wrong: {asked} got {answer!r}")
            elif not fine:
                counters.spared += 1
                counters.violation(f"spared: {asked}")
            return
        self.count(code.lower())
        self.count("let go", len(asked.texts) - 1)
        if code == "REJECTED_BY_MODEL" and (asked.kinds[blamed] == "plain" if blamed >= 0 else fine):
            counters.blamed += 1
            counters.violation(f"blamed: {asked} got {answer!r}")

    def count(self, outcome: str, times: int = 1) -> None:
        if times:
            self.counters.outcomes[outcome] += times


class _Client:
    """A client with a request at a time, over a connection of its own or, for gRPC, over a shared channel."""

    def __init__(self, crowd: Crowd, way: WayIn, channel: Any) -> None:
        self._crowd, self._way, self._channel = crowd, way, channel
        self._connection: Connection | None = None
        self._stream: Stream | None = None

    async def run(self) -> None:
        crowd = self._crowd
        while crowd.left_to_send > 0:
            await (self._ask() if self._way.wire == "http" else self._call())
            if crowd.manners.pause > 0.0:
                await asyncio.sleep(crowd.rng.expovariate(1.0 / crowd.manners.pause))
        if self._stream is not None:
            await self._stream.close()
        if self._connection is not None:
            self._look_for_more(self._connection)
            self._connection.leave("close")

    def _stay(self) -> tuple[bool, float]:
        """Whether the client leaves before its answer, and the seconds that it waits."""
        rng, manners = self._crowd.rng, self._crowd.manners
        leaves = rng.random() < manners.leave
        return leaves, max(0.001, rng.expovariate(1.0 / manners.stay)) if leaves else PATIENCE

    async def _ask(self) -> None:
        crowd, way = self._crowd, self._way
        connection = await self._connected()
        asked = crowd.draw(way)
        path, fields, body = way.write(asked.texts)
        head = [f"POST {path} HTTP/1.1", f"Host: {crowd.door.host}", *fields, f"Content-Length: {len(body)}", "", ""]
        request = "\r\n".join(head).encode() + body
        if crowd.rng.random() < crowd.manners.tear:
            crowd.counters.torn += 1
            connection.send(request[: crowd.rng.randrange(1, len(request))])
            self._leave(connection)
            return
        crowd.counters.sent += len(asked.texts)
        leaves, stay = self._stay()
        connection.expect()
        connection.send(request)
        await asyncio.wait([connection.body], timeout=stay)
        if not connection.body.done():
            self._give_up(asked, leaves)
            self._leave(connection)
        elif connection.body.exception() is not None:
            crowd.count("cut", len(asked.texts))
        else:
            (status, named), content = connection.head.result(), connection.body.result()
            answer = way.read(status, named, content)
            blamed = -1 if answer.outputs else place_of_message(content.decode())
            crowd.judge(asked, answer.outputs, answer.code, blamed, content[:300])

    async def _connected(self) -> Connection:
        """The client's connection, a new one where it can't be used again."""
        if self._connection is not None:
            self._look_for_more(self._connection)
            if self._connection.fresh:
                return self._connection
            self._connection.leave("close")
        while True:
            try:
                self._connection = await connect(self._crowd.door)
                return self._connection
            except OSError:
                await asyncio.sleep(0.05)  # The crowd is large, and there may be no port.

    def _look_for_more(self, connection: Connection) -> None:
        """Note octets that came when no answer was due."""
        if connection.unasked:
            self._crowd.counters.unasked += 1
            self._crowd.counters.violation(f"unasked: {connection.unasked[:200]!r}")
            connection.unasked = b""

    def _leave(self, connection: Connection) -> None:
        connection.leave(self._crowd.rng.choice(("close", "reset")))
        self._connection = None

    def _give_up(self, asked: Asked, leaves: bool) -> None:
        self._crowd.count("left" if leaves else "silent", len(asked.texts))
        if not leaves:
            self._crowd.counters.violation(f"silent: {asked}")

    async def _call(self) -> None:
        """Call over gRPC, or send by a stream; a client that leaves cancels its call."""
        crowd, way = self._crowd, self._way
        asked = crowd.draw(way)
        sent, id = way.write(asked.texts), asked.texts[0]
        crowd.counters.sent += len(asked.texts)
        leaves, stay = self._stay()
        cancel: Callable[[], object] | None = None
        if way.wire == "stream" and not leaves:
            if self._stream is None or self._stream.ended is not None:
                self._stream = Stream(self._channel.stream_stream(sent.path)())
            began: Any = self._stream.ask(sent, id)
        else:
            began, cancel = begin(way, self._channel, sent, (), id, PATIENCE + 1.0)
        answer: asyncio.Future[Answered] = asyncio.ensure_future(began)
        await asyncio.wait([answer], timeout=stay)
        if not answer.done():
            self._give_up(asked, leaves)
            if cancel is not None:
                crowd.counters.unsure += len(asked.texts)
                cancel()
                await asyncio.wait([answer])
            return
        result = answer.result()
        if result.status:
            crowd.judge(asked, result.told.outputs, result.code, result.blamed, result)
        else:
            crowd.count("cut", len(asked.texts))
            crowd.counters.violation(f"cut: {asked} got {result}")


def loop_factory() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop

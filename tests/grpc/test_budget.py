"""The cost of an ordinary call, compared with budget.toml, and how calls share turns of the event loop."""

import asyncio
import functools
import gc
import math
import os
import random
import sys
import tracemalloc
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from bench.load import http2
from headway.errors import RequestError
from headway.grpc import call_stream
from headway.grpc.call_stream import SHARE, MessageTurns
from headway.grpc.inference_call import InferenceCall
from tests.fuzz import dearest_calls
from tests.fuzz.dearest_calls import MODELS, Dear, Taken
from tests.grpc.stand import INFER, PREDICT, Port, predict, served
from tests.grpc.test_open_inference import request
from tests.grpc.test_tensors import raw_four
from tests.grpc.wire import SETTINGS, WINDOW, Wire, connect
from tests.http.stand import INSTANT, settled, worker
from tests.http.test_budget import BATCH, BUDGET, FOUR, TEXT, Counts, enough, within
from tests.scenes import Played

CALLS = {
    "grpc predict": (PREDICT, predict(TEXT)),
    "grpc infer": (INFER, request(TEXT).SerializeToString()),
    "grpc tensor": (INFER, raw_four(1, 4).SerializeToString()),
}


async def batch(port: Port, wire: Wire, numbers: range, kind: str) -> None:
    """Run one call that keeps the worker busy, then a full batch that queues up meanwhile."""
    path, message = CALLS[kind]
    first, *others = [http2.headers(number, path) + http2.message(number, message) for number in numbers]
    runs = len(port.stand.runs)
    port.stand.go.clear()
    wire.send(first)
    await settled(lambda: len(port.stand.runs) > runs)
    wire.send(*others)
    await settled(lambda: port.stand.real.pending == len(numbers))
    port.stand.go.set()
    assert [(await wire.ended(number)).status for number in numbers] == ["0"] * len(numbers)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="each version of Python has bytecodes of its own")
@pytest.mark.skipif(sys.gettrace() is not None, reason="something else traces")
@pytest.mark.parametrize("kind", CALLS)
def test_a_usual_call_costs_no_more_than_its_budget(kind: str) -> None:
    """The clock normally limits turns and reads. Tracing would distort that, so all messages are read in one go."""

    async def main(port: Port) -> None:
        if kind == "grpc tensor":
            tensors = worker("tensors", inputs=(FOUR,), outputs=(FOUR,))
            await port.stand.broker.heartbeat(tensors)
            port.stand.real.served.learn([tensors])
        # A busy machine needs many rounds, whose answers exceed the default window.
        room = http2.frame(WINDOW, 0, 0, (1 << 30).to_bytes(4, "big"))
        wire = await connect(port, http2.PREFACE, http2.frame(SETTINGS, 0, 0), room)
        size = 1 + BATCH
        await batch(port, wire, range(size), kind)
        rounds = list[Counts]()
        while not enough(BUDGET[kind], rounds, size):
            number = 1 + len(rounds)
            with Counts() as counts:
                await batch(port, wire, range(number * size, (number + 1) * size), kind)
            rounds.append(counts)
        wire.writer.close()
        within(BUDGET[kind], rounds, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_stream, "SHARE", math.inf)
        served(main, whole=True, now=lambda: INSTANT, user_rate=0.0)


async def test_calls_leave_no_cycles_that_the_garbage_collector_has_to_find(port: Port) -> None:
    """Thousands of refused calls with large metadata used to hold memory until a slow garbage collection."""
    client, number = port.client(), 20
    gc.collect()
    gc.disable()
    try:
        for _ in range(number):
            await client.ask(PREDICT, predict("a"))
            await client.fail(PREDICT, b"\xff\xff")
        await port.client().ask(PREDICT, predict("a"))  # By now the tasks of earlier calls have ended too.
        found = sum(isinstance(one, InferenceCall) for one in gc.get_objects())
    finally:
        gc.enable()
    assert found < number, "of each kind none is left but those that are still under way"


MOST_BYTECODES = 1_300_000
MOST_BYTES = 16 << 20
"""Most bytes of the objects that reading one message makes: as many as 260,000 numbers and their pages take, and the value."""
SMALL = {f"{call.method}, {call.name}": call for call in dearest_calls.calls(1000)}
SOME = random.Random(7).sample([name for name, call in SMALL.items() if " of " in name and not call.taken], 12)
"""Some of the messages that are wrong for every model."""
TRIED = [*SOME, *(name for name in SMALL if " of " not in name)]


@functools.cache
def calls() -> dict[str, Dear]:
    made = ((f"{call.method}, {call.name}", call) for call in dearest_calls.calls())
    return {name: call for name, call in made if name in TRIED}


def work_of(call: Dear, model: str) -> tuple[int, int]:
    """Return the bytecodes and object bytes of the most expensive step of reading a message."""
    steps, most, size = call.steps(model), 0, 0
    while True:
        tracemalloc.start()
        kept = tracemalloc.get_traced_memory()[0]
        try:
            with Counts() as counts:
                next(steps)
        except (Taken, RequestError):
            return max(most, counts.bytecodes.total()), max(size, tracemalloc.get_traced_memory()[1] - kept)
        finally:
            most = max(most, counts.bytecodes.total())
            size = max(size, tracemalloc.get_traced_memory()[1] - kept)
            tracemalloc.stop()


@pytest.mark.skipif(sys.gettrace() is not None, reason="something else traces")
@pytest.mark.parametrize("name", TRIED)
def test_no_message_takes_long_to_read(name: str) -> None:
    call = calls()[name]
    takers = list(filter(call.read, MODELS))
    assert bool(takers) is call.taken
    for model in ("text", "FP32", *takers[:1]):
        bytecodes, size = work_of(call, model)
        assert bytecodes <= MOST_BYTECODES, f"a model of {model}"
        assert size <= MOST_BYTES, f"a model of {model}"


def test_wrong_messages_cost_the_same_however_much_they_say() -> None:
    """Refusing a message costs only what is inspected, not its whole size."""
    short, long = ({call.name: call for call in dearest_calls.calls(size)} for size in (100_000, 400_000))
    for name in ("empty members of 5", "entries members of 2 in 6", "parameters", "axes of FP32", "unknown numbers"):
        with Counts() as few:
            short[name].read("FP32")
        with Counts() as many:
            long[name].read("FP32")
        assert many.bytecodes.total() <= 1.1 * few.bytecodes.total(), name


class Loop:
    """Turns of the event loop by number, and a clock that only work advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turn = 0
        self.done: list[tuple[int, str]] = []
        self.turns = MessageTurns(lambda: self.now)
        self._count()

    def _count(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self._count)

    def work(self, name: str, cost: float = SHARE / 2) -> Callable[[float], str]:
        def run(waited: float) -> str:
            self.done.append((self.turn, name))
            self.now += cost
            return f"{name} waited {waited / SHARE:g}"

        return run

    def take(self, owner: str, name: str) -> asyncio.Task[str]:
        return asyncio.ensure_future(self.turns.take(owner, self.work(name)))


def in_turns(main: Callable[[Loop], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await main(Loop())

    asyncio.run(run())


@pytest.fixture
def loop() -> Played:
    return Played(in_turns)


async def test_a_flood_of_one_owner_is_read_in_turns_with_other_owners(loop: Loop) -> None:
    flood = [loop.take("flood", f"f{number}") for number in range(8)]
    other = loop.take("other", "o")
    await asyncio.gather(*flood, other)
    turns = [turn for turn, _ in loop.done]
    assert [turns.count(turn) for turn in sorted(set(turns))] == [2, 2, 2, 2, 1]
    assert [name for _, name in loop.done][:5] == ["f0", "f1", "f2", "o", "f3"]
    assert other.result() == "o waited 0.5"


async def test_a_message_that_comes_alone_waits_for_nothing(loop: Loop) -> None:
    before = loop.turn
    assert await loop.turns.take("a", loop.work("a")) == "a waited 0"
    assert loop.turn == before


async def test_the_turn_of_a_call_that_has_ended_goes_to_the_next(loop: Loop) -> None:
    asked = [loop.take("a", str(number)) for number in range(5)]
    await asyncio.sleep(0)
    asked[2].cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert [name for _, name in loop.done] == ["0", "1", "3", "4"]


async def test_waiting_messages_let_other_processes_run_first(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_yield", lambda: loop.done.append((loop.turn, "others")))
    await loop.turns.take("a", loop.work("a"))
    await asyncio.sleep(0)
    assert [name for _, name in loop.done] == ["a"], "nothing waited"
    await asyncio.gather(*(loop.take("b", name) for name in ("b", "c", "d")))
    assert [name for _, name in loop.done] == ["a", "b", "c", "others", "d"]


async def test_an_error_holds_nothing_of_its_work_once_its_caller_has_it(loop: Loop) -> None:
    """Invalid bodies of 1 MB used to stay in memory until a collection, thousands of objects later."""

    class Body:
        pass

    def fail(body: Body, waited: float) -> None:
        raise ValueError("no message")

    bodies = [Body() for _ in range(3)]
    left = [weakref.ref(body) for body in bodies]
    first = loop.take("a", "first"), loop.take("a", "second")
    asked = [asyncio.ensure_future(loop.turns.take("a", partial(fail, bodies.pop()))) for _ in left]
    gc.disable()
    try:
        while asked:
            with pytest.raises(ValueError, match="no message") as found:
                await asked.pop()
            del found
        await asyncio.sleep(0)  # The loop still references the last task it awaited.
        assert [ref() for ref in left] == [None] * 3
    finally:
        gc.enable()
    await asyncio.gather(*first)

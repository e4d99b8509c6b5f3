"""What the dearest messages cost in one turn of the event loop that reads them, counted as work: bytecodes, and memory for objects.

Both are the same on every machine. A million of the bytecodes that loops over elements are made of take some 4 ms, and as many objects
that are made without any bytecodes take 10 to 30 ms and some 60 MB.
"""

from __future__ import annotations

import functools
import random
import sys
import tracemalloc

import pytest

from headway.errors import RequestError
from tests.fuzz import dearest_calls
from tests.fuzz.dearest_calls import MODELS, Dear, Taken
from tests.http.test_budget import Counts

MOST_BYTECODES = 1_300_000
MOST_BYTES = 16 << 20
"""Most bytes of the objects that reading one message makes: as many as 260,000 numbers and their pages take, and the value."""
SMALL = {f"{call.method}, {call.name}": call for call in dearest_calls.calls(1000)}
SOME = random.Random(7).sample([name for name, call in SMALL.items() if " of " in name and not call.taken], 12)
"""Some of the messages that are wrong for every model."""
TRIED = [*SOME, *(name for name in SMALL if " of " not in name)]


@functools.cache
def calls() -> dict[str, Dear]:
    """The messages that are tried; they are made by the process that tries them."""
    made = ((f"{call.method}, {call.name}", call) for call in dearest_calls.calls())
    return {name: call for name, call in made if name in TRIED}


def work_of(call: Dear, model: str) -> tuple[int, int]:
    """Bytecodes, and bytes of objects, that the dearest step of reading a message takes."""
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


@pytest.mark.skipif(sys.gettrace() is not None, reason="something else traces")
def test_no_drawn_message_takes_long_to_read() -> None:
    rng = random.Random(7)
    for _ in range(20):
        call, model = Dear("drawn", "infer", dearest_calls.draw(rng)), rng.choice([*MODELS])
        bytecodes, size = work_of(call, model)
        assert (bytecodes <= MOST_BYTECODES, size <= MOST_BYTES) == (True, True), (model, call.body[:100])


def test_wrong_messages_cost_the_same_however_much_they_say() -> None:
    """The work of a refusal is bounded by what is looked at, not by what is there."""
    short, long = ({call.name: call for call in dearest_calls.calls(size)} for size in (100_000, 400_000))
    for name in ("empty members of 5", "entries members of 2 in 6", "parameters", "axes of FP32", "unknown numbers"):
        with Counts() as few:
            short[name].read("FP32")
        with Counts() as many:
            long[name].read("FP32")
        assert many.bytecodes.total() <= 1.1 * few.bytecodes.total(), name

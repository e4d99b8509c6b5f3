"""How calls begin and end: many within one turn of the event loop, and none leaves garbage."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from headway.grpc.inference_call import InferenceCall
from tests.grpc.stand import PREDICT, Port, on_port, predict, predicted


class Turns:
    """Turns of the event loop, and how many calls begin in each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most = self._now = 0
        begin = InferenceCall.begin

        def counted(call: InferenceCall) -> Any:
            self._now += 1
            self.most = max(self.most, self._now)
            return begin(call)

        patch.setattr(InferenceCall, "begin", counted)

    def count(self) -> None:
        """Begin a turn."""
        self._now = 0
        asyncio.get_running_loop().call_soon(self.count)


async def ask_many(port: Port, turns: Turns, enough: int) -> None:
    """Ask many at once on one connection, again and again until so many have begun within one turn."""
    client = port.client()
    turns.count()
    while turns.most < enough:
        answers = await asyncio.gather(*(client.ask(PREDICT, predict("a")) for _ in range(100)))
        assert {predicted(answer).output for answer in answers} == {b"A"}


@on_port()
async def test_many_calls_of_one_connection_are_taken_in_within_a_turn(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(monkeypatch)
    await ask_many(port, turns, enough=4)


@on_port()
async def test_calls_leave_no_cycles_that_the_garbage_collector_has_to_find(port: Port) -> None:
    """Thousands of refused calls with large metadata held their memory, and then the event loop, until it found them."""
    client, number = port.client(), 20
    gc.collect()
    gc.disable()
    try:
        for _ in range(number):
            await client.ask(PREDICT, predict("a"))
            await client.fail(PREDICT, b"\xff\xff")
        await port.client().ask(PREDICT, predict("a"))  # The tasks of the last ones have ended, too.
        found = sum(isinstance(one, InferenceCall) for one in gc.get_objects())
    finally:
        gc.enable()
    assert found < number, "of each kind none is left but those that are still under way"

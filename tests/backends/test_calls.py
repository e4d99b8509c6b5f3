"""Calls into which the child cuts a batch, without a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headway.backends.process import child, frames
from headway.backends.process.frames import Failed, Outputs
from headway.backends.process.usercode import Target, UserLoop
from headway.core import batch_cost as calls_module
from headway.core.batch_cost import LOOKED_AT, SURE, Calls
from headway.model import CostShape

ALPHA, BETA = 0.008, 1e-5


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Padding:
    """Target that takes the time of a model that fills its inputs up."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seen: list[list[str]] = []

    def __call__(self, inputs: list[str], parameters: Sequence[Any]) -> list[str]:
        self.seen.append(inputs)
        self.clock.now += ALPHA + BETA * len(inputs) * max(map(len, inputs))
        if any("bad" in text for text in inputs):
            raise ValueError("no good")
        return [f"{text[:3]} {given}" for text, given in zip(inputs, parameters, strict=True)]


class Whole(Padding):
    one_call = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(child, "monotonic", clock)
    return clock


def run(target: Target, calls: Calls, *inputs: str, number: int = 1) -> Outputs | Failed:
    parameters = [b'{"place":%d}' % place for place in range(len(inputs))]
    return child.run(target, frames.Run(number, [*inputs], parameters), None, 0, calls)


def learnt(kind: type[Padding], clock: Clock) -> tuple[Padding, Target, Calls]:
    padding = kind(clock)
    target = Target(padding, "padding", "", UserLoop())
    calls = Calls(target.one_call)
    for number in range(40):
        run(target, calls, *("x" * (10 + 37 * number * place % 900) for place in range(1 + number % 16)))
    padding.seen.clear()
    return padding, target, calls


LONG, SHORT = "long" * 500, "short"


def test_a_batch_is_cut_by_length_and_answered_in_its_order(clock: Clock) -> None:
    padding, target, calls = learnt(Padding, clock)
    answer = run(target, calls, LONG, *[SHORT] * 15, LONG)
    assert [len(inputs) for inputs in padding.seen] == [15, 2]
    assert isinstance(answer, Outputs)
    assert answer.outputs == [
        "lon {'place': 0}", *[f"sho {{'place': {place}}}" for place in range(1, 16)], "lon {'place': 16}",
    ]  # fmt: skip


def test_a_target_that_wants_one_call_gets_one(clock: Clock) -> None:
    padding, target, calls = learnt(Whole, clock)
    run(target, calls, LONG, *[SHORT] * 15, LONG)
    assert [len(inputs) for inputs in padding.seen] == [17]


def test_nothing_is_cut_before_the_line_is_known(clock: Clock) -> None:
    padding = Padding(clock)
    run(target := Target(padding, "padding", "", UserLoop()), Calls(target.one_call), LONG, *[SHORT] * 15)
    assert [len(inputs) for inputs in padding.seen] == [16]


def test_a_call_that_raises_names_its_own_inputs(clock: Clock) -> None:
    _, target, calls = learnt(Padding, clock)
    answer = run(target, calls, LONG, *["short"] * 14, "bad", LONG)
    assert isinstance(answer, Failed)
    assert answer.places == list(range(1, 16))
    assert answer.message == "ValueError: no good"


def test_a_call_that_had_the_whole_batch_names_nobody(clock: Clock) -> None:
    _, target, calls = learnt(Padding, clock)
    answer = run(target, calls, "bad", "good")
    assert isinstance(answer, Failed)
    assert answer.places == []


def test_the_line_is_told_when_it_is_known_and_when_it_changes(clock: Clock) -> None:
    _, _, calls = learnt(Padding, clock)
    line = calls.news()
    assert line is not None
    assert line.shape is CostShape.PADDED
    assert (line.alpha, line.beta) == pytest.approx((ALPHA, BETA), rel=0.05)
    assert calls.news() is None
    calls.ran_in_parts([5_000] * 16, [([5_000] * 16, 0.1)])
    assert calls.news() is not None


def test_few_calls_of_a_model_that_does_not_pad_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = list[str]()

    def octets(value: str) -> int:
        looked_at.append(value)
        return len(value)

    monkeypatch.setattr(calls_module, "octets", octets)
    calls = Calls(whole=False)
    for _ in range(SURE + 10 * LOOKED_AT):
        calls.ran(["text"], 0.1)
    assert len(looked_at) == SURE + 10
    assert calls.news() is None

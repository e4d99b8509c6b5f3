"""Input weights from the target's function: how it is found, tried and enforced in the target's process."""

from __future__ import annotations

import asyncio
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from headway.backends.process import frames, run_batch
from headway.backends.process.run_batch import Weighing
from headway.backends.process.usercode import Refusal, Target, UserLoop
from headway.model import ValueKind


def upper(inputs: list[str]) -> list[str]:
    return [text.upper() for text in inputs]


class Model:
    """A target that records its runs and weighs an input by its words."""

    def __init__(self) -> None:
        self.runs: list[list[str]] = []

    def __call__(self, inputs: list[str]) -> list[str]:
        self.runs.append(inputs)
        return [text.upper() for text in inputs]

    def words(self, text: str) -> int:
        if text == "odd":
            raise ValueError("no words")
        return -1 if text == "negative" else len(text.split())


def target(call: Any, **module: object) -> Target:
    return Target(call, "m.py:model", "", UserLoop(), SimpleNamespace(**module))


def weighing(call: Any, function: str = "words", most: int = 4, **module: object) -> tuple[Target, Weighing]:
    loaded = target(call, **module)
    return loaded, Weighing(loaded, function, most, UserLoop())


def run(call: Any, *inputs: str, most: int = 4) -> Any:
    loaded, by = weighing(call, most=most)
    return run_batch.run(loaded, frames.Run(7, list(inputs)), by)


@pytest.mark.parametrize(
    ("inputs", "most", "weights", "runs"),
    [
        (["a b", "c d"], 4, [2, 2], [["a b", "c d"]]),
        (["a b c", "d e f"], 0, [3, 3], [["a b c", "d e f"]]),  # No limit.
        (
            ["a b", "c d", "e", "1 2 3 4 5 6", "f", ""],
            4,
            [2, 2, 1, 6, 1, 1],
            [["a b", "c d"], ["e"], ["1 2 3 4 5 6"], ["f", ""]],
        ),
    ],
)
def test_a_batch_that_is_too_heavy_runs_in_parts_within_the_bound(
    inputs: list[str], most: int, weights: list[int], runs: list[list[str]]
) -> None:
    model = Model()
    answer = run(model, *inputs, most=most)
    assert answer == frames.Outputs(7, ValueKind.TEXT, [text.upper() for text in inputs], {}, weights)
    assert model.runs == runs


def test_errors_keep_their_places_over_the_parts_and_a_part_that_raises_fails_the_batch() -> None:
    def refusing(inputs: list[str]) -> Any:
        if "bad" in inputs:
            raise ValueError("a bad one")
        return [ValueError(text) if "x" in text else text for text in inputs]

    refusing.words = lambda text: len(text.split())  # type: ignore[attr-defined]
    answer = run(refusing, "a b c", "x d", "e", "f g x")
    assert answer.outputs == ["a b c", None, "e", None]
    assert sorted(answer.errors) == [1, 3]
    answer = run(refusing, "a b c", "bad", "b c d")
    assert answer.message == "ValueError: a bad one"


def test_parameters_go_with_their_parts() -> None:
    class Cut(Model):
        def __call__(self, inputs: list[str], parameters: list[dict[str, int]]) -> list[str]:  # type: ignore[override]
            return [text[: one["n"]] for text, one in zip(inputs, parameters, strict=True)]

    loaded, by = weighing(Cut())
    given = [b'{"n": 1}', b'{"n": 2}', b'{"n": 3}', b'{"n": 9}']
    answer: Any = run_batch.run(loaded, frames.Run(7, ["abcd", "odd", "a b c d", "abcd"], given), by)
    assert answer.outputs == ["a", None, "a b", "abcd"]


def test_an_input_without_a_weight_fails_alone() -> None:
    model = Model()
    answer = run(model, "a", "odd", "negative", "b")
    assert answer.outputs == ["A", None, None, "B"]
    assert answer.weights == [1, 0, 0, 1]
    assert answer.errors == {
        1: ("the weight function words raised ValueError: no words", False),
        2: ("the weight function words returned int, expected a number of at least 0", True),
    }
    assert model.runs == [["a", "b"]]
    assert run(model, "odd").outputs == [None]
    assert model.runs == [["a", "b"]]


def test_the_parts_of_json_outputs_make_one_answer() -> None:
    def lengths(inputs: list[str]) -> list[list[int]]:
        return [[len(text)] for text in inputs]

    loaded, by = weighing(lengths, words=lambda text: 3)
    assert loaded.signature.gives is ValueKind.JSON
    assert run_batch.run(loaded, frames.Run(7, ["a", "bc"]), by) == frames.Outputs(
        7, ValueKind.JSON, [b"[1]", b"[2]"], {}, [3, 3]
    )


def test_a_function_may_be_the_targets_the_modules_or_async() -> None:
    async def slowly(text: str) -> float:
        await asyncio.sleep(0)
        return 2.5

    assert weighing(Model(), words=lambda text: 99)[1].weigh("a b c") == 3
    loop = UserLoop()
    assert Weighing(target(upper, words=slowly), "words", 4, loop).weigh("a") == 3
    loop.close()
    assert weighing(str.split, "octets", octets=len)[1].weigh(b"") == 1


@pytest.mark.parametrize("odd", [None, "3", True, -0.5, math.nan, math.inf, [3]], ids=str)
def test_what_is_no_weight_is_refused_when_the_target_loads(odd: object) -> None:
    with pytest.raises(
        Refusal, match=r"expected a number of at least 0 for the warm-up input 'warm-up'\. Fix it"
    ) as told:
        weighing(lambda inputs: inputs, words=lambda text: odd)
    assert not told.value.trace


def test_a_function_that_raises_for_the_warm_up_input_is_refused_with_its_traceback() -> None:
    def words(text: str) -> int:
        raise LookupError("no vocabulary")

    with pytest.raises(Refusal, match="weight function words raised LookupError: no vocabulary") as told:
        weighing(lambda inputs: inputs, words=words)
    assert "in words" in told.value.trace


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("word", "neither the target nor its module has it; there is 'words'"),
        ("zebra", "neither the target nor its module has it. Write def zebra(input) -> int"),
        ("number", "number is of type int there"),
        ("pair", "its signature is (a, b)"),
    ],
)
def test_a_function_that_is_none_is_refused(function: str, says: str) -> None:
    with pytest.raises(
        Refusal,
        match=re.escape(f"target m.py:model: --weight {function} must name a function of the target, but {says}"),
    ):
        weighing(Model(), function, number=3, pair=lambda a, b: 1)

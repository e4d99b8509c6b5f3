"""How results of user code are judged. No processes involved."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.backends.process import child, frames, run_batch
from headway.backends.process.frames import Computed, Failed, NoFrame, Outputs, Run
from headway.backends.process.usercode import Refusal, Target, UserLoop, describe, load, prepare
from headway.model import Output, TokenCount, ValueKind


@pytest.mark.parametrize(
    ("limits", "sizes", "lines", "mixed", "crowded"),
    [
        ({"MAX_OUTPUTS": 20}, [8, 7, 6, 1], 0, False, [0]),  # The largest is left out.
        # Large outputs get less room, and never displace small ones.
        ({"LONG_HAND_OVER": 5, "MAX_LARGE_OUTPUTS": 12}, [7, 4, 5, 4, 6, 4], 0, False, [0]),
        # They get even less beside other entries' small ones.
        ({"LONG_HAND_OVER": 5, "MAX_LARGE_OUTPUTS": 20, "LARGE_BESIDE": 6}, [7, 6, 5, 1], 0, True, [0, 1]),
        ({"LONG_HAND_OVER": 5, "MAX_LARGE_OUTPUTS": 20, "LARGE_BESIDE": 6}, [7, 6, 5, 1], 0, False, []),
        ({"LONG_HAND_OVER": 5, "MAX_LARGE_OUTPUTS": 20, "LARGE_BESIDE": 6}, [7, 6, 5, -1], 0, True, []),
        ({"MAX_OUTPUTS": 10, "MAX_LINES_OUTPUTS": 8}, [5, 5, 7, 6, -1, 1], 4, False, [3]),  # Bulk lines have their own.
    ],
)
def test_outputs_that_are_too_large_together_are_left_out(
    limits: dict[str, int],
    sizes: list[int],
    lines: int,
    mixed: bool,
    crowded: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A size below 0 means an error."""
    for name, value in limits.items():
        monkeypatch.setattr(frames, name, value)
    outputs = [ValueError("no") if size < 0 else "x" * size for size in sizes]
    word: Any = run_batch.bounded(run_batch.judge(1, len(sizes), outputs), lines, mixed=mixed)
    assert word.crowded == {place: sizes[place] for place in crowded}
    assert [place for place, output in enumerate(word.outputs) if output is None and sizes[place] >= 0] == crowded


def test_one_output_that_is_too_large_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_OUTPUT", 8)
    judged: Any = run_batch.judge(1, 4, ["x" * 8, "x" * 9, "é" * 4, "é" * 5])
    assert judged.outputs == ["x" * 8, None, "éééé", None]
    assert [(place, fault) for place, (_, fault) in judged.errors.items()] == [(1, True), (3, True)]


def test_it_says_that_a_batch_ran_before_it_hands_over_large_outputs() -> None:
    class Words(child.Pipe):
        holds = True

        def __init__(self, *asked: Run) -> None:
            self.arena, self._asked = None, [msgspec.msgpack.encode(run) for run in asked]
            self.told: list[object] = []

        def receive(self) -> bytes | None:
            return self._asked.pop(0) if self._asked else None

        def send(self, word: object) -> None:
            self.told.append(word)

    pipe, loop = Words(Run(1, ["a", "b"]), Run(2, ["large", "b"])), UserLoop()
    target = prepare(
        lambda inputs: ["x" * frames.LONG_HAND_OVER if one == "large" else one for one in inputs], "t", "", loop
    )
    child.serve(pipe, target, loop)
    loop.close()
    small, computed, large = pipe.told
    assert isinstance(small, Outputs) and isinstance(large, Outputs)
    assert computed == Computed(frames.LONG_HAND_OVER + 1)


class Endless(list[str]):
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return itertools.repeat("a")


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "end it by returning a list"),
        ("ab", "return one output for each input"),
        ({"a": "b", "c": "d"}, "expected a list of 2 outputs"),
        ((text for text in "ab"), "return a list instead of yielding its items"),
        ({"a", "b"}, "expected a list of 2 outputs"),
        (2, "expected a list of 2 outputs"),
        (Endless(), "the target returned 3 outputs for 2 inputs"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_only_a_list_or_a_tuple_of_as_many_outputs_is_taken(result: object, says: str) -> None:
    judged: Any = run_batch.judge(1, 2, result)
    assert judged.bad_output
    assert says in judged.message


class Rude(BaseException):
    """An exception that `except Exception` misses, and whose `str` raises."""

    def __str__(self) -> str:
        raise Rude


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise Rude


def raising(*names: str, base: type = object, meta: type = type) -> Any:
    def method(*_: object) -> Any:
        raise Rude

    members = {name: property(method) if name == "__class__" else method for name in names}
    kind = meta("Odd", (base,), members)
    return kind(["a"] if base in (list, tuple) else "a") if base is not object else kind()


@pytest.mark.parametrize("base", [list, tuple])
@pytest.mark.parametrize("name", ["__len__", "__iter__", "__class__"])
def test_a_list_whose_own_methods_raise_fails_its_batch(base: type, name: str) -> None:
    judged = run_batch.run(Target(lambda inputs: raising(name, base=base), "odd", "", UserLoop()), frames.Run(1, ["a"]))
    assert isinstance(judged, Outputs | Failed)
    if isinstance(judged, Failed):
        assert judged.message == "Rude: (its message cannot be shown)"


ODD: dict[str, Callable[[], Any]] = {
    "class": lambda: raising("__class__"),
    "exception": lambda: raising("__str__", "__repr__", base=ValueError),
    "nameless": lambda: raising(meta=Nameless),
    "class of nameless": lambda: raising("__class__", meta=Nameless),
    "text": lambda: raising("encode", "isascii", "__len__", "__str__", "__iter__", "__format__", base=str),
    "rude": Rude,
}


@pytest.mark.parametrize("name", ODD)
def test_a_value_whose_own_methods_raise_fails_at_most_its_own_input(name: str) -> None:
    judged: Any = run_batch.run(
        Target(lambda inputs: ["A", ODD[name]()], "odd", "", UserLoop()), frames.Run(1, ["a", "b"])
    )
    assert judged.outputs in (["A", None], ["A", "a"])
    assert all(type(text) is str for text, _ in judged.errors.values())
    assert child._encode(judged)


def test_what_is_no_text_fails_its_own_input() -> None:
    outputs = [ValueError, None, 7, b"seven", "\ud800", ValueError("no good"), "A"]
    judged: Any = run_batch.judge(1, len(outputs), outputs)
    assert judged.outputs == [None] * 6 + ["A"]
    said = [text.removeprefix("the target returned ").partition(" for ")[0] for text, _ in judged.errors.values()]
    assert said == ["type", "NoneType", "int", "bytes", "a lone surrogate", "ValueError: no good"]
    assert [fault for _, fault in judged.errors.values()] == [True] * 5 + [False]


def test_an_error_text_is_bounded_and_proper_unicode() -> None:
    assert describe(ValueError("x" * 10_000)) == "ValueError: " + "x" * 500
    assert describe(ValueError("\ud800")) == "ValueError: \\ud800"
    assert describe(KeyError()) == "KeyError"


def test_a_target_is_called_with_inputs_and_no_parameters_but_its_second() -> None:
    def emptied(inputs: list[str]) -> list[str]:
        inputs.clear()
        return inputs

    judged = run_batch.run(Target(emptied, "emptied", "", UserLoop()), frames.Run(1, ["a", "b"]))
    assert judged == Failed(1, True, "the target returned 0 outputs for 2 inputs"), "as many as were sent"
    assert Target(dict.fromkeys, "a builtin without a signature", "", UserLoop()).run(["a"], None) == {"a": None}
    with pytest.raises(Refusal, match="its signature is"):
        Target(lambda parameters, inputs: inputs, "swapped", "", UserLoop())


def test_frames_of_any_size_are_read_whole_one_after_the_other() -> None:
    reading, writing = os.pipe()
    pipe = child.Pipe(reading)
    contents = [b"", b"x", b"y" * 30_000]
    os.write(writing, b"".join(map(frames.framed, contents)))
    assert [pipe.receive() for _ in contents] == contents
    assert not pipe.holds
    os.close(writing)
    assert pipe.receive() is None
    os.close(reading)


@pytest.mark.parametrize("header", [b"GET / HTTP/1", frames.HEADER.pack(frames.MAGIC, frames.MAX_FRAME + 1)])
def test_what_is_no_frame_is_not_read(header: bytes) -> None:
    with pytest.raises(NoFrame):
        frames.length(header)


def test_a_changed_file_of_equal_second_and_size_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "edited_often.py"
    for change in ("upper", "title"):
        file.write_text(f"def answer(inputs):\n    return [text.{change}() for text in inputs]\n")
        os.utime(file, (1_700_000_000, 1_700_000_000))
        target = load("file", str(file), "answer", UserLoop())
        assert target.run(["ab"], None) == [getattr("ab", change)()]
        monkeypatch.delitem(sys.modules, "edited_often")


def test_long_parameters_that_inputs_have_in_common_travel_once_and_each_input_gets_its_own() -> None:
    long, short = b'{"x":"' + b"x" * frames.LONG + b'"}', b'{"x":"y"}'
    batch = frames.Run(1, ["a", "b", "c", "d"], [long, short, long, b""])
    batch.share_parameters()
    content = msgspec.msgpack.encode(batch)
    assert len(content) < len(long) + 100
    seen: list[dict[str, str]] = []

    def keep(inputs: list[str], parameters: list[dict[str, str]]) -> list[str]:
        seen.extend(parameters)
        return inputs

    run_batch.run(Target(keep, "keep", "", UserLoop()), msgspec.msgpack.decode(content, type=frames.Run))
    assert [len(one.get("x", "")) for one in seen] == [frames.LONG, 1, frames.LONG, 0]
    assert seen[0] is not seen[2], "what a target changes of one is no other's"
    batch = frames.Run(1, ["a", "b"], [short, short])
    batch.share_parameters()
    assert (batch.parameters, batch.which) == ([short, short], [])


@pytest.mark.parametrize(
    ("gives", "value", "sent"),
    [(ValueKind.TEXT, "a", "a"), (ValueKind.JSON, {"a": 1}, b'{"a":1}'), (ValueKind.BYTES, b"\0a", b"\0a")],
)
def test_an_output_may_tell_the_tokens_that_its_input_has_used(gives: ValueKind, value: Any, sent: Any) -> None:
    judged: Any = run_batch.judge(1, 4, [value, Output(value, 7, 3), Output(value, tokens=2), ValueError("no")], gives)
    assert (judged.outputs, judged.tokens) == ([sent, sent, sent, None], {1: TokenCount(7, 3), 2: TokenCount(2)})
    assert list(judged.errors) == [3]
    assert run_batch.judge(1, 1, [value], gives).tokens == {}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tokens", "error"),
    [((1.5,), TypeError), ((True,), TypeError), ((-1,), ValueError), ((1 << 31,), ValueError), ((1, 2), ValueError)],
)
def test_a_number_of_tokens_that_cannot_be_is_refused_where_it_is_written(tokens: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="tokens"):
        Output("a", *tokens)

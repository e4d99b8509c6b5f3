"""Judgement of what user code returns, without a process."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.backends.process import child, frames
from headway.backends.process.frames import Computed, Failed, NoFrame, Outputs, Run
from headway.backends.process.usercode import Refusal, Target, UserLoop, describe, load, prepare
from headway.backends.process.values import annotations_of, kinds_of
from headway.model import Output, TokenCount, ValueKind


def test_a_limit_holds_for_one_output_and_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_OUTPUT", 8)
    monkeypatch.setattr(frames, "MAX_OUTPUTS", 20)
    judged = child.judge(1, 4, ["x" * 8, "x" * 9, "é" * 4, "é" * 5])
    assert isinstance(judged, Outputs)
    assert judged.outputs == ["x" * 8, None, "éééé", None]
    assert [(place, fault) for place, (_, fault) in judged.errors.items()] == [(1, True), (3, True)]
    word = child.bounded(child.judge(2, 4, ["x" * 8, "x" * 7, "x" * 6, "x"]), 0)
    assert isinstance(word, Outputs)
    assert (word.outputs, word.crowded) == ([None, "x" * 7, "x" * 6, "x"], {0: 8})


def test_large_outputs_have_less_room_and_never_push_small_ones_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LONG_HAND_OVER", 5)
    monkeypatch.setattr(frames, "MAX_LARGE_OUTPUTS", 12)
    word = child.bounded(child.judge(1, 6, ["x" * 7, "xxxx", "x" * 5, "xxxx", "x" * 6, "xxxx"]), 0)
    assert isinstance(word, Outputs)
    assert (word.outputs, word.crowded) == ([None, "xxxx", "x" * 5, "xxxx", "x" * 6, "xxxx"], {0: 7})


def test_large_outputs_have_less_room_beside_small_ones_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LONG_HAND_OVER", 5)
    monkeypatch.setattr(frames, "MAX_LARGE_OUTPUTS", 20)
    monkeypatch.setattr(frames, "LARGE_BESIDE", 6)
    outputs = ["x" * 7, "x" * 6, "x" * 5]

    def left_out(*others: object, mixed: bool) -> list[int]:
        word = child.bounded(child.judge(1, len(outputs) + len(others), [*outputs, *others]), 0, mixed=mixed)
        assert isinstance(word, Outputs)
        return sorted(word.crowded)

    assert left_out("x", mixed=True) == [0, 1]
    assert left_out("x", mixed=False) == []
    assert left_out(ValueError("no"), mixed=True) == [], "nobody waits for them"


def test_the_outputs_of_bulk_lines_have_a_bound_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_OUTPUTS", 10)
    monkeypatch.setattr(frames, "MAX_LINES_OUTPUTS", 8)
    word = child.bounded(child.judge(1, 6, ["x" * 5, "x" * 5, "x" * 7, "x" * 6, ValueError("no"), "x"]), 4)
    assert isinstance(word, Outputs)
    assert word.outputs == ["x" * 5, "x" * 5, "x" * 7, None, None, "x"]
    assert word.crowded == {3: 6}
    assert set(word.errors) == {4}


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


@pytest.mark.parametrize("result", [None, "ab", {"a": "b", "c": "d"}, iter(["a", "b"]), {"a", "b"}, 2])
def test_only_a_list_or_a_tuple_is_a_list(result: object) -> None:
    judged = child.judge(1, 2, result)
    assert isinstance(judged, Failed)
    assert judged.bad_output
    assert "expected a list of 2 outputs" in judged.message


def test_the_length_is_that_of_the_inputs_as_they_were_sent() -> None:
    def emptied(inputs: list[str]) -> list[str]:
        inputs.clear()
        return inputs

    judged = child.run(Target(emptied, "emptied", "", UserLoop()), frames.Run(1, ["a", "b"]))
    assert judged == Failed(1, True, "the target returned 0 outputs for 2 inputs")


class Rude(BaseException):
    """Exception that no handler of Exception catches, and whose text cannot be made."""

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
    judged = child.run(Target(lambda inputs: raising(name, base=base), "odd", "", UserLoop()), frames.Run(1, ["a"]))
    assert isinstance(judged, Outputs | Failed)
    if isinstance(judged, Failed):
        assert judged.message == "Rude: (its text cannot be shown)"


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
    judged = child.run(Target(lambda inputs: ["A", ODD[name]()], "odd", "", UserLoop()), frames.Run(1, ["a", "b"]))
    assert isinstance(judged, Outputs)
    assert judged.outputs in (["A", None], ["A", "a"])
    assert all(type(text) is str for text, _ in judged.errors.values())
    assert child._encode(judged)


def test_a_list_that_lies_about_its_length_fails_its_batch() -> None:
    class Endless(list[str]):
        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[str]:
            return itertools.repeat("a")

    assert child.judge(1, 1, Endless()) == Failed(1, True, "the target returned 2 outputs for 1 inputs")


def test_an_exception_class_is_no_exception_instance() -> None:
    judged = child.judge(1, 1, [ValueError])
    assert isinstance(judged, Outputs)
    assert judged.errors == {0: ("the target returned type for this input, expected str", True)}


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ([[0.5, 1.0]], "-> list[list[list[float]]]"), ([0.5], "-> list[list[float]]"), ([], "-> list[list]"), (2, "-> list[int]"),
        (True, "-> list[bool]"), ({"a": 1}, "-> list[dict]"), (b"ab", "-> list[bytes]"), ([{"a": 1}], "-> list[list[dict]]"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_told_the_annotation_to_write(output: object, line: str) -> None:
    judged = child.judge(1, 1, [output])
    assert isinstance(judged, Outputs)
    [(said, _)] = judged.errors.values()
    assert f"annotate them: write {line} behind its parameters" in said
    assert kinds_of({"return": eval(line.removeprefix("-> "))}, "inputs")[1] is not ValueKind.TEXT


@pytest.mark.parametrize(
    ("result", "mend"),
    [
        ((text for text in "ab"), "return a list in place of yielding its items"), (None, "end it with return, and a list"),
        ("ab", "return one output for each input"),
    ],
)  # fmt: skip
def test_who_returns_no_list_is_told_what_to_return(result: object, mend: str) -> None:
    judged = child.judge(1, 2, result)
    assert isinstance(judged, Failed)
    assert mend in judged.message


def test_an_error_text_is_bounded_and_proper_unicode() -> None:
    assert describe(ValueError("x" * 10_000)) == "ValueError: " + "x" * 500
    assert describe(ValueError("\ud800")) == "ValueError: \\ud800"
    assert describe(KeyError()) == "KeyError"


def test_a_builtin_without_a_signature_is_called_with_inputs() -> None:
    assert Target(dict.fromkeys, "fromkeys", "", UserLoop()).run(["a"], None) == {"a": None}


def test_parameters_that_are_not_second_are_not_ours() -> None:
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

    child.run(Target(keep, "keep", "", UserLoop()), msgspec.msgpack.decode(content, type=frames.Run))
    assert [len(one.get("x", "")) for one in seen] == [frames.LONG, 1, frames.LONG, 0]
    assert seen[0] is not seen[2], "what a target changes of one is no other's"


def test_short_parameters_travel_as_they_are() -> None:
    batch = frames.Run(1, ["a", "b"], [b"{}", b"{}"])
    batch.share_parameters()
    assert (batch.parameters, batch.which) == ([b"{}", b"{}"], [])


@pytest.mark.parametrize(
    ("gives", "value", "sent"),
    [(ValueKind.TEXT, "a", "a"), (ValueKind.JSON, {"a": 1}, b'{"a":1}'), (ValueKind.BYTES, b"\0a", b"\0a")],
)
def test_an_output_may_tell_the_tokens_that_its_input_has_used(gives: ValueKind, value: Any, sent: Any) -> None:
    judged = child.judge(1, 4, [value, Output(value, 7, 3), Output(value, tokens=2), ValueError("no")], gives)
    assert not isinstance(judged, Failed)
    assert (judged.outputs, judged.tokens) == ([sent, sent, sent, None], {1: TokenCount(7, 3), 2: TokenCount(2)})
    assert list(judged.errors) == [3]
    assert child.judge(1, 1, [value], gives).tokens == {}  # type: ignore[union-attr]


def test_tokens_stay_with_their_inputs_where_others_are_refused() -> None:
    target = Target(lambda inputs: ["a", Output("b", tokens=5)], "texts", "", UserLoop())
    word = child.run(target, frames.Run(1, [b"[1]", "a", "b"]))
    assert isinstance(word, Outputs)
    assert (word.outputs, list(word.errors), word.tokens) == ([None, "a", "b"], [0], {2: TokenCount(5)})


@pytest.mark.parametrize(
    ("tokens", "error"),
    [((1.5,), TypeError), ((True,), TypeError), ((-1,), ValueError), ((1 << 31,), ValueError), ((1, 2), ValueError)],
)
def test_a_number_of_tokens_that_cannot_be_is_refused_where_it_is_written(tokens: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="tokens"):
        Output("a", *tokens)


def test_an_annotation_of_outputs_with_tokens_says_their_kind() -> None:
    def texts(inputs: list[str]) -> list[Output[str]]:
        raise NotImplementedError

    def values(inputs: list[str]) -> list[Output[dict[str, int]] | ValueError]:
        raise NotImplementedError

    def octets(inputs: list[str]) -> list[bytes | Output[bytes]]:
        raise NotImplementedError

    found = [kinds_of(annotations_of(one), "inputs")[1] for one in (texts, values, octets)]
    assert found == [ValueKind.TEXT, ValueKind.JSON, ValueKind.BYTES]

"""Kinds of targets, taken from their annotations, and how user code's values are transferred. No processes involved."""

from __future__ import annotations

import datetime
import functools
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import msgspec
import pytest

from headway.backends.process import frames, run_batch
from headway.backends.process.frames import Outputs
from headway.backends.process.usercode import Refusal, Target, UserLoop
from headway.backends.process.values import NoOutput, encoder
from headway.model import Octets, Output, Value, ValueKind
from tests.targets import large

TEXT, JSON, BYTES = ValueKind.TEXT, ValueKind.JSON, ValueKind.BYTES


class Row(TypedDict):
    name: str


class Array:
    def __init__(self, content: Any) -> None:
        self.content = content

    def tolist(self) -> Any:
        return self.content


def annotated(takes: Any, gives: Any) -> Callable[[Any], Any]:
    def target(inputs: Any) -> Any:
        return list(inputs)

    target.__annotations__ = {**({"inputs": takes} if takes else {}), **({"return": gives} if gives else {})}
    return target


def test_an_input_of_another_type_than_annotated_never_reaches_the_target() -> None:
    target = Target(annotated(list[dict[str, int] | None], list), "t", "", UserLoop())
    inputs: list[Value] = [b'{"a": 1}', "text", b"[1]", b"null", b"7", '{"a": 1}']
    readable, refused = target.read(inputs)
    assert readable == [{"a": 1}, None]
    told = "this model takes an object or null as an input, but this one is of type "
    text = refused.pop(5)
    assert refused == {1: f"{told}str", 2: f"{told}array", 4: f"{told}number"}
    assert text.startswith(f"{told}str. It is a string that looks like JSON")
    assert "use /v1/inference" in text and "ModelInfer" in text


@pytest.mark.parametrize(
    ("takes", "gives", "kinds"),
    [
        (None, None, (TEXT, TEXT)),
        (list, list, (TEXT, TEXT)),
        (list[str], list[str], (TEXT, TEXT)),
        ("list[str]", "list[str | ValueError]", (TEXT, TEXT)),
        (Sequence[str], tuple[str, ...], (TEXT, TEXT)),
        ("no_such_name", "list[dict[str, Any]]", (TEXT, TEXT)),
        (list[str], None, (TEXT, TEXT)),
        (list[str], list[list[float]], (TEXT, JSON)),
        (list[str], list[dict[str, Any] | Exception], (TEXT, JSON)),
        (list[str], list[Any], (TEXT, JSON)),
        (list[str], "list[Array]", (TEXT, JSON)),
        (list[str], "Array", (TEXT, JSON)),
        (list[dict[str, Any]], None, (JSON, JSON)),
        (list[Any], list[Any], (JSON, JSON)),
        (list[object], list[str], (JSON, TEXT)),
        (list[Row], list[float | None], (JSON, JSON)),
        (list[str | list[int]], list[bool], (JSON, JSON)),
        (Sequence[float], list[None], (JSON, JSON)),
        (list[bytes], list[bytes], (BYTES, BYTES)),
        (list[bytes], None, (BYTES, JSON)),
        (list[bytes], list[str], (BYTES, TEXT)),
        (list[bytes | str], list[bytes], (JSON, BYTES)),
        (list[str], list[Output[str]], (TEXT, TEXT)),
        (list[str], list[Output[dict[str, int]] | ValueError], (TEXT, JSON)),
        (list[bytes], list[bytes | Output[bytes]], (BYTES, BYTES)),
    ],
)  # fmt: skip
def test_kinds_follow_from_the_annotations(takes: Any, gives: Any, kinds: tuple[ValueKind, ValueKind]) -> None:
    signature = Target(annotated(takes, gives), "t", "", UserLoop()).signature
    assert (signature.takes, signature.gives) == kinds


def test_kinds_of_a_class_and_of_a_partial_function_are_those_of_their_call() -> None:
    class Model:
        def __call__(self, texts: list[str], parameters: list[dict[str, Any]]) -> list[list[float]]:
            return []

    assert Target(Model(), "t", "", UserLoop()).signature.gives is JSON
    partial = functools.partial(annotated(list[dict[str, Any]], list[dict[str, Any]]))
    assert Target(partial, "t", "", UserLoop()).signature.takes is TEXT


def run(function: Callable[..., Any], *inputs: Value, parameters: list[bytes] | None = None) -> Any:
    return run_batch.run(Target(function, "t", "", UserLoop()), frames.Run(7, list(inputs), parameters))


@pytest.mark.parametrize(
    ("output", "value"),
    [
        ("a", "a"),
        (None, b"null"),
        ([1, (2, 3)], b"[1,[2,3]]"),
        (Array([0.5, 1]), b"[0.5,1]"),
        ({"scores": [Array(0.5), Array([[1]])]}, b'{"scores":[0.5,[[1]]]}'),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (b"ab", "YWI="),
        (1 << 70, b"1180591620717411303424"),
        (msgspec.Raw(b'[1, "\xc3\xa9"]'), '[1, "é"]'.encode()),
        ({"a": None, "b": [1.5]}, b'{"a":null,"b":[1.5]}'),
    ],
)
def test_an_output_becomes_json(output: Any, value: Value) -> None:
    assert encoder(JSON)(output) == value


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (math.nan, "NaN or an infinity"),
        ([{"a": (1, {"b": [math.inf]})}], "NaN or an infinity"),
        (Array([1.0, math.nan]), "NaN or an infinity"),
        ("\ud800", "lone surrogate"),
        (["\ud800"], "lone surrogate"),
        ({(1, 2): 3}, "which is not a JSON value"),
        (object(), "object for this input, which is not a JSON value: it contains object"),
        ([1, object()], "list for this input, which is not a JSON value: it contains object"),
        (msgspec.Raw(b"[1"), "msgspec.Raw for this input that is not JSON"),
        (msgspec.Raw(b'["\xff"]'), "msgspec.Raw for this input that is not JSON"),
        (deep(100_000), "nested too deeply"),
    ],
    ids=lambda given: given if isinstance(given, str) and given.isascii() else "",
)
def test_what_is_no_json_value_is_refused_with_the_reason(output: Any, says: str) -> None:
    with pytest.raises(NoOutput, match=says):
        encoder(JSON)(output)


def test_bad_outputs_fail_alone() -> None:
    def mixed(inputs: list[Any]) -> list[Any]:
        return [1, math.nan, ValueError("no"), "x"]

    word = run(mixed, *[b"0"] * 4)
    assert word.outputs == [b"1", None, None, b'"x"']
    assert word.errors == {
        1: ("the target returned NaN or an infinity for this input, which are not JSON values", True),
        2: ("ValueError: no", False),
    }


def test_an_array_of_outputs_is_a_list_of_them() -> None:
    def embed(inputs: list[str]) -> list[list[float]]:
        return Array([[0.5]] * len(inputs))  # type: ignore[return-value]

    assert run(embed, "a", "b").outputs == [b"[0.5]", b"[0.5]"]


def test_inputs_that_cannot_be_given_to_a_target_fail_alone_and_the_others_run() -> None:
    def lengths(inputs: list[str], parameters: list[dict[str, Any]]) -> list[str]:
        return [f"{text} {given['n']}" for text, given in zip(inputs, parameters, strict=True)]

    word = run(lengths, "a", b"[1]", "c", parameters=[b'{"n":1}', b'{"n":2}', b'{"n":3}'])
    reason = "this model takes text, but the input is of type array"
    assert word == Outputs(7, ValueKind.TEXT, ["a 1", None, "c 3"], {1: (reason, False)})
    assert run(lengths, b"{}").errors == {0: ("this model takes text, but the input is of type object", False)}

    def values(inputs: list[Any]) -> list[Any]:
        return inputs

    word = run(values, b"[1e400]", b"[1]")
    assert word.outputs == [None, b"[1]"]
    assert "out of range" in word.errors[0][0]


def test_octets_come_as_they_are_or_in_base64() -> None:
    def reverse(inputs: list[bytes]) -> list[bytes]:
        return [one[::-1] for one in inputs]

    word = run(reverse, "YWI=", "no base64!", b"[1]", "", Octets(b"\xffab"))
    assert word.outputs == [b"ba", None, None, b"", b"ba\xff"]
    assert {error for error, _ in word.errors.values()} == {"this model takes bytes, but the input is not base64"}

    def texts(inputs: list[bytes]) -> list[bytes]:
        return ["a"] * len(inputs)  # type: ignore[list-item]

    assert run(texts, "YWI=").errors == {
        0: (
            "the target returned str for this input, expected bytes; if that is intended, annotate it: write -> list[str] after its parameters",
            True,
        )
    }


@pytest.mark.parametrize(
    ("takes", "example", "value", "kinds"),
    [
        (list[str], "hello", "hello", (TEXT, TEXT)),
        (list[dict[str, Any]], {"a": 1}, b'{"a":1}', (JSON, JSON)),
        (list[Any], "hello", "hello", (JSON, JSON)),
        (list[bytes], b"ab", Octets(b"ab"), (BYTES, JSON)),
        (list[str], None, None, (TEXT, TEXT)),
        (list[dict[str, Any]], lambda: None, None, (JSON, JSON)),  # A method that happens to have that name.
        # Without annotations, the example determines the kind.
        (None, [1.0, 2.0], b"[1.0,2.0]", (JSON, JSON)),
        (None, b"ab", Octets(b"ab"), (BYTES, JSON)),
        (None, "ab", "ab", (TEXT, TEXT)),
    ],
)
def test_the_attribute_example_is_the_example(
    takes: Any, example: Any, value: Value | None, kinds: tuple[ValueKind, ValueKind]
) -> None:
    target = annotated(takes, None)
    target.example = example  # type: ignore[attr-defined]
    signature = Target(target, "t", "", UserLoop()).signature
    assert signature.example == value
    assert (signature.takes, signature.gives) == kinds


@pytest.mark.parametrize(
    ("takes", "example", "says"),
    [
        (list[str], 3, "its attribute example is"),
        (list[dict[str, Any]], object(), "its attribute example is"),
        (list[bytes], "a", "its attribute example is"),
        (list[str], [1.0, 2.0], r"expected str like its inputs. Write inputs: list\[list\[float\]\] if"),
    ],
)
def test_an_example_that_the_annotation_forbids_is_refused(takes: Any, example: Any, says: str) -> None:
    target = annotated(takes, None)
    target.example = example  # type: ignore[attr-defined]
    with pytest.raises(Refusal, match=says) as caught:
        Target(target, "t", "", UserLoop())
    assert "->" not in str(caught.value), "that is about outputs"


def test_octets_come_in_the_type_that_the_target_asks_for() -> None:
    for target, told in ((large.growing, [b"a\0"]), (large.sizes, ["1 True 61"])):
        assert run(target, Octets(b"a")).outputs == told


def test_the_garbage_collector_goes_on_after_a_large_input() -> None:
    def count(inputs: list[Any]) -> list[int]:
        return [len(one) + gc.isenabled() for one in inputs]

    large = b"[" + b"[]," * 50_000 + b"1e400]"
    assert run(count, large, large.replace(b"1e400", b"1")).outputs == [None, b"50002"]
    assert gc.isenabled()

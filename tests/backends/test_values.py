"""Kinds of targets by their annotations, and how the values of user code travel; without a process."""

from __future__ import annotations

import datetime
import functools
import gc
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import msgspec
import pytest
from hypothesis import given

from headway.backends.process import child, frames
from headway.backends.process.frames import Failed, Outputs
from headway.backends.process.usercode import Refusal, Target, UserLoop
from headway.backends.process.values import NoOutput, encoder, json_types
from headway.model import Octets, Value, ValueKind
from tests.core.test_values import TREES

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


@pytest.mark.parametrize(
    ("annotation", "allowed"),
    [
        (list[dict[str, int]], ["object"]),
        (Sequence[Row], ["object"]),
        (list[list[float]], ["array"]),
        (tuple[int, ...], ["number"]),
        (list[bool], ["bool"]),
        (list[dict[str, Any] | str | None], ["object", "str", "null"]),
        (list[list[int] | int | ValueError], ["array", "number"]),
        (list[Any], []),
        (list[dict[str, int] | Array], []),
        (list, []),
        (None, []),
    ],
)
def test_types_of_json_values_are_those_of_the_annotation(annotation: Any, allowed: list[str]) -> None:
    assert list(json_types(annotation)) == allowed


def test_an_input_of_another_type_than_annotated_never_reaches_the_target() -> None:
    target = Target(annotated(list[dict[str, int] | None], list), "t", "", UserLoop())
    inputs: list[Value] = [b'{"a": 1}', "text", b"[1]", b"null", b"7"]
    readable, refused = target.read(inputs)
    assert readable == [{"a": 1}, None]
    told = "this model takes an object or null as an input, and this one is of type "
    assert refused == {1: f"{told}str", 2: f"{told}array", 4: f"{told}number"}


def test_json_that_came_as_a_text_is_told_which_door_takes_json() -> None:
    target = Target(annotated(list[dict[str, int]], list), "t", "", UserLoop())
    _, refused = target.read(['{"a": 1}'])
    assert "this one is of type str. It is a text that looks like JSON" in refused[0]
    assert "/v1/inference takes JSON" in refused[0] and "ModelInfer" in refused[0]


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
    return child.run(Target(function, "t", "", UserLoop()), frames.Run(7, list(inputs), parameters))


@given(TREES)
def test_any_json_value_comes_back_from_a_target_as_it_went(tree: Any) -> None:
    def same(inputs: list[Any]) -> list[Any]:
        return inputs

    value = tree if isinstance(tree, str) else json.dumps(tree).encode()
    word = run(same, value)
    assert isinstance(word, Outputs) and word.kind is ValueKind.JSON
    assert [json.loads(output or b"") for output in word.outputs] == [tree]


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
        (object(), "object for this input, which is not a JSON value: it holds object"),
        ([1, object()], "list for this input, which is not a JSON value: it holds object"),
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
    reason = "this model takes text, and the input is of type array"
    assert word == Outputs(7, ValueKind.TEXT, ["a 1", None, "c 3"], {1: (reason, False)})
    assert run(lengths, b"{}").errors == {0: ("this model takes text, and the input is of type object", False)}

    def values(inputs: list[Any]) -> list[Any]:
        return inputs

    word = run(values, b"[1e400]", b"[1]")
    assert word.outputs == [None, b"[1]"]
    assert "out of range" in word.errors[0][0]


def test_a_batch_that_fails_fails_whole_also_with_refused_inputs() -> None:
    def raises(inputs: list[str]) -> list[str]:
        raise ValueError("no")

    word = run(raises, "a", b"[1]")
    assert isinstance(word, Failed)
    assert (word.bad_output, word.message) == (False, "ValueError: no")


def test_octets_come_as_they_are_or_in_base64() -> None:
    def reverse(inputs: list[bytes]) -> list[bytes]:
        return [one[::-1] for one in inputs]

    word = run(reverse, "YWI=", "no base64!", b"[1]", "", Octets(b"\xffab"))
    assert word.outputs == [b"ba", None, None, b"", b"ba\xff"]
    assert {error for error, _ in word.errors.values()} == {
        "this model takes octets, and the input is not text in base64"
    }

    def texts(inputs: list[bytes]) -> list[bytes]:
        return ["a"] * len(inputs)  # type: ignore[list-item]

    assert run(texts, "YWI=").errors == {
        0: (
            "the target returned str for this input, expected bytes; if its outputs are to be that, annotate them: write -> list[str] behind its parameters",
            True,
        )
    }


@pytest.mark.parametrize(
    ("takes", "example", "value"),
    [
        (list[str], "hello", "hello"),
        (list[dict[str, Any]], {"a": 1}, b'{"a":1}'),
        (list[Any], "hello", "hello"),
        (list[bytes], b"ab", Octets(b"ab")),
        (list[str], None, None),
    ],
)
def test_the_attribute_example_is_the_example(takes: Any, example: Any, value: Value | None) -> None:
    target = annotated(takes, None)
    target.example = example  # type: ignore[attr-defined]
    assert Target(target, "t", "", UserLoop()).signature.example == value


@pytest.mark.parametrize(("takes", "example"), [(list[str], 3), (list[dict[str, Any]], object()), (list[bytes], "a")])
def test_an_example_of_another_kind_is_refused(takes: Any, example: Any) -> None:
    target = annotated(takes, None)
    target.example = example  # type: ignore[attr-defined]
    with pytest.raises(Refusal, match="its attribute example is"):
        Target(target, "t", "", UserLoop())


@pytest.mark.parametrize(
    ("example", "kinds"),
    [([1.0, 2.0], (JSON, JSON)), ({"a": 1}, (JSON, JSON)), (b"ab", (BYTES, JSON)), ("ab", (TEXT, TEXT))],
)
def test_without_annotations_the_example_says_the_kind(example: Any, kinds: tuple[ValueKind, ValueKind]) -> None:
    def target(inputs):  # type: ignore[no-untyped-def]
        return inputs

    target.example = example  # type: ignore[attr-defined]
    signature = Target(target, "t", "", UserLoop()).signature
    assert (signature.takes, signature.gives) == kinds
    assert signature.example is not None


def test_an_example_that_the_annotation_forbids_names_the_inputs_and_the_line_to_write() -> None:
    target = annotated(list[str], None)
    target.example = [1.0, 2.0]  # type: ignore[attr-defined]
    with pytest.raises(
        Refusal, match=r"expected str as its inputs are. Write inputs: list\[list\[float\]\] if"
    ) as caught:
        Target(target, "t", "", UserLoop())
    assert "->" not in str(caught.value), "that is about outputs"


def test_a_method_named_example_is_none() -> None:
    target = annotated(list[dict[str, Any]], None)
    target.example = lambda: None  # type: ignore[attr-defined]
    assert Target(target, "t", "", UserLoop()).signature.warm_up_input is None


def test_the_garbage_collector_goes_on_after_a_large_input() -> None:
    def count(inputs: list[Any]) -> list[int]:
        return [len(one) + gc.isenabled() for one in inputs]

    large = b"[" + b"[]," * 50_000 + b"1e400]"
    assert run(count, large, large.replace(b"1e400", b"1")).outputs == [None, b"50002"]
    assert gc.isenabled()

"""How the child splits a batch into calls, by per-call parameters and by padding. No processes involved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.backends.process import arrays, frames, run_batch
from headway.backends.process.array_kind import NAMED, ArrayKind, Rows, array_of, column, tensor_of
from headway.backends.process.arrays import padded_alike
from headway.backends.process.frames import Outputs
from headway.backends.process.usercode import Refusal, Target, UserLoop, describe
from headway.core.batch_cost import Calls
from headway.core.rows import shape_number
from headway.core.tensors import Header, Tensor, TensorHead, pack, unpack
from headway.core.values import of_json
from headway.model import ALL_PARAMETERS, CostShape, RowsTogether, Tensors, TensorSpec, Value

COLD, WARM = b'{"temperature":0,"seed":1}', b'{"temperature":1,"seed":2}'


class Listed:
    together: Any = ("temperature",)

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def __call__(self, inputs: list[str], parameters: list[dict[str, object]]) -> list[str]:
        self.seen.append([(text, given.get("temperature")) for text, given in zip(inputs, parameters, strict=True)])
        if any("bad" in text for text in inputs):
            raise ValueError("no good")
        return [text.upper() for text in inputs]


class Mapped:
    def __init__(self, together: Any = ("temperature",)) -> None:
        self.seen: list[Any] = []
        self.together = together

    def __call__(self, inputs: list[str], *, parameters: Mapping[str, object]) -> list[str]:
        self.seen.append((inputs, parameters))
        return [f"{text} at {parameters.get('temperature')}" for text in inputs]


def run(call: Callable[..., Any], inputs: Sequence[Value], parameters: Sequence[bytes]) -> Any:
    target = Target(call, "target", "", UserLoop())
    return run_batch.run(target, frames.Run(1, [*inputs], [*parameters]), None, 0, Calls(target.one_call))


def test_inputs_of_other_parameters_run_in_calls_of_their_own() -> None:
    listed = Listed()
    answer = run(listed, ["a", "b", "c", "d"], [COLD, WARM, b'{"temperature":0.0}', b""])
    assert listed.seen == [[("a", 0), ("c", 0.0)], [("b", 1)], [("d", None)]]
    assert answer.outputs == ["A", "B", "C", "D"]


def test_a_target_gets_one_mapping_with_the_values_of_its_call() -> None:
    mapped = Mapped()
    answer = run(mapped, ["a", "b", "c"], [COLD, WARM, b'{"temperature":1.0,"seed":3}'])
    assert mapped.seen == [(["a"], {"temperature": 0}), (["b", "c"], {"temperature": 1})]
    assert answer.outputs == ["a at 0", "b at 1", "c at 1"]
    run(mapped, ["a"], [b""])
    assert mapped.seen[-1] == (["a"], {})
    run(mapped := Mapped(ALL_PARAMETERS), ["a", "b"], [WARM, b'{"seed":2.0,"temperature":1}'])
    assert mapped.seen == [(["a", "b"], {"temperature": 1, "seed": 2})]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"5.0", 5),
        (b"1E-400", 0),
        (b'{"b":{"d":1.0,"c":[2.0]},"a":-0.0}', {"a": 0, "b": {"c": [2], "d": 1}}),
        (b"9007199254740992.0", 9007199254740992.0),
    ],
)
def test_a_target_gets_the_normal_form_whoever_rides_and_alone(sent: bytes, expected: object) -> None:
    text, other = b'{"z":1.0,"temperature":' + sent + b"}", b'{"temperature":%s}' % json.dumps(expected).encode()
    for parameters in ([text], [other, text], [text, other]):
        mapped, seen = Mapped(), list[Any]()

        def listed(inputs: list[str], parameters: list[dict[str, object]], seen: list[Any] = seen) -> list[str]:
            seen.append(parameters)
            return inputs

        listed.together = ("temperature",)  # type: ignore[attr-defined]
        for target in (mapped, listed):
            run(target, ["a"] * len(parameters), parameters)
        assert [repr(told) for _, told in mapped.seen] == [repr({"temperature": expected})]
        [each] = seen
        for told, of in zip(each, parameters, strict=True):
            assert repr(told) == repr({"temperature": expected, "z": 1.0} if of is text else {"temperature": expected})


def test_a_call_that_raises_blames_its_own_inputs() -> None:
    answer = run(Listed(), ["a", "bad", "c", "d"], [COLD, WARM, COLD, WARM])
    assert answer.places == [1, 3]


def test_inputs_that_cannot_be_read_fail_alone_in_whichever_call() -> None:
    seen: list[Any] = []

    class Objects:
        together = ALL_PARAMETERS

        def __call__(self, inputs: list[dict[str, int]], parameters: Mapping[str, object]) -> list[str]:
            seen.append((inputs, parameters))
            return [f"{one} {parameters}" for one in inputs]

    values = [of_json(text) for text in (b"[1]", b'{"a":1}', b'{"a":2}', b"[2]")]
    answer = run(Objects(), values, [b'{"t":1}', b'{"t":2}', b'{"t":3}', b'{"t":2}'])
    assert isinstance(answer, Outputs)
    assert seen == [([{"a": 1}], {"t": 2}), ([{"a": 2}], {"t": 3})]
    assert sorted(answer.errors) == [0, 3]


def test_a_padded_batch_is_cut_within_its_groups(clock: Clock) -> None:
    class Together(Padding):
        together = ("temperature",)

    padding, target, calls = learnt(Together, clock)
    long = "long" * 500
    inputs = [long, *[SHORT] * 15, long, *[SHORT] * 15]
    parameters = [b'{"temperature":%d,"place":%d}' % (place // 16, place) for place in range(32)]
    answer: Any = run_batch.run(target, frames.Run(1, [*inputs], parameters), None, 0, calls)
    assert sorted(map(len, padding.seen)) == [1, 1, 15, 15]
    assert answer.outputs == [f"{text[:3]} {json.loads(own)}" for text, own in zip(inputs, parameters, strict=True)]


def rows(*numbers: float) -> Value:
    head = TensorHead("x", "FP32", (1, len(numbers)))
    return pack([Tensor(head, np.array(numbers, "<f4").tobytes())], single=True)


def test_arrays_of_other_parameters_run_in_calls_of_their_own() -> None:
    seen: list[Any] = []

    class Double:
        together = ("scale",)
        inputs: ClassVar = {"x": ("FP32", [2])}

        def __call__(self, x: np.ndarray, parameters: Mapping[str, object]) -> np.ndarray:
            seen.append((x.tolist(), parameters))
            if x[0, 0] == 9:
                raise ValueError("no good")
            return x * 2

    one, two = b'{"scale":1}', b'{"scale":2}'
    assert isinstance(run(Double(), [rows(1, 2), rows(3, 4), rows(5, 6)], [one, two, one]), Outputs)
    assert seen == [([[1, 2], [5, 6]], {"scale": 1}), ([[3, 4]], {"scale": 2})]
    assert run(Double(), [rows(1, 2), rows(9, 4), rows(5, 6)], [one, two, one]).places == [1]


REFUSED: list[tuple[object, str]] = [
    ("temperature", "together is 'temperature', of type str. It must name the parameters that apply to a whole call: write together = ('temperature',), or together = \"all\""),
    (["a", "b"], "write together = ('a', 'b')"),
    ((1,), "together is '(1,)', of type tuple"),
    (True, "together is 'True', of type bool"),
    (("all",), 'together names one parameter, "all". For all parameters, write together = "all"'),
    ((), 'together = ("temperature",); or set together = "all"; or annotate it as list[dict]'),
]  # fmt: skip


@pytest.mark.parametrize(("together", "words"), REFUSED)
def test_what_names_no_parameters_is_refused(together: object, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        Target(Mapped(together), "m:Mapped", "", UserLoop())
    assert words in str(caught.value)


def test_parameters_that_are_not_taken_are_refused_and_a_method_of_that_name_says_nothing() -> None:
    class Deaf:
        together: Any = ("temperature",)

        def __call__(self, inputs: list[str]) -> list[str]:
            return inputs

    with pytest.raises(Refusal, match=r"but it takes none\. Add a second argument named"):
        Target(Deaf(), "m:Deaf", "", UserLoop())
    Deaf.together = lambda self: None
    assert Target(Deaf(), "m:Deaf", "", UserLoop()).per_call == ()
    assert Target(Listed(), "m:Listed", "", UserLoop()).signature.per_call == ("temperature",)


def calls_of(rows: list[np.ndarray], axes: int = 1) -> list[tuple[int, ...]]:
    """Return the shapes of the calls that run these rows. Checks that each row gets its own sum."""
    shapes = []

    def call(inputs: Any, _places: list[int]) -> object:
        shapes.append(inputs["a"].shape)
        return {"sum": inputs["a"].reshape(len(inputs["a"]), -1).sum(axis=1)}

    kind = ArrayKind(NAMED, True, (TensorSpec("a", "INT64", (-1,) * axes),), pad=0)
    found = arrays.run(1, [pack([tensor_of("a", column(row))]) for row in rows], kind, 0, call, describe)
    assert isinstance(found, Outputs)
    assert [array_of(unpack(Tensors(one))[0], "INT64")[0] for one in found.outputs] == [row.sum() for row in rows]
    return shapes


def ones(*shape: int) -> np.ndarray:
    return np.ones((1, *shape), np.int64)


def test_short_rows_of_any_lengths_and_long_ones_of_like_lengths_run_in_one_call() -> None:
    assert calls_of([ones(length) for length in (1, 512, 3, 0, 17)]) == [(5, 512)]
    assert calls_of([ones(100_000), ones(40_000), ones(70_000)]) == [(3, 100_000)]


def test_a_long_row_is_no_burden_for_the_short_ones_beside_it() -> None:
    shapes = calls_of([ones(length) for length in (5, 100_000, *[7] * 60, 90_000)])
    assert len(shapes) == 2
    assert sum(rows * length for rows, length in shapes) <= 4 * 200_000


SIZE = st.one_of(st.integers(0, 40), st.integers(0, 3000))
CORNERS = [
    (round(2 ** (one / 2)), round(2 ** (two / 2)), round(2 ** (21 - (one + two) / 2)))
    for one in range(43)
    for two in range(43 - one)
]
"""Rows of about two mebibytes each, of which any two far apart fill up to many times that."""


@given(st.lists(st.tuples(st.integers(1, 3), st.tuples(*[SIZE] * 3), SIZE), min_size=2, max_size=16), st.integers(1, 3))
@example([(1, corner, 1) for corner in CORNERS], 3)
def test_rows_that_ride_together_share_one_call(asked: list[tuple[int, tuple[int, ...], int]], axes: int) -> None:
    specs = (TensorSpec("a", "UINT8", (-1,) * axes), TensorSpec("b", "FP64", (4, -1)))
    alike: dict[int, list[Rows]] = {}
    for place, (rows, first, second) in enumerate(asked):
        shapes = {"a": (rows, *first[:axes]), "b": (rows, 4, second)}
        header = Header(False, tuple(TensorHead(one.name, one.datatype, shapes[one.name]) for one in specs))
        content = msgspec.msgpack.encode(header)
        value = Tensors(len(content).to_bytes(4, "little") + content + bytes(-(4 + len(content)) % 16))
        number = shape_number(value, RowsTogether.PADDED, specs, 3 * len(asked))
        arrays = {"a": np.broadcast_to(np.uint8(0), shapes["a"]), "b": np.broadcast_to(np.float64(0), shapes["b"])}
        alike.setdefault(number, []).append(Rows(place, arrays, rows, True))
    assert all(len(padded_alike(group)) == 1 for group in alike.values())


ALPHA, BETA = 0.008, 1e-5


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Padding:
    """A target that takes as long as a model that pads its inputs."""

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
    monkeypatch.setattr(run_batch, "monotonic", clock)
    return clock


def called(target: Target, calls: Calls, *inputs: str, number: int = 1) -> Any:
    parameters = [b'{"place":%d}' % place for place in range(len(inputs))]
    return run_batch.run(target, frames.Run(number, [*inputs], parameters), None, 0, calls)


def learnt(kind: type[Padding], clock: Clock) -> tuple[Padding, Target, Calls]:
    padding = kind(clock)
    target = Target(padding, "padding", "", UserLoop())
    calls = Calls(target.one_call)
    for number in range(40):
        called(target, calls, *("x" * (10 + 37 * number * place % 900) for place in range(1 + number % 16)))
    padding.seen.clear()
    return padding, target, calls


LONG, SHORT = "long" * 500, "short"


def test_a_target_that_wants_one_call_gets_one(clock: Clock) -> None:
    padding, target, calls = learnt(Whole, clock)
    called(target, calls, LONG, *[SHORT] * 15, LONG)
    assert [len(inputs) for inputs in padding.seen] == [17]


def test_a_call_that_raises_names_its_own_inputs_and_one_that_had_the_whole_batch_nobody(clock: Clock) -> None:
    _, target, calls = learnt(Padding, clock)
    answer = called(target, calls, LONG, *["short"] * 14, "bad", LONG)
    assert answer.places == list(range(1, 16))
    assert answer.message == "ValueError: no good"
    _, target, calls = learnt(Padding, clock)
    answer = called(target, calls, "bad", "good")
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

"""Parameters that a call has once: what a target says of them, and in which calls a batch runs. Without a process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from headway.backends.process import child, frames
from headway.backends.process.frames import Failed, Outputs
from headway.backends.process.usercode import Refusal, Target, UserLoop
from headway.core.batch_cost import Calls
from headway.core.tensors import Tensor, TensorHead, pack
from headway.core.values import of_json
from headway.model import ALL_PARAMETERS, Value
from tests.backends.test_calls import SHORT, Clock, Padding, clock, learnt

__all__ = ["clock"]
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
    together: Any = ("temperature",)

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, inputs: list[str], parameters: Mapping[str, object]) -> list[str]:
        self.seen.append((inputs, parameters))
        return [f"{text} at {parameters.get('temperature')}" for text in inputs]


class Unannotated:
    together: Any = ("temperature",)

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, inputs: list[str], parameters) -> list[str]:  # type: ignore[no-untyped-def]
        self.seen.append(parameters)
        return inputs


class MappedByName:
    together = ALL_PARAMETERS

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, inputs: list[str], *, parameters: dict[str, object] | None = None) -> list[str]:
        self.seen.append((inputs, parameters))
        return inputs


def run(call: Callable[..., Any], inputs: Sequence[Value], parameters: Sequence[bytes]) -> Outputs | Failed:
    target = Target(call, "target", "", UserLoop())
    return child.run(target, frames.Run(1, [*inputs], [*parameters]), None, 0, Calls(target.one_call))


def test_inputs_of_other_parameters_run_in_calls_of_their_own() -> None:
    listed = Listed()
    answer = run(listed, ["a", "b", "c", "d"], [COLD, WARM, b'{"temperature":0.0}', b""])
    assert listed.seen == [[("a", 0), ("c", 0.0)], [("b", 1)], [("d", None)]]
    assert isinstance(answer, Outputs)
    assert answer.outputs == ["A", "B", "C", "D"]


def test_a_batch_of_equal_values_is_one_call() -> None:
    listed = Listed()
    run(listed, ["a", "b"], [COLD, b'{"seed":9,"temperature":0.0}'])
    run(listed, ["a", "b"], [b"", b'{"seed":9}'])
    assert [len(call) for call in listed.seen] == [2, 2]


def test_a_target_gets_one_mapping_with_the_values_of_its_call() -> None:
    mapped = Mapped()
    answer = run(mapped, ["a", "b", "c"], [COLD, WARM, b'{"temperature":1.0,"seed":3}'])
    assert mapped.seen == [(["a"], {"temperature": 0}), (["b", "c"], {"temperature": 1})]
    assert isinstance(answer, Outputs)
    assert answer.outputs == ["a at 0", "b at 1", "c at 1"]
    run(mapped, ["a"], [b""])
    assert mapped.seen[-1] == (["a"], {})


def test_all_parameters_are_in_the_mapping_where_all_hold_for_a_call() -> None:
    mapped = MappedByName()
    run(mapped, ["a", "b"], [WARM, b'{"seed":2.0,"temperature":1}'])
    assert mapped.seen == [(["a", "b"], {"temperature": 1, "seed": 2})]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"5.0", 5),
        (b"-0.0", 0),
        (b"1E-400", 0),
        (b"[1.0,2]", [1, 2]),
        (b'{"b":{"d":1.0,"c":2},"a":0}', {"a": 0, "b": {"c": 2, "d": 1}}),
        (b"9007199254740992.0", 9007199254740992.0),
        (b"9007199254740992", 9007199254740992),
    ],
)
def test_a_target_gets_the_normal_form_whoever_rides_and_alone(sent: bytes, expected: object) -> None:
    text, other = b'{"z":1.0,"temperature":' + sent + b"}", b'{"temperature":%s}' % json.dumps(expected).encode()
    for batch in ([text], [other, text], [text, other]):
        mapped, unannotated = Mapped(), Unannotated()
        run(mapped, ["a"] * len(batch), batch)
        run(unannotated, ["a"] * len(batch), batch)
        assert [repr(given) for _, given in mapped.seen] == [repr({"temperature": expected})]
        assert [len(given) for given in unannotated.seen] == [len(batch)]
        for given, of in zip(unannotated.seen[0], batch, strict=True):
            assert repr(given) == repr({"temperature": expected, "z": 1.0} if of is text else {"temperature": expected})


def test_the_messages_of_chats_are_none_of_all_parameters() -> None:
    mapped = MappedByName()
    run(mapped, ["a", "b"], [b'{"messages":[1],"top":1}', b'{"top":1.0,"messages":[2]}'])
    assert mapped.seen == [(["a", "b"], {"top": 1})]


def test_a_call_that_raises_blames_its_own_inputs() -> None:
    answer = run(Listed(), ["a", "bad", "c", "d"], [COLD, WARM, COLD, WARM])
    assert isinstance(answer, Failed)
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
    batch = frames.Run(1, [*inputs], [COLD] * 16 + [WARM] * 16)
    answer = child.run(target, batch, None, 0, calls)
    assert isinstance(answer, Outputs)
    assert sorted(map(len, padding.seen)) == [1, 1, 15, 15]
    assert [text[:3] for text in answer.outputs] == [text[:3] for text in inputs]


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
    answer = run(Double(), [rows(1, 2), rows(3, 4), rows(5, 6)], [one, two, one])
    assert isinstance(answer, Outputs)
    assert seen == [([[1, 2], [5, 6]], {"scale": 1}), ([[3, 4]], {"scale": 2})]
    failed = run(Double(), [rows(1, 2), rows(9, 4), rows(5, 6)], [one, two, one])
    assert isinstance(failed, Failed)
    assert failed.places == [1]


def takes_none(inputs: list[str]) -> list[str]:
    return inputs


def mapped(inputs: list[str], parameters: Mapping[str, object]) -> list[str]:
    return inputs


@pytest.mark.parametrize(
    ("together", "words"),
    [
        ("temperature", "together is 'temperature', of type str. It names the parameters that apply to a whole call: write together = ('temperature',), or together = \"all\""),
        (["a", "b"], "write together = ('a', 'b')"),
        ((1,), "together is '(1,)', of type tuple"),
        (True, "together is 'True', of type bool"),
        (("all",), 'together names one parameter, "all". For all of them write together = "all"'),
        (5, "write together = ('temperature',)"),
    ],
)  # fmt: skip
def test_what_names_no_parameters_is_refused(together: object, words: str) -> None:
    listed = Listed()
    listed.together = together
    with pytest.raises(Refusal) as caught:
        Target(listed, "m:Listed", "", UserLoop())
    assert words in str(caught.value)


def test_parameters_that_are_not_taken_are_refused() -> None:
    class Deaf:
        together = ("temperature",)

        def __call__(self, inputs: list[str]) -> list[str]:
            return inputs

    with pytest.raises(
        Refusal, match=r"together names parameters, and it takes none\. Give it a second argument named"
    ):
        Target(Deaf(), "m:Deaf", "", UserLoop())


def test_one_mapping_without_together_is_refused() -> None:
    with pytest.raises(Refusal, match=r'together = \("temperature",\); or set.*"all"; or annotate it as list\[dict\]'):
        Target(mapped, "m:mapped", "", UserLoop())


def test_a_target_tells_which_parameters_it_sees() -> None:
    calls = (takes_none, Listed(), Mapped(), MappedByName())
    assert [Target(call, "m:f", "", UserLoop()).signature.sees for call in calls] == [
        (),
        ALL_PARAMETERS,
        ("temperature",),
        ALL_PARAMETERS,
    ]


def test_a_method_of_that_name_says_nothing() -> None:
    class Friendly:
        def together(self) -> None: ...

        def __call__(self, inputs: list[str]) -> list[str]:
            return inputs

    assert Target(Friendly(), "m:Friendly", "", UserLoop()).per_call == ()
    assert Target(Listed(), "m:Listed", "", UserLoop()).signature.per_call == ("temperature",)

"""Targets that take and return arrays: how they are called, and how their results are handled. No processes involved."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from headway.backends.process import frames, run_batch
from headway.backends.process.arena import Pieces
from headway.backends.process.array_kind import ARRAY, LIST, NAMED, column, tensor_of
from headway.backends.process.frames import Failed, Outputs, Run
from headway.backends.process.run_batch import Weighing
from headway.backends.process.usercode import Refusal, Target, UserLoop
from headway.core.tensors import Tensor, TensorHead, pack, unpack
from headway.core.values import as_json
from headway.model import Octets, Output, Tensors, TensorSpec, TokenCount, Value, ValueKind

Array = np.ndarray[Any, np.dtype[Any]]
ROW = np.zeros(2, np.float32)
X: dict[str, Any] = {"x": ("FP32", [2])}


def target(call: Callable[..., Any], **attributes: Any) -> Target:
    """Load a function with these attributes as a target."""
    for name, value in attributes.items():
        setattr(call, name, value)
    return Target(call, "t", "", UserLoop())


def arrays(**named: Any) -> Tensors:
    """Return a value with these arrays. Their first axis is the rows."""
    return pack([tensor_of(name, column(np.asarray(one))) for name, one in named.items()])


def kinds_of(loaded: Target) -> tuple[ValueKind, ValueKind]:
    return loaded.signature.takes, loaded.signature.gives


def ran(loaded: Target, *values: Value, most: int = 0, parameters: list[bytes] | None = None) -> Outputs:
    word = run_batch.run(loaded, Run(1, list(values), parameters), most_rows=most)
    assert isinstance(word, Outputs), word
    return word


def failed(loaded: Target, *values: Value) -> Failed:
    word = run_batch.run(loaded, Run(1, list(values)))
    assert isinstance(word, Failed), word
    return word


def content(output: Any) -> Tensors:
    return Tensors(output.joined() if isinstance(output, Pieces) else output)


def heads(output: Any) -> list[TensorHead]:
    return [one.head for one in unpack(content(output))]


def shown(word: Outputs) -> list[Any]:
    return [None if one is None else msgspec.json.decode(as_json(content(one))) for one in word.outputs]


def double(x: Array) -> Array:
    return x * 2


class TestForms:
    def test_narrower_numbers_come_in_the_datatype_that_the_target_takes(self) -> None:
        seen = []

        def call(x: Array) -> Array:
            seen.append((x.dtype, x.tolist()))
            return x

        loaded = target(call, inputs={"x": ("FP64", [2])})
        word = ran(
            loaded, arrays(x=np.array([[1, -2]], "i4")), arrays(x=np.array([[0.5, 3]], "f4")), arrays(x=[[0.1, 0]])
        )
        assert seen == [(np.dtype("f8"), [[1, -2], [0.5, 3], [0.1, 0]])]
        assert shown(word) == [[[1, -2]], [[0.5, 3]], [[0.1, 0]]]
        seen.clear()
        ran(target(call, inputs={"x": ("BF16", [2])}), arrays(x=np.array([[1, 255]], "u1")))
        assert seen == [(np.dtype("f4"), [[1, 255]])]

    def test_an_array_has_the_rows_of_all_entries_and_each_gets_its_own(self) -> None:
        calls = []

        def call(x: Array) -> Array:
            calls.append(x.tolist())
            return np.asarray(x.sum(axis=1))

        wide = arrays(INPUT=[[1, 2.0]])  # It is FP64, but the target takes FP32.
        one, two = (arrays(INPUT=np.array(rows, "f4")) for rows in ([[1, 2]], [[3, 4], [5, 6]]))
        word = ran(target(call, example=ROW), one, wide, two, "[7, 8]", "a text")
        assert shown(word) == [[3.0], None, [7.0, 11.0], 15.0, None]
        assert calls == [[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]]
        assert [word.errors[place][1] for place in (1, 4)] == [False, False]
        assert "are `str`; expected one row" in word.errors[4][0]

    def test_arrays_come_and_go_by_name(self) -> None:
        def call(inputs: dict[str, Array]) -> dict[str, Array]:
            assert list(inputs) == ["x", "ids"]
            return {"sum": inputs["x"].sum(1), "ids": inputs["ids"][::-1]}

        loaded = target(
            call,
            inputs={"x": ("fp32", (2,)), "ids": ("INT64", [])},
            outputs={"ids": ("INT64", []), "sum": ("FP32", [])},
        )
        first = arrays(ids=np.array([7]), x=np.ones((1, 2), "f4"))
        word = ran(loaded, first, arrays(x=np.zeros((1, 2), "f4"), ids=np.array([8])))
        assert shown(word) == [{"ids": [8], "sum": [2.0]}, {"ids": [7], "sum": [0.0]}]
        assert [one.name for one in heads(word.outputs[0])] == ["ids", "sum"]

    def test_a_list_has_a_row_each_and_their_lengths_may_differ(self) -> None:
        def call(inputs: list[Array]) -> list[Array]:
            return [one[1:] for one in inputs]

        loaded = target(call, example=ROW)
        assert loaded.signature.inputs == (TensorSpec("INPUT", "FP32", (-1,)),)
        one, two = arrays(INPUT=np.array([[1, 2, 3]], "f4")), arrays(INPUT=np.array([[1, 2], [3, 4]], "f4"))
        assert shown(ran(loaded, one, two)) == [[[2.0, 3.0]], [[2.0], [4.0]]]

    @pytest.mark.parametrize(
        ("takes", "gives", "call", "value", "shown_as"),
        [
            (
                list[str],
                np.ndarray,
                lambda inputs: np.array([[len(text), 0.5] for text in inputs], "f4"),
                "abc",
                [3.0, 0.5],
            ),
            (list[str], list[Array], lambda inputs: [np.arange(len(text)) for text in inputs], "abc", [0, 1, 2]),
            (list[dict[str, int]], np.ndarray, lambda inputs: np.array([one["n"] for one in inputs]), b'{"n":2}', 2),
            (list[bytes], np.ndarray, lambda inputs: np.array([one[0] for one in inputs]), Octets(b"\2"), 2),
        ],
    )
    def test_texts_json_and_octets_give_arrays(
        self, takes: Any, gives: Any, call: Callable[[Any], Any], value: Value, shown_as: Any
    ) -> None:
        call.__annotations__ = {"inputs": takes, "return": gives}
        loaded = target(call)
        assert loaded.signature.gives is ValueKind.TENSORS
        assert shown(ran(loaded, value)) == [shown_as]

    def test_each_row_has_the_parameters_of_its_request(self) -> None:
        def call(inputs: dict[str, Array], parameters: list[dict[str, Any]]) -> Array:
            return np.asarray(inputs["x"][:, 0] + [one.get("n", 0) for one in parameters])

        loaded = target(call, inputs=X)
        assert shown(ran(loaded, b"[[1,1],[2,2]]", b"[3,3]", parameters=[b'{"n":10}', b""])) == [[11.0, 12.0], 3.0]
        assert shown(ran(loaded, b"[[1,1],[2,2]]")) == [[1.0, 2.0]]


class TestSeveralCalls:
    def test_rows_of_other_shapes_run_by_themselves_and_no_call_has_more_rows_than_a_batch(self) -> None:
        shapes = []

        def call(x: Array) -> Array:
            shapes.append(x.shape)
            return np.asarray(x.sum(1))

        loaded = target(call, inputs={"x": ("FP32", [-1])})
        values = [b"[1]", b"[1,1]", b"[[1],[1]]", b"[1,1]", b"[[1],[1],[1],[1]]"]
        assert shown(ran(loaded, *values, most=3)) == [1.0, 2.0, [1.0, 1.0], 2.0, [1.0] * 4]
        assert shapes == [(3, 1), (4, 1), (2, 2)]

    def test_a_target_may_give_the_same_memory_in_each_call(self) -> None:
        room = np.zeros((1, 20_000), np.float32)

        def call(x: Array) -> Array:
            room[:] = x[:, :1]
            return room

        word = ran(target(call, example=ROW), b"[1,1]", b"[2,2]", most=1)
        assert [unpack(content(one))[0].data[:4] for one in word.outputs] == [np.float32(n).tobytes() for n in (1, 2)]

    def test_padded_rows_run_together_with_their_lengths(self) -> None:
        seen = {}

        def call(inputs: dict[str, Array]) -> Array:
            seen.update(inputs)
            return np.asarray(inputs["ids"].sum(1))

        loaded = target(
            call, inputs={"ids": ("INT64", [-1]), "grid": ("UINT8", [-1, -1, 2]), "q": ("FP32", [1])}, pad=9
        )
        one = arrays(ids=np.array([[1, 2], [3, 4]]), grid=np.ones((2, 1, 2, 2), "u1"), q=np.ones((2, 1), "f4"))
        two = arrays(ids=np.array([[5]]), grid=np.ones((1, 2, 1, 2), "u1"), q=np.ones((1, 1), "f4"))
        assert shown(ran(loaded, one, two)) == [[3, 7], [14]]
        assert seen["ids"].tolist() == [[1, 2], [3, 4], [5, 9]]
        assert seen["ids_lengths"].tolist() == [2, 2, 1]
        assert seen["grid_lengths"].tolist() == [[1, 2], [1, 2], [2, 1]]
        assert seen["grid"].shape == (3, 2, 2, 2) and seen["grid"][2, 0, 1].tolist() == [9, 9]
        assert set(seen) == {"ids", "ids_lengths", "grid", "grid_lengths", "q"}

    def test_texts_are_padded_with_none(self) -> None:
        def call(inputs: dict[str, Array]) -> Array:
            return np.array([b"|".join(row) for row in inputs["words"]])

        loaded = target(call, inputs={"words": ("BYTES", [-1])}, pad=0)
        assert shown(ran(loaded, b'["a","b"]', b'["c"]')) == ["a|b", "c|"]


class TestInputs:
    def test_no_array_can_be_written_to_and_the_failure_says_what_to_do(self) -> None:
        def call(x: Array) -> Array:
            x += 1
            return x

        for values in ([b"[1,2]"], [b"[1,2]", b"[3,4]"]):
            assert "change a copy, for example x = x.copy()" in failed(target(call, example=ROW), *values).message

    def test_an_entry_alone_is_not_copied_and_several_are_once(self) -> None:
        seen = []

        def call(x: Array) -> Array:
            seen.append(x)
            return x

        value = arrays(INPUT=np.ones((1, 2), "f4"))
        whole = np.frombuffer(value.content, np.uint8)
        loaded = target(call, example=ROW)
        word = ran(loaded, value)
        assert np.shares_memory(seen[0], whole)
        assert word.outputs == [arrays(OUTPUT=np.ones((1, 2), "f4")).content]
        ran(loaded, value, value)
        assert not np.shares_memory(seen[1], whole)

    def test_a_large_output_is_not_copied_before_it_is_placed(self) -> None:
        made = np.ones((2, 100_000), np.float32)
        word = ran(target(lambda inputs: made, inputs=X), b"[1,2]", b"[1,2]")
        for row, output in zip(made, word.outputs, strict=True):
            assert isinstance(output, Pieces)
            assert any(np.shares_memory(np.frombuffer(one, "u1"), row) for one in output.pieces if len(one) > 100)

    @pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"])  # fmt: skip
    def test_numbers_come_and_go_as_they_are(self, datatype: str) -> None:
        loaded = target(lambda inputs: inputs, inputs={"x": (datatype, [-1])})
        value = b"[true,false]" if datatype == "BOOL" else b"[0,100]"
        [output] = ran(loaded, value).outputs
        assert heads(output) == [TensorHead("x", datatype, (1, 2))]
        assert as_json(content(output)) in (value, b"[0.0,100.0]")

    @pytest.mark.parametrize("shape", [(1,), (3,), (2, 0), (1, 0, 3), (2, 3, 1)])
    def test_any_shape_comes_and_goes(self, shape: tuple[int, ...]) -> None:
        loaded = target(lambda inputs: inputs, inputs={"x": ("INT32", [-1] * (len(shape) - 1))})
        value = arrays(x=np.arange(np.prod(shape), dtype="i4").reshape(shape))
        assert ran(loaded, value).outputs == [value.content]

    def test_bf16_comes_as_fp32_and_goes_rounded_with_nan_as_nan(self) -> None:
        loaded = target(lambda inputs: inputs, inputs={"x": ("BF16", [-1])}, outputs={"x": ("BF16", [-1])})
        bits = np.array([[0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x8000, 0x0001]], "<u2")
        value = pack([Tensor(TensorHead("x", "BF16", bits.shape), bits.tobytes())])
        assert ran(loaded, value).outputs == [value.content]
        rounded = np.array([[1.00390625, 1.01171875, np.nan, -np.nan]])
        near = target(lambda inputs: rounded, inputs=X, outputs={"y": ("BF16", [4])})
        [tensor] = unpack(content(ran(near, b"[1,2]").outputs[0]))
        there = np.frombuffer(tensor.data, "<u2")
        assert there[:2].tolist() == [0x3F80, 0x3F82]
        assert np.isnan((there.astype("<u4") << 16).view("<f4")[2:]).all()

    @pytest.mark.parametrize(
        ("value", "part"),
        [
            ("a", "not FP32"), (b"[1]", "expected shape"), (b'{"y":[1,2]}', "there is no input `y`|is missing"), (Octets(b"a"), "octets"), (b"null", "axes"),
            (Tensors(b"a"), "header"), (Tensors(arrays(x=np.ones((1, 2), "f4")).content[:-20]), "too soon|left over|header"),
        ],
    )  # fmt: skip
    def test_what_is_no_such_array_fails_alone(self, value: Value, part: str) -> None:
        word = ran(target(lambda inputs: inputs["x"], inputs=X), value, b"[1,2]")
        assert shown(word) == [None, [1.0, 2.0]]
        assert not word.errors[0][1]

    @pytest.mark.parametrize(
        ("annotation", "refusal"),
        [
            (list[str], "this model takes text, but the input is of type tensors"),
            (list[bytes], "this model takes bytes, but the input is a set of tensors"),
            (list[Any], ""),
        ],
    )
    def test_texts_and_octets_refuse_arrays_and_json_gets_lists(self, annotation: Any, refusal: str) -> None:
        def call(inputs: Any) -> Any:
            return inputs

        call.__annotations__ = {"inputs": annotation, "return": annotation}
        word = ran(target(call), arrays(x=[[1, 2]]))
        assert word.errors == ({0: (refusal, False)} if refusal else {})
        assert word.outputs == ([None] if refusal else [b"[[1,2]]"])


class TestOutputs:
    @pytest.mark.parametrize(
        ("rows", "head", "value"),
        [
            (["a", "b"], ("BYTES", ()), "a"),
            ([b"a", "b"], ("BYTES", ()), "a"),
            ([{"label": "cat", "score": np.float32(0.5)}, "b"], ("JSON", ()), {"label": "cat", "score": 0.5}),
            ([1, 2], ("INT64", ()), 1),
            ([True, False], ("BOOL", ()), True),
            ([1, 2.5], ("FP64", ()), 1.0),
            ([[1.5, 2], [3, 4]], ("FP64", (2,)), [1.5, 2.0]),
            ([[1], [2, 3]], ("JSON", ()), [1]),
            ([None, 2], ("JSON", ()), None),
            ([[], []], ("FP64", (0,)), []),
            (np.array(["a", "bc"]), ("BYTES", ()), "a"),
            (np.array([b"a", b"bc"]), ("BYTES", ()), "a"),
            (np.array(["a", b"b"], object), ("BYTES", ()), "a"),
            (np.array([{"n": 1}, None], object), ("JSON", ()), {"n": 1}),
            (np.asfortranarray([[1, 2], [3, 4]]), ("INT64", (2,)), [1, 2]),
            (np.arange(8).reshape(2, 4)[:, ::2], ("INT64", (2,)), [0, 2]),
            (np.array([[1, 2], [3, 4]], ">i4"), ("INT32", (2,)), [1, 2]),
            (np.array([[np.nan], [1]]), ("FP64", (1,)), [None]),
            (np.zeros((2, 0)), ("FP64", (0,)), []),
            ([np.float32(1), np.float32(2)], ("FP32", ()), 1.0),
            ([np.ones(1, "f2"), np.ones(1, "f2")], ("FP16", (1,)), [1.0]),
        ],
    )
    def test_the_datatype_is_that_of_the_value(self, rows: Any, head: tuple[str, tuple[int, ...]], value: Any) -> None:
        word = ran(target(lambda inputs: rows, inputs=X), b"[1,2]", b"[1,2]")
        [found] = heads(word.outputs[0])
        assert (found.datatype, found.shape[1:]) == head
        assert shown(word)[0] == value

    @pytest.mark.parametrize(
        ("annotation", "result", "spec"),
        [
            (list[str], ["a"], ("BYTES", ())),
            (list[dict[str, Any]], [{"a": 1}], ("JSON", ())),
            (list[dict[str, Any] | Exception], [{"a": 1}], ("JSON", ())),
            (list[float], [1], ("FP64", ())),
            (list[int], [True], ("INT64", ())),
            (list[Output[list[float]]], [[1, 2]], ("FP64", (-1,))),
        ],
    )
    def test_annotations_say_datatypes(self, annotation: Any, result: Any, spec: tuple[str, tuple[int, ...]]) -> None:
        def call(x: Any) -> Any:
            return result

        call.__annotations__ = {"x": np.ndarray, "return": annotation}
        loaded = target(call, example=ROW)
        assert loaded.signature.outputs == (TensorSpec("OUTPUT", *spec),)
        assert heads(ran(loaded, b"[1,2]").outputs[0])[0].datatype == spec[0]

    @pytest.mark.parametrize(
        ("given", "declared", "value"),
        [
            (np.array([0.1]), "FP32", np.float32(0.1)), (np.array([1.5], "f4"), "FP64", 1.5), (np.array([200]), "UINT8", 200), (np.array([np.inf]), "FP16", None),
            ([1], "FP32", 1.0), ([True], "INT8", 1), (np.array([70000.0]), "BF16", 70144.0),
        ],
    )  # fmt: skip
    def test_an_output_is_made_one_of_its_datatype(self, given: Any, declared: str, value: Any) -> None:
        word = ran(target(lambda inputs: given, inputs=X, outputs={"y": (declared, [])}), b"[1,2]")
        assert heads(word.outputs[0]) == [TensorHead("y", declared, (1,))]
        assert shown(word) == [value if value is None else pytest.approx(value)]

    @pytest.mark.parametrize(
        ("given", "declared", "part"),
        [
            (np.array([1]), "FP32", r"an array of INT64, but declares FP32; convert it with .astype\(np.float32\)"),
            (np.array([1.0]), "INT64", "but declares INT64"),
            (np.array([True]), "UINT8", "but declares UINT8"),
            (np.array([300]), "UINT8", "out of range for UINT8"),
            (np.array([-1]), "UINT8", "out of range for UINT8"),
            (np.array([1e5]), "FP16", "out of range for FP16"),
            (np.array([3.4e38]), "BF16", "out of range for BF16"),
            (np.array(["a"]), "FP32", "an array of BYTES"),
            (np.array([[1.0]]), "FP64", r"shape \[1, 1\]; it declares \[-1\]"),
            ({"y": np.ones(1), "z": np.ones(1)}, "FP64", "`z`, which it does not declare"),
            ({"z": np.ones(1)}, "FP64", "`z`, which it does not declare"),
            (np.ones(2), "FP64", r"shape \[2\] for 1 rows"),
            (np.float64(1), "FP64", r"shape \[\] for 1 rows"),
            ([1.0, 2.0], "FP64", "2 outputs for 1 rows"),
            ({}, "FP64", "a dict of 0 arrays"),
            (None, "FP64", "NoneType, expected an array with 1 rows; end it by returning"),
            (iter(()), "FP64", "iterator, .* instead of yielding"),
            ("a", "FP64", "str, expected an array"),
            (np.array([1j]), "FP64", "dtype complex128"),
            (np.array(["2020-01-01"], "M8[D]"), "FP64", "dtype datetime64"),
        ],
    )  # fmt: skip
    def test_an_output_that_is_not_as_declared_fails_its_batch(self, given: Any, declared: str, part: str) -> None:
        word = failed(target(lambda inputs: given, inputs=X, outputs={"y": (declared, [])}), b"[1,2]")
        assert word.bad_output
        assert re.search(part, word.message), word.message

    def test_rows_of_several_shapes_fail_their_entry_alone(self) -> None:
        def call(inputs: list[Array]) -> list[Array]:
            return [np.arange(int(one[0])) for one in inputs]

        word = ran(target(call, example=ROW), b"[[1,0],[2,0]]", b"[3,0]")
        assert shown(word) == [None, [0, 1, 2]]
        assert word.errors == {
            0: ("the target returned arrays of shapes [1] and [2] for the rows of one request", True)
        }

    def test_an_exception_for_a_row_fails_its_entry_alone(self) -> None:
        def call(x: Array) -> list[Any]:
            return [ValueError("below 0") if row[0] < 0 else row for row in x]

        word = ran(target(call, example=ROW), b"[1,2]", b"[[1,1],[-1,2]]", b"[[1,1],[2,2]]")
        assert shown(word) == [[1.0, 2.0], None, [[1.0, 1.0], [2.0, 2.0]]]
        assert word.errors == {1: ("ValueError: below 0", False)}

    def test_tokens_of_the_rows_of_an_entry_add_up(self) -> None:
        def call(x: Array) -> list[Any]:
            return [Output(row, tokens=5, prompt_tokens=2) for row in x]

        word = ran(target(call, example=ROW), b"[1,2]", b"[[1,1],[1,2]]")
        assert word.tokens == {0: TokenCount(5, 2), 1: TokenCount(10, 4)}
        assert shown(word) == [[1.0, 2.0], [[1.0, 1.0], [1.0, 2.0]]]

    def test_outputs_are_bounded_each_and_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def call(x: Array) -> Array:
            return np.zeros((len(x), 25))

        loaded = target(call, example=ROW)
        monkeypatch.setattr(frames, "MAX_OUTPUT", 400)
        word = ran(loaded, b"[1,2]", b"[[1,2],[3,4]]")
        assert word.outputs[0] is not None and word.outputs[1] is None
        assert word.errors[1][1] and "the limit is 400" in word.errors[1][0]
        monkeypatch.setattr(frames, "MAX_OUTPUTS", 300)
        over = run_batch.bounded(ran(loaded, b"[1,2]", b"[1,2]"), 0)
        assert isinstance(over, Outputs) and list(over.crowded) == [1]


class Likeness:
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return np.asarray(self.rows)

    def tolist(self) -> Any:
        return self.rows


class Torch(Likeness):
    """Mimics a torch tensor: no array until it has left its GPU and graph."""

    def __init__(self, rows: Any, dtype: str = "torch.float32") -> None:
        super().__init__(rows)
        self.dtype, self.steps = dtype, [""]

    def detach(self) -> Torch:
        self.steps.append("detached")
        return self

    def cpu(self) -> Torch:
        self.steps.append("on the CPU")
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        assert self.steps[-1] == "on the CPU"
        return np.asarray(self.rows)

    def contiguous(self) -> Torch:
        return self

    def view(self, dtype: str) -> Torch:
        assert dtype == "int16"
        return self

    def numpy(self) -> Array:
        return np.asarray(self.rows, "i2")

    def to(self, dtype: str) -> Torch:
        self.dtype = dtype
        return self


Torch.__module__ = "torch"


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("torch")
    module.from_numpy, module.int16, module.bfloat16 = Torch, "int16", "torch.bfloat16"
    monkeypatch.setitem(sys.modules, "torch", module)


class TestOtherLibraries:
    def test_any_array_is_an_output(self) -> None:
        assert shown(ran(target(lambda inputs: Likeness([[1.5]]), inputs=X), b"[1,2]")) == [[1.5]]
        assert shown(ran(target(lambda inputs: [Likeness([1.5])], inputs=X), b"[1,2]")) == [[1.5]]

    @pytest.mark.usefixtures("torch")
    def test_a_tensor_of_torch_comes_off_its_gpu_and_bf16_keeps_its_bits(self) -> None:
        assert shown(ran(target(lambda inputs: Torch([[1.5]]), inputs=X), b"[1,2]")) == [[1.5]]
        [output] = ran(target(lambda inputs: Torch([[0x3F80]], "torch.bfloat16"), inputs=X), b"[1,2]").outputs
        assert heads(output) == [TensorHead("OUTPUT", "BF16", (1, 1))]
        assert shown(
            ran(
                target(lambda inputs: Torch([[0x3F80]], "torch.bfloat16"), inputs=X, outputs={"y": ("FP32", [1])}),
                b"[1,2]",
            )
        ) == [[1.0]]

    @pytest.mark.usefixtures("torch")
    def test_a_target_that_is_annotated_with_tensors_gets_them_to_write_to(self) -> None:
        seen = []

        def call(x: Torch) -> Torch:
            seen.append(x)
            return Torch(x.rows)

        call.__annotations__ = {"x": Torch, "return": Torch}
        value = arrays(x=np.ones((1, 2), "f4"))
        assert shown(ran(target(call, inputs=X), value)) == [[[1.0, 1.0]]]
        assert seen[0].rows.flags.writeable and not np.shares_memory(seen[0].rows, np.frombuffer(value.content, "u1"))
        ran(target(call, inputs={"x": ("BF16", [1])}), b"[1]")
        assert seen[1].dtype == "torch.bfloat16"


class TestAttributes:
    def test_an_example_says_datatype_and_shape_and_is_the_first_input(self) -> None:
        loaded = target(double, example=np.array([1, 2], "f4"), shapes=[None])
        assert loaded.signature.inputs == (TensorSpec("INPUT", "FP32", (-1,)),)
        assert isinstance(loaded.signature.example, Tensors)
        assert as_json(loaded.signature.example) == b"[1.0,2.0]"
        assert shown(ran(loaded, loaded.signature.example)) == [[2.0, 4.0]]
        del double.example, double.shapes  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("annotation", "example", "form"),
        [
            (None, ROW, ARRAY),
            (Any, ROW, ARRAY),
            (list, ROW, LIST),
            (None, {"a": ROW, "b": ROW}, NAMED),
            (dict, {"a": ROW}, NAMED),
            (None, [1.0, 2.0], ""),
            (None, {"a": [1.0]}, ""),
            (None, {}, ""),
            (None, np.float32(1), ""),
            (list[list[float]], ROW, ""),
        ],
    )
    def test_an_example_array_says_what_a_bare_target_takes(self, annotation: Any, example: Any, form: str) -> None:
        def call(inputs):  # type: ignore[no-untyped-def]
            return inputs

        if annotation is not None:
            call.__annotations__ = {"inputs": annotation}
        loaded = target(call, example=example)
        assert ("" if loaded.arrays is None else loaded.arrays.takes) == form
        assert loaded.signature.takes is (ValueKind.TENSORS if form else ValueKind.JSON)

    @pytest.mark.parametrize("of_texts", ["a text", {"a": 1}, ["x"], {"text": ("BYTES", [])}, None])
    def test_attributes_of_a_target_of_texts_are_its_own(self, of_texts: Any) -> None:
        def call(inputs: list[str]) -> list[str]:
            return inputs

        loaded = target(call, inputs=of_texts, outputs=of_texts, pad="left", shapes=2)
        assert loaded.signature.takes is loaded.signature.gives is ValueKind.TEXT
        assert loaded.arrays is None

    @pytest.mark.parametrize(
        ("annotation", "attributes", "part"),
        [
            (Array, {}, "Add an attribute example, such as example = np.zeros(4, np.float32), or inputs, such as"),
            (Array, {"inputs": {"x": "FP32"}}, "write a datatype and the shape of a row"),
            (Array, {"inputs": {"x": ("FLOAT", [1])}}, "has the datatype 'FLOAT'"),
            (Array, {"inputs": {"x": ("JSON", [1])}}, "has the datatype 'JSON'"),
            (Array, {"inputs": {"x": ("FP32", [-2])}}, "an axis is a size, or -1 for any"),
            (Array, {"inputs": {}}, "attribute inputs is empty"),
            (Array, {"inputs": X, "outputs": {"y": 1}}, "attribute outputs has 1 for 'y'"),
            (Array, {"inputs": {"a": ("FP32", []), "b": ("FP32", [])}}, "write inputs: dict[str, np.ndarray]"),
            (Array, {"example": {"a": ROW, "b": ROW}}, "write inputs: dict[str, np.ndarray]"),
            (list[Array], {"example": {"a": ROW, "b": ROW}}, "write inputs: dict[str, np.ndarray]"),
            (Array, {"example": np.array([1j])}, "attribute example is an array of dtype complex128"),
            (Array, {"example": {}}, "attribute example is empty"),
            (Array, {"example": object()}, "is object; set it to an array"),
            (Array, {"example": ROW, "shapes": [3]}, "for example shapes = [None]"),
            (Array, {"example": ROW, "shapes": 3}, "for example shapes = [None]"),
            (Array, {"example": ROW, "shapes": [None, None]}, "for example shapes = [None]"),
            (dict[str, Array], {"example": {"a": ROW}, "shapes": {"b": [2]}}, "names 'b'"),
            (dict[str, Array], {"inputs": X, "example": {"x": np.zeros(3, "f4")}}, "does not fit its attribute inputs"),
            (dict[str, Array], {"inputs": X, "example": {"x": np.zeros(2, "i4")}}, "INT32, but declares FP32"),
            (Array, {"example": ROW, "pad": 0}, "Write dict[str, np.ndarray]"),
            (dict[str, Array], {"inputs": X, "pad": 0}, "has none|have none"),
            (dict[str, Array], {"inputs": {"x": ("FP32", [-1])}, "pad": "0"}, "write a number, for example pad = 0"),
            (dict[str, Array], {"inputs": {"x": ("INT8", [-1])}, "pad": 1.5}, "which does not fit the INT8"),
            (dict[str, Array], {"inputs": {"x": ("UINT8", [-1])}, "pad": -1}, "which does not fit the UINT8"),
            (dict[str, Array], {"inputs": {"x": ("INT8", [-1])}, "pad": float("nan")}, "which does not fit the INT8"),
            (dict[str, Array], {"inputs": {"x": ("FP32", [-1]), "x_lengths": ("FP32", [])}, "pad": 0}, "rename it"),
        ],
    )  # fmt: skip
    def test_a_wrong_attribute_is_refused(self, annotation: Any, attributes: Mapping[str, Any], part: str) -> None:
        def call(inputs: Any) -> Any:
            return inputs

        call.__annotations__ = {"inputs": annotation, "return": annotation}
        with pytest.raises(Refusal) as caught:
            target(call, **attributes)
        assert any(one in str(caught.value) for one in part.split("|")), str(caught.value)
        assert str(caught.value).startswith("target t: ") and str(caught.value).endswith(".")

    @pytest.mark.parametrize("annotation", [Array | None, Array | list[Array | Exception], Output[Array] | None])
    def test_a_union_with_arrays_says_arrays(self, annotation: Any) -> None:
        def call(inputs: Any) -> Any:
            return inputs

        call.__annotations__ = {"inputs": Array | None, "return": annotation}
        assert kinds_of(target(call, example=ROW)) == (ValueKind.TENSORS, ValueKind.TENSORS)
        call.__annotations__["inputs"] = list[str]
        assert kinds_of(target(call, example="a")) == (ValueKind.TEXT, ValueKind.TENSORS)

    @pytest.mark.parametrize("name", ["np", "numpy"])
    def test_numpy_may_be_imported_for_a_type_checker_alone(self, name: str) -> None:
        space: dict[str, Any] = {}
        exec(f"def call(inputs: '{name}.ndarray') -> '{name}.ndarray': return inputs", space)
        assert kinds_of(target(space["call"], example=ROW)) == (ValueKind.TENSORS, ValueKind.TENSORS)

    def test_a_weight_function_is_refused(self) -> None:
        with pytest.raises(Refusal, match="weighed by its rows"):
            Weighing(target(lambda inputs: inputs["x"], inputs=X), "weight", 0, UserLoop())

    def test_a_missing_numpy_is_named_with_what_to_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "numpy", None)
        with pytest.raises(Refusal, match=r"numpy is not installed where Headway runs\. Run pip install numpy there\."):
            target(lambda inputs: inputs, inputs=X)
        assert ran(target(lambda inputs: inputs), "a").outputs == ["a"]

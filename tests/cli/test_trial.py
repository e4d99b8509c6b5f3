import asyncio
import itertools
from collections.abc import Callable, Sequence

import pytest

from headway.cli.trial import MOST_ANSWERS, Findings, Trial, batches_to_record, brief, choose_inputs, sizes, weights_of
from headway.core import tensor_json
from headway.core.tensors import rows_of
from headway.errors import BatchRaised, BatchTimeout, SettingError, TargetError, WorkerCrashed
from headway.model import CostShape, Entry, ItemResult, Octets, Signature, TensorSpec, Value, ValueKind
from tests import virtual_time

Function = Callable[[list[str]], list[ItemResult]]

LIMITS = {"queue_timeout_ms": 2000.0, "request_timeout_ms": 4000.0}


class Box:
    """A target that takes α + βn seconds of the loop's time."""

    pid = 1
    warm_up: Sequence[tuple[int, float]] = ()
    signature = Signature()

    def __init__(self, function: Function, alpha: float = 0.1, beta: float = 0.002) -> None:
        self.function = function
        self.alpha, self.beta = alpha, beta
        self.starts = 0
        self.parameters: set[bytes] = set()

    async def start(self) -> float:
        self.starts += 1
        return self.alpha

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        self.parameters |= {entry.parameters for entry in entries}
        seconds = self.alpha + self.beta * len(entries)
        await asyncio.sleep(min(seconds, timeout))
        if seconds > timeout:
            raise BatchTimeout(f"no answer within {timeout:g} s")
        return self.function([str(entry.input) for entry in entries])

    async def gone(self) -> None: ...

    async def stop(self) -> None: ...


def found(box: Box, inputs: Sequence[Value] | None = None, most: int = 20, timeout: float = 3.0) -> Findings:
    async def main(clock: Callable[[], float]) -> Findings:
        texts: Sequence[Value] = inputs or [f"text {n}" for n in range(most)]
        return await Trial(box, lambda _: texts, b'{"a":1}', timeout, "m", 3, clock, LIMITS).run()

    return virtual_time.run(main)


def test_the_first_inputs_stand_beside_their_answers_in_the_largest_batch() -> None:
    assert found(Box(upper), inputs=["a", "b"] * 8).answers == [("a", "A"), ("b", "B")]
    assert len(found(Box(upper)).answers) == MOST_ANSWERS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ("x" * 70, "x" * 60 + "…"),
        (b'{"a": [1, 2.0, 0.333333333333, null, true]}', '{"a": [1, 2, 0.333333, null, … 5 in all]}'),
        (Octets(b"octets"), '"b2N0ZXRz"'),
        (tensor_json.tensors_of(b"[0.5, 1]", [TensorSpec("x", "FP32", (2,))]), "[0.5, 1]"),
    ],
)
def test_a_value_is_shown_in_a_line(value: Value, text: str) -> None:
    assert brief(value) == text


class TestRecord:
    def recorded(self, box: Box, batches: Sequence[Sequence[str]] = ()) -> Findings:
        async def main(clock: Callable[[], float]) -> Findings:
            given = batches or [["a", "bcd"], ["bcd"] * 5]
            return await Trial(box, lambda _: ["a", "b"], b"", 3.0, "m", 1, clock, record=lambda _: given).run()

        return virtual_time.run(main)

    def test_batches_are_timed_with_the_weights_of_their_inputs(self) -> None:
        result = self.recorded(Box(upper, alpha=0.1, beta=0.002))
        assert [batch.weights for batch in result.recorded] == [[1, 3], [3] * 5]
        assert [batch.seconds for batch in result.recorded] == pytest.approx([0.104, 0.110])
        assert {run.size for run in result.runs} == {1, 2}

    def test_it_is_found_that_the_model_pads(self) -> None:
        class Padded(Box):
            async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
                await asyncio.sleep(0.001 * len(entries) * max(len(entry.input) for entry in entries))
                return await super().run(entries, timeout)

        batches = [["a", *["a" * (1 + number % 7 * 9)] * (1 + number % 5)] for number in range(40)]
        line = self.recorded(Padded(upper, 0.008, 0.0), batches).cost.line
        assert line.shape is CostShape.PADDED
        assert (line.alpha, line.beta) == pytest.approx((0.008, 0.001), rel=0.05)

    def test_nothing_is_recorded_of_a_target_that_breaks_a_rule(self) -> None:
        def function(inputs: list[str]) -> list[ItemResult]:
            if len(inputs) > 2:
                raise BatchRaised("ValueError: too many")
            return upper(inputs)

        result = self.recorded(Box(function))
        assert (result.recorded, len(result.faults)) == ([], 1)
        assert self.recorded(Box(lambda inputs: upper(inputs)[::-1])).recorded == []


def upper(inputs: list[str]) -> list[ItemResult]:
    return [ItemResult(text.upper()) for text in inputs]


def test_sizes_double_up_to_the_largest() -> None:
    assert (sizes(1), sizes(2)) == ([1], [1, 2])
    assert sizes(100) == [1, 2, 4, 8, 16, 32, 64, 100]


def test_a_good_target_passes_and_its_line_is_found() -> None:
    box = Box(upper)
    result = found(box)
    assert (result.faults, result.notes) == ([], [])
    assert result.model.alpha == pytest.approx(0.1, rel=0.01)
    assert result.model.beta == pytest.approx(0.002, rel=0.01)
    assert [run.size for run in result.runs] == [size for size in (1, 2, 4, 8, 16, 20) for _ in range(3)] + [20, 20]
    assert (box.starts, box.parameters) == (1, {b'{"a":1}'})
    alone = found(Box(upper), most=1)
    assert alone.faults == []
    assert alone.model.seconds(1) == pytest.approx(0.102), "a largest batch of one is tried, too"


@pytest.mark.parametrize("most", [2, 3, 20])
@pytest.mark.parametrize(
    "rearranged",
    [
        lambda items: items[::-1],
        lambda items: items[1:] + items[:1],
        lambda items: items[len(items) // 2 :] + items[: len(items) // 2],
        lambda items: items[1::-1] + items[2:],
        lambda items: items[:-2] + items[-2:][::-1],
        lambda items: sorted(items, key=lambda item: str(item.output), reverse=True),
    ],
)
def test_outputs_rearranged_in_a_fixed_way_are_a_fault(
    rearranged: Callable[[list[ItemResult]], list[ItemResult]], most: int
) -> None:
    [fault] = found(Box(lambda inputs: rearranged(upper(inputs))), most=most).faults
    assert "not in the order of their inputs" in fault


@pytest.mark.parametrize(
    ("signature", "notes"),
    [
        (Signature(), []),
        (Signature(sees=("a",), per_call=("a",)), []),
        (
            Signature(sees=("b",), per_call=("b",)),
            ["the target does not see the parameters a: its `together` does not name them"],
        ),
        (Signature(sees=()), ["the target does not see the parameters a: it takes no parameters"]),
    ],
)
def test_parameters_that_the_target_does_not_see_are_noted(signature: Signature, notes: list[str]) -> None:
    box = Box(upper)
    box.signature = signature
    assert found(box).notes == notes


def test_outputs_whose_order_cannot_be_judged_are_only_noted() -> None:
    count = itertools.count()

    def notes(function: Function) -> list[str]:
        result = found(Box(function))
        assert result.faults == []
        return result.notes

    [random] = notes(lambda inputs: [ItemResult(str(next(count))) for _ in inputs])
    assert "from run to run" in random
    assert "cannot be checked" in notes(lambda inputs: [ItemResult("yes") for _ in inputs])[0]
    of_the_batch = notes(lambda inputs: [ItemResult(f"{text} of {len(inputs)}, {inputs[0]} first") for text in inputs])
    assert any("depends on the others" in note for note in of_the_batch)
    assert any("alone" in note for note in of_the_batch)


def test_a_batch_that_raises_is_a_fault_with_its_size_and_the_rest_is_tried() -> None:
    def function(inputs: list[str]) -> list[ItemResult]:
        if len(inputs) > 8:
            raise BatchRaised("ValueError: too many")
        return upper(inputs)

    result = found(Box(function))
    assert result.faults == ["batches of 16 and 20 failed: ValueError: too many"]
    assert {run.size for run in result.runs} == {1, 2, 4, 8}


def test_a_batch_that_raises_in_every_size_is_one_fault_that_names_the_ways_to_other_inputs() -> None:
    def function(inputs: list[str]) -> list[ItemResult]:
        raise BatchRaised(f"ValueError: no number: {inputs[0]}")

    [fault] = found(Box(function), most=4).faults
    alone = "batches of 1, 2 and 4 failed: ValueError: no number: text 0, as the input 'text 0' does alone. "
    assert fault.startswith(alone)
    assert "--input" in fault and "attribute example" in fault


def test_a_crash_is_a_fault_and_the_worker_is_started_anew() -> None:
    def function(inputs: list[str]) -> list[ItemResult]:
        if len(inputs) == 4:
            raise WorkerCrashed("killed by SIGSEGV")
        return upper(inputs)

    box = Box(function)
    assert found(box).faults == ["a batch of 4 failed: killed by SIGSEGV"]
    assert box.starts == 2


def test_a_batch_beyond_the_deadline_is_a_fault() -> None:
    result = found(Box(upper, alpha=0.05, beta=0.01), timeout=0.2)
    [fault] = result.faults
    assert fault.startswith("a batch of 16 took longer than --gpu-timeout-ms 200, after which its worker is killed. ")
    assert fault.endswith("Make the model faster, lower --max-batch-size, or start with --gpu-timeout-ms 430")
    assert result.notes == ["larger batches than 16 were not tried"]


def test_a_model_slower_than_its_deadlines_is_told_all_that_fit() -> None:
    [fault] = found(Box(upper, alpha=10.0), timeout=3.0).faults
    fits = "--gpu-timeout-ms 20000 --queue-timeout-ms 20000 --request-timeout-ms 40000"
    assert fault.endswith(f"Make the model faster or start with {fits}")


def test_many_bad_outputs_for_one_reason_are_one_fault_and_so_are_rejected_inputs() -> None:
    def function(inputs: list[str]) -> list[ItemResult]:
        return [*upper(inputs[:1]), *(ItemResult(None, "it is an int", fault=True) for _ in inputs[1:])]

    assert found(Box(function), most=4).faults == ["input 2 of 2: it is an int"]
    assert found(Box(lambda inputs: function(["", *inputs])[1:]), most=4).faults == ["input 1 of 1: it is an int"]
    faults = found(Box(lambda inputs: [ItemResult(None, f"no number: {text}") for text in inputs])).faults
    assert len(faults) == 1


def test_an_input_the_target_rejects_is_told_with_a_mend() -> None:
    [fault] = found(Box(lambda inputs: [ItemResult(None, "no JSON") for _ in inputs]), inputs=["hello"]).faults
    assert all(part in fault for part in ("'hello'", "no JSON", "--input"))


def test_of_several_inputs_the_one_at_fault_is_named() -> None:
    def function(inputs: list[str]) -> list[ItemResult]:
        if "bad" in inputs:
            raise BatchRaised("KeyError: 'name'")
        return [ItemResult(text) for text in inputs]

    [fault] = found(Box(function), inputs=["good", "fine", "bad", "good"]).faults
    assert "failed: KeyError: 'name', as the input 'bad' does alone" in fault


def test_what_was_refused_is_no_example_of_what_is_taken() -> None:
    with pytest.raises(SettingError) as raised:
        choose_inputs(["[1, 2, 3]"], 4, TestRows.SIGNATURE)
    assert str(raised.value).count("[1, 2, 3]") == 1


def test_a_target_that_does_not_load_is_no_finding() -> None:
    class Broken(Box):
        async def start(self) -> float:
            raise TargetError("no module named nothing")

    with pytest.raises(TargetError):
        found(Broken(upper))


class TestRows:
    SIGNATURE = Signature(ValueKind.TENSORS, ValueKind.TENSORS, inputs=(TensorSpec("x", "FP32", (2,)),))

    def test_batches_are_counted_in_rows_and_have_no_more_than_they_may(self) -> None:
        inputs = choose_inputs(["[[1,2],[3,4]]", "[5,6]"], 7, self.SIGNATURE)
        assert [rows_of(one) for one in inputs] == [2, 1, 2, 1]
        result = found(Box(lambda texts: [ItemResult(text) for text in texts]), inputs)
        assert result.unit == "row"
        assert {run.size for run in result.runs} == {2, 3, 6}
        assert found(Box(upper), choose_inputs(["[5,6]"], 2, self.SIGNATURE)).unit == "input"

    def test_an_input_of_more_rows_than_a_batch_is_refused(self) -> None:
        with pytest.raises(SettingError, match="has 2 rows, but a batch has at most 1"):
            choose_inputs(["[[1,2],[3,4]]"], 1, self.SIGNATURE)

    def test_what_is_no_row_is_refused(self) -> None:
        for text in ("a", "[1]", '"a"', "{}"):
            with pytest.raises(SettingError, match="for a target that takes tensors"):
                choose_inputs([text], 1, self.SIGNATURE)
        with pytest.raises(SettingError, match="is needed: the target takes tensors and has no example"):
            choose_inputs([], 1, self.SIGNATURE)

    def test_each_row_has_a_weight_in_a_record(self) -> None:
        batches = list(batches_to_record(["[[1,2],[3,4]]", "[5,6]"], 6, 1, self.SIGNATURE))
        assert max(sum(map(rows_of, one)) for one in batches) == 6
        for batch in batches:
            assert len(weights_of(batch)) == sum(map(rows_of, batch)) <= 6
        assert weights_of(["abc", "d"]) == [3, 1]

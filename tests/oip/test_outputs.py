"""Outputs of a model that returns tensors: which are sent, in what order and form."""

import json
import struct

import pytest

from headway.core.tensors import Tensor, TensorHead, join_elements, pack
from headway.errors import BACKEND_ERROR, BadRequest, RequestError
from headway.model import Tensors
from headway.oip.model_tensors import OutputTensor, WantedOutput, answer_tensors, are_tensors, check_names


def output(*rows: float) -> Tensors:
    """Return the output of one input: rows of one number each, and their sum repeated for each row."""
    count, total = len(rows), [sum(rows)] * len(rows)
    return pack(
        [
            Tensor(TensorHead("x", "FP32", (count, 1)), struct.pack(f"<{count}f", *rows)),
            Tensor(TensorHead("sum", "FP64", (count,)), struct.pack(f"<{count}d", *total)),
        ]
    )


def shown(tensor: OutputTensor) -> object:
    return json.loads(b"".join(tensor.json_pieces()))


def test_outputs_of_several_inputs_are_joined_along_the_rows() -> None:
    x, total = answer_tensors([output(1, 2), output(3)], (), binary=True)
    assert (x.head, total.head) == (TensorHead("x", "FP32", (3, 1)), TensorHead("sum", "FP64", (3,)))
    assert (shown(x), shown(total)) == ([1, 2, 3], [3, 3, 3])
    assert (x.size, total.size, x.binary) == (12, 24, True)


def test_only_the_outputs_that_are_asked_for_are_told_in_their_order() -> None:
    wanted = [WantedOutput("sum", True), WantedOutput("x", False)]
    assert [(one.head.name, one.binary) for one in answer_tensors([output(1)], wanted, binary=False)] == wanted
    assert [one.head.name for one in answer_tensors([output(1)], wanted[:1], binary=False)] == ["sum"]
    with pytest.raises(BadRequest, match="no output `y`; the model returns `x`, `sum`"):
        answer_tensors([output(1)], [WantedOutput("y", True)], binary=False)


def test_names_are_checked_as_far_as_they_are_known() -> None:
    check_names(["x"], ())
    check_names(["x", "y"], ["y", "x", "z"])
    with pytest.raises(BadRequest, match="the output `x` is requested 2 times"):
        check_names(["x", "y", "x"], ())
    with pytest.raises(BadRequest, match="no output `a`"):
        check_names(["a"], ["b"])
    with pytest.raises(BadRequest) as caught:
        check_names(["a"], [f"name {number}" for number in range(1000)])
    assert len(str(caught.value)) < 300


def test_numbers_and_octets_that_json_has_not_are_to_be_asked_for_in_binary() -> None:
    [x, _] = answer_tensors([output(float("nan"))], (), binary=False)
    with pytest.raises(RequestError, match=r"NaN or an infinity.*request it in binary, with `binary_data`") as raised:
        list(x.json_pieces())
    assert raised.value.code == BACKEND_ERROR
    [x] = answer_tensors([pack([Tensor(TensorHead("x", "BYTES", (1,)), join_elements([b"\xff"]))])], (), binary=False)
    with pytest.raises(BadRequest, match="request it in binary, with `binary_data`"):
        list(x.json_pieces())


def test_json_values_are_texts_and_a_tensor_without_elements_is_an_empty_array() -> None:
    texts = [b'{"a":[1]}', b'"b"', b"]"]
    value = pack([Tensor(TensorHead("x", "JSON", (3,)), join_elements(texts))])
    [x] = answer_tensors([value], (), binary=False)
    assert x.head.datatype == "BYTES"
    assert shown(x) == [one.decode() for one in texts]
    for datatype in ("FP32", "BYTES"):
        value = pack([Tensor(TensorHead("x", datatype, (2, 0)), b"")])
        [x] = answer_tensors([value, value], (), binary=False)
        assert (x.head.shape, shown(x)) == ((4, 0), [])


def test_outputs_of_several_shapes_are_to_be_asked_for_one_by_one() -> None:
    other = pack([Tensor(TensorHead("x", "FP32", (1, 2)), bytes(8))])
    with pytest.raises(BadRequest, match=r"differ in shape or datatype: .*; send each input in its own request"):
        answer_tensors([output(1), other], (), binary=False)


def test_a_damaged_output_is_the_model_s_fault() -> None:
    assert not are_tensors([output(1), "text"])
    with pytest.raises(RequestError, match="the model's output is corrupt") as caught:
        answer_tensors([Tensors(output(1).content[:-20])], (), binary=False)
    assert caught.value.code == BACKEND_ERROR

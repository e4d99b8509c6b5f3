"""A request's inputs and parameters: tensor heads, the value they become, and data without a head."""

from typing import Any

import pytest

from headway.core import tensor_json
from headway.core.tensors import MOST_ELEMENTS, NoTensors, TensorHead, split_elements, unpack
from headway.errors import BadRequest, PayloadTooLarge
from headway.model import TensorSpec
from headway.oip.model_tensors import checked_heads, head_of_raw, value_of, value_of_raw
from headway.oip.parameters import NONE, Wishes, for_target, read_wishes
from headway.oip.tensors import pack

SPECS = (TensorSpec("x", "FP32", (4,)), TensorSpec("ids", "INT64", (-1,)))


def test_inputs_become_one_value() -> None:
    heads = checked_heads([TensorHead("ids", "INT64", (2, 3)), TensorHead("x", "FP32", (2, 4))], SPECS, 2)
    data: list[bytes | memoryview] = [bytes(range(48)), memoryview(bytes(range(32)))]
    assert [(one.head, bytes(one.data)) for one in unpack(value_of(heads, data))] == list(
        zip(heads, map(bytes, data), strict=True)
    )


def test_wrong_heads_and_more_rows_than_a_batch_has_are_told() -> None:
    with pytest.raises(
        PayloadTooLarge, match=r"the input `a` has 3 rows; at most 2 are allowed in one request \(max_batch_size\)"
    ):
        checked_heads([TensorHead("a", "FP32", (3, 4))], SPECS[:1], 2)
    with pytest.raises(BadRequest, match="the input `ids` is missing"):
        checked_heads([TensorHead("x", "FP32", (1, 4))], SPECS, 2)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "says"),
    [
        ("FP32", (1, 4), bytes(15), r"`x` has 15 bytes; FP32 of shape \[1, 4\] takes 16"),
        ("FP32", (1, 4), bytes(17), "`x` has 17 bytes"),
        ("BYTES", (1, 2), pack([b"a"]), "end after 1 elements; its shape says 2"),
        ("BYTES", (1, 2), pack([b"a"] * 3), "5 bytes of binary data remain"),
        ("BYTES", (1, 2), b"\xff\0\0\0a", "has the length 255, but only 1 bytes are left"),
    ],
)
def test_data_of_another_length_are_refused(datatype: str, shape: tuple[int, ...], data: bytes, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        value_of([TensorHead("x", datatype, shape)], [data])


@pytest.mark.parametrize(
    ("datatype", "row", "size", "shape"),
    [
        ("FP32", (4,), 16, (1, 4)),
        ("FP32", (4,), 48, (3, 4)),
        ("UINT8", (-1,), 7, (1, 7)),
        ("INT16", (2, -1, 3), 24, (1, 2, 2, 3)),
        ("INT64", (), 16, (2,)),
        ("BYTES", (), 5, (1,)),
        ("BYTES", (-1,), 5, (1, 1)),
    ],
)
def test_data_alone_say_their_rows(datatype: str, row: tuple[int, ...], size: int, shape: tuple[int, ...]) -> None:
    assert head_of_raw(size, [TensorSpec("x", datatype, row)]) == TensorHead("x", datatype, shape)


def test_data_alone_for_a_text_are_the_text_without_its_length() -> None:
    value = value_of_raw(b"hello", [TensorSpec("x", "BYTES", (1,))], 8)
    [tensor] = unpack(value)
    assert (tensor.head.shape, split_elements(tensor.data)) == ((1, 1), [b"hello"])


@pytest.mark.parametrize(
    ("specs", "size", "says"),
    [
        ((), 4, "are not known yet"),
        (SPECS, 16, "which works only for models with one input"),
        (SPECS[:1], 17, "the body consists only of data; its size, 17 bytes"),
        (SPECS[:1], 0, "the body consists only of data; its size, 0 bytes"),
        ([TensorSpec("x", "UINT8", (-1, -1))], 4, "does not determine the shape"),
        ([TensorSpec("x", "BYTES", (2,))], 4, "does not determine the shape"),
        ([TensorSpec("x", "UINT8", (0,))], 4, "does not determine the shape"),
    ],
)
def test_data_alone_that_say_no_shape_are_refused(specs: tuple[TensorSpec, ...], size: int, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        head_of_raw(size, specs)


def test_elements_of_bytes_are_bounded_before_any_is_read() -> None:
    specs = (TensorSpec("a", "BYTES", (-1,)), TensorSpec("b", "BYTES", (-1,)))
    most = (TensorHead("a", "BYTES", (1, MOST_ELEMENTS - 1)), TensorHead("b", "BYTES", (1, 1)))
    assert checked_heads(most, specs, 8) == most
    more = (most[0], TensorHead("b", "BYTES", (1, 2)))
    with pytest.raises(BadRequest, match="has 65537 elements of BYTES; at most 65536 are allowed"):
        checked_heads(more, specs, 8)
    text = b"[%b]" % b",".join([b'""'] * (MOST_ELEMENTS + 1))
    with pytest.raises(NoTensors, match="`a` has more than 65536 elements of BYTES; at most 65536 are allowed"):
        tensor_json.tensors_of(text, specs[:1])


@pytest.mark.parametrize(
    ("parameters", "wishes"),
    [
        ({}, NONE),
        ({"priority": 0, "timeout": 0, "binary_data_output": False, "other": 1}, NONE),
        ({"priority": 1}, NONE),
        ({"priority": 3}, Wishes(tier=2)),
        ({"timeout": 1_500}, Wishes(timeout=0.0015)),
        ({"binary_data_output": True}, Wishes(binary=True)),
        ({"triton_enable_empty_final_response": True}, Wishes(final=True)),
    ],
)
def test_what_a_client_wishes_is_read(parameters: dict[str, Any], wishes: Wishes) -> None:
    assert read_wishes(parameters, 3) == wishes


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"priority": 4}, "`priority` is out of range; expected an integer from 0 to 3, where 1 is the highest tier"),
        ({"priority": -1}, "`priority`"),
        ({"priority": True}, "`priority` is not an integer; expected"),
        ({"priority": "1"}, "`priority` is not an integer; expected an integer from 0 to 3"),
        (
            {"timeout": 1.5},
            "`timeout` is not an integer; expected an integer from 0 to 9223372036854775807, microseconds",
        ),
        ({"timeout": -1}, "`timeout`"),
        ({"timeout": 2**63}, "`timeout`"),
        ({"timeout": None}, "`timeout`"),
        ({"binary_data_output": 1}, "`binary_data_output` is not a boolean"),
        ({"triton_enable_empty_final_response": "yes"}, "`triton_enable_empty_final_response` is not a boolean"),
    ],
)
def test_a_wrong_parameter_is_named(parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_wishes(parameters, 3)
    assert says in str(caught.value)


def test_the_target_gets_what_the_protocol_does_not_know() -> None:
    known = {"priority": 1, "timeout": 2, "binary_data_output": True, "triton_enable_empty_final_response": True}
    given = {**known, "temperature": 0.5, "sequence_id": 7}
    assert for_target(given) == {"temperature": 0.5, "sequence_id": 7}

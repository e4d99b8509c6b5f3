"""Tensors of BYTES: shapes, names, and the binary form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.tensors import BYTES
from headway.errors import BadRequest, PayloadTooLarge
from headway.oip.tensors import OUTPUT, check_outputs, count_elements, pack, unpack, wrong_number


@pytest.mark.parametrize(("shape", "count"), [([1], 1), ([3], 3), ([3, 1], 3), ([1, 1], 1), ([8], 8)])
def test_a_shape_says_how_many_elements_there_are(shape: list[int], count: int) -> None:
    assert count_elements("INPUT", BYTES, shape, 8) == count


@pytest.mark.parametrize("shape", [[], [0], [-1], [2, 2], [1, 2], [1, 1, 1], [2, 0], [0, 1], list(range(1000))])
def test_any_other_shape_is_refused_and_shown(shape: list[int]) -> None:
    with pytest.raises(BadRequest, match=r"expected \[n\] or \[n, 1\]") as caught:
        count_elements("texts", BYTES, shape, 8)
    assert "`texts` has the shape [" in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("datatype", ["FP32", "bytes", "", "x" * 10_000])
def test_another_datatype_is_refused(datatype: str) -> None:
    with pytest.raises(BadRequest, match="expected BYTES") as caught:
        count_elements("INPUT", datatype, [1], 8)
    assert len(str(caught.value)) < 500


def test_too_many_elements_are_another_error_than_a_wrong_shape() -> None:
    with pytest.raises(PayloadTooLarge, match="9 elements; at most 8"):
        count_elements("INPUT", BYTES, [9, 1], 8)


def test_only_the_one_output_can_be_asked_for() -> None:
    check_outputs([])
    check_outputs([OUTPUT])
    with pytest.raises(BadRequest, match="no output `logits`; the only one is `OUTPUT`"):
        check_outputs(["logits"])
    with pytest.raises(BadRequest, match="2 times"):
        check_outputs([OUTPUT, OUTPUT])


def test_the_number_of_inputs_is_told() -> None:
    assert "has no input; expected one" in str(wrong_number(0))
    assert "more than one input; expected one" in str(wrong_number(2))


@given(st.lists(st.binary(max_size=20)))
def test_what_is_packed_is_unpacked_again(elements: list[bytes]) -> None:
    assert unpack("INPUT", pack(elements), len(elements)) == elements


@given(st.binary(max_size=60), st.integers(1, 20))
def test_any_octets_are_read_whole_or_refused(octets: bytes, count: int) -> None:
    try:
        elements = unpack("INPUT", octets, count)
    except BadRequest:
        return
    assert len(elements) == count
    assert pack(elements) == octets


def test_a_length_beyond_the_data_is_told_with_both_numbers() -> None:
    with pytest.raises(BadRequest, match=r"element 1 .* 4294967295 bytes, and 3 are left"):
        unpack("INPUT", pack([b"a"]) + b"\xff\xff\xff\xffabc", 2)

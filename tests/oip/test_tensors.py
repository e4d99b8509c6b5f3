"""BYTES tensors: shapes, names, the binary form, and elements as values of the kind the model takes and returns."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.tensors import BYTES
from headway.errors import BadRequest, PayloadTooLarge
from headway.model import ValueKind
from headway.oip.tensors import (
    OUTPUT,
    Element,
    check_outputs,
    count_elements,
    element_of,
    pack,
    unpack,
    values_of,
    wrong_number,
)  # fmt: skip


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
    with pytest.raises(BadRequest, match=r"element 1 .* 4294967295, but only 3 bytes are left"):
        unpack("INPUT", pack([b"a"]) + b"\xff\xff\xff\xffabc", 2)


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXTS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXTS, below, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("takes", [ValueKind.TEXT, None])
@given(texts=st.lists(TEXTS))
def test_texts_are_utf_8_in_the_binary_form_and_themselves_in_json(takes: ValueKind | None, texts: list[str]) -> None:
    octets = [text.encode() for text in texts]
    assert values_of(octets, takes) == values_of(texts, takes) == texts
    assert [element_of(text, takes) for text in texts] == octets


@given(st.lists(st.binary()))
def test_octets_are_themselves_whatever_they_hold(elements: list[bytes]) -> None:
    assert [element_of(value, ValueKind.BYTES) for value in values_of(elements, ValueKind.BYTES)] == elements


@given(TEXTS)
def test_a_text_out_of_json_is_utf_8_for_a_model_of_octets(text: str) -> None:
    [value] = values_of([text], ValueKind.BYTES)
    assert element_of(value, ValueKind.BYTES) == text.encode()


@given(JSON)
def test_a_json_value_is_its_json_text(tree: object) -> None:
    text = json.dumps(tree)
    [value], [same] = values_of([text], ValueKind.JSON), values_of([text.encode()], ValueKind.JSON)
    assert value == same
    assert json.loads(element_of(value, ValueKind.JSON)) == tree


def test_an_output_of_a_worker_that_gives_texts_yet_is_a_text_unless_it_is_no_unicode() -> None:
    assert element_of("not base64", ValueKind.BYTES) == b"not base64"
    assert element_of(b'{"a": 1}', ValueKind.TEXT) == b'{"a": 1}'
    for kind in (*ValueKind, None):
        with pytest.raises(UnicodeEncodeError):
            element_of("a\ud800", kind)


@pytest.mark.parametrize(
    ("element", "takes", "says"),
    [
        (b"a\xff", ValueKind.TEXT, "is not UTF-8: invalid start byte at byte 1"),
        (b"a\xff", None, "is not UTF-8"),
        ("a\0", ValueKind.TEXT, "contains U+0000"),
        (b"\0", ValueKind.TEXT, "contains U+0000"),
        (b"hello", ValueKind.JSON, "is not JSON text, but the model takes JSON"),
        ("", ValueKind.JSON, "is not JSON text"),
        (b'"\xff"', ValueKind.JSON, "is no"),
        (b'["\xff"]', ValueKind.JSON, "is no"),
        ('"\\u0000"', ValueKind.JSON, "contains U+0000"),
        ("[" * 200 + "]" * 200, ValueKind.JSON, "nested deeper"),
        ("[" * 100_000, ValueKind.JSON, "is not JSON text"),
    ],
)
def test_a_wrong_element_is_named_by_its_position(element: Element, takes: ValueKind | None, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        values_of(["1", element], takes)
    assert str(caught.value).startswith("element 1 of the input ")
    assert says in str(caught.value)

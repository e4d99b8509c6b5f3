"""Elements of a tensor, to values and back, by what the model takes and gives."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import BadRequest
from headway.model import ValueKind
from headway.oip.tensors import Element, element_of, values_of

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
        (b"hello", ValueKind.JSON, "is not a JSON text, which the model takes"),
        ("", ValueKind.JSON, "is not a JSON text"),
        (b'"\xff"', ValueKind.JSON, "is no"),
        (b'["\xff"]', ValueKind.JSON, "is no"),
        ('"\\u0000"', ValueKind.JSON, "holds U+0000"),
        ("[" * 200 + "]" * 200, ValueKind.JSON, "nested deeper"),
        ("[" * 100_000, ValueKind.JSON, "is not a JSON text"),
    ],
)
def test_a_wrong_element_is_named_by_its_position(element: Element, takes: ValueKind | None, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        values_of(["1", element], takes)
    assert str(caught.value).startswith("element 1 of the input ")
    assert says in str(caught.value)

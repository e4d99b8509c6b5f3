"""The text of an API key."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.identity.api_keys.credential import LIVE, NOISE, SERVICE, digest, generate, is_id, parse

BASE62 = string.digits + string.ascii_letters
noises = st.binary(min_size=NOISE, max_size=NOISE)


@given(noises)
@example(bytes(NOISE))
@example(b"\xff" * NOISE)
def test_what_is_made_is_understood(noise: bytes) -> None:
    text = generate(LIVE, noise)
    found = parse(text.encode())
    assert found is not None
    id, secret = found
    assert text.startswith(f"hw_live_{id}_{secret.decode()}")
    assert len(text) == len("hw_live_") + 12 + 1 + 22 + 6
    assert is_id(id)
    assert set(id + secret.decode()) <= set(BASE62)
    assert len(digest(secret)) == 32


@given(noises, noises)
def test_other_randomness_makes_another_key(first: bytes, second: bytes) -> None:
    same = int.from_bytes(first) % 62**34 == int.from_bytes(second) % 62**34
    assert (generate(LIVE, first) == generate(LIVE, second)) == same


@settings(max_examples=200)
@given(noises, st.data())
def test_one_changed_character_is_noticed(noise: bytes, data: st.DataObject) -> None:
    text = generate(LIVE, noise).encode()
    position = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != text[position]))
    assert parse(text[:position] + bytes([other]) + text[position + 1 :]) is None


@given(noises, st.data())
def test_two_characters_in_the_other_order_are_noticed(noise: bytes, data: st.DataObject) -> None:
    text = bytearray(generate(LIVE, noise).encode())
    position = data.draw(st.integers(0, len(text) - 2))
    changed = text[position] != text[position + 1]
    text[position], text[position + 1] = text[position + 1], text[position]
    assert (parse(bytes(text)) is None) == changed


@given(noises, st.integers(0, 48))
def test_a_part_of_a_key_is_none(noise: bytes, length: int) -> None:
    text = generate(LIVE, noise).encode()
    assert parse(text[:length]) is None
    assert parse(text[length + 1 :]) is None
    assert parse(text + text[: length + 1]) is None


@settings(max_examples=200)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(LIVE.__add__)))
@example(b"")
@example(LIVE + b"\xd9\xa1" * 20)
@example(LIVE + b"0" * 12 + b"_" + b"0" * 28)
@example(LIVE + b"0" * 12 + b"_" + b"0" * 28 + b"\n")
@example(b"hw_live_" * 100_000)
def test_other_bytes_are_no_key_and_raise_nothing(text: bytes) -> None:
    assert parse(text) is None


def test_a_service_token_is_no_key() -> None:
    token = generate(SERVICE, bytes(range(NOISE)))
    assert token.startswith("hw_svc_")
    assert parse(token.encode()) is None


def test_too_little_randomness_is_refused() -> None:
    with pytest.raises(ValueError, match="32 random bytes, not 31"):
        generate(LIVE, bytes(NOISE - 1))


@pytest.mark.parametrize("text", ["", "short", "hw_live_0123", "0123456789a-", "0123456789ab\n", "٠١٢٣٤٥٦٧٨٩٠١"])
def test_a_text_of_another_form_is_no_id_of_a_key(text: str) -> None:
    assert not is_id(text)

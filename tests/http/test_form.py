"""Forms, in whatever pieces they come: their parts, and how little is read of those that are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import BadRequest
from headway.http.form import parts
from tests.fuzz.dearest_forms import Dear, forms, steps_of

KIND = {"content-type": 'multipart/form-data; charset=utf-8; boundary="b"'}


def body(*contents: bytes) -> bytes:
    head = b'--b\r\nX-More: a\r\nContent-Disposition: form-data; name="n"; filename="a \\"b\\"\xc3\xa9"\r\n\r\n'
    return b"".join(head + one + b"\r\n" for one in contents) + b"--b--\r\n"


def read(pieces: list[bytes]) -> tuple[list[tuple[str, str | None, bytes]], int]:
    """Parts of a form that comes in pieces, and how many of these were read."""
    taken = 0

    async def come() -> AsyncIterator[bytes]:
        nonlocal taken
        for piece in pieces:
            taken += 1
            yield piece

    async def run() -> list[tuple[str, str | None, bytes]]:
        return [
            (one.name, one.filename, b"".join([piece async for piece in one.content]))
            async for one in parts(KIND, come())
        ]

    return asyncio.run(run()), taken


@given(
    st.lists(st.lists(st.sampled_from((b"\r", b"\n", b"--", b"-", b"x")), max_size=9).map(b"".join), max_size=3),
    st.integers(1, 40),
)
def test_a_form_has_the_same_parts_in_whatever_pieces_it_comes(contents: list[bytes], size: int) -> None:
    whole = body(*contents)
    found, _ = read([whole[at : at + size] for at in range(0, len(whole), size)])
    assert found == [("n", 'a "b"é', one) for one in contents]


@pytest.mark.parametrize("start", [b"", b"--b\r\n", body(b"x")[:20]], ids=["preamble", "header", "field"])
@pytest.mark.parametrize("piece", [b"\n" * 65_536, b"a: b\r\n" * 10_000], ids=["empty-lines", "lines"])
def test_no_more_than_a_few_kilobytes_are_read_around_the_parts(start: bytes, piece: bytes) -> None:
    taken = 0

    async def come() -> AsyncIterator[bytes]:
        nonlocal taken
        yield start or piece
        for _ in range(20):
            taken += 1
            yield piece

    async def run() -> None:
        async for one in parts(KIND, come()):
            await one.text(1000)

    with pytest.raises(BadRequest):
        asyncio.run(run())
    assert taken <= 2


def test_a_file_name_may_be_percent_encoded() -> None:
    head = b"--b\r\ncontent-disposition: form-data; name=file; filename=x; filename*=UTF-8''a%C3%A9.jsonl\r\n\r\n"
    assert read([head + b"1\r\n--b--"])[0] == [("file", "aé.jsonl", b"1")]


MANY = [form for form in forms() if b'; name="a"' in form.body]
"""Forms of many parts, none of which is refused."""


@pytest.mark.parametrize("form", MANY, ids=lambda form: form.name)
def test_a_form_gives_way_to_others_after_each_part(form: Dear) -> None:
    """Many parts with dear headers that came at once took 100 ms."""
    assert sum(1 for _ in steps_of(form)) > form.body.count(b"--b\r\n") > 30

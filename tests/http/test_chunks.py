"""Chunked bodies and forms, split at arbitrary places: content, end, parts, and the cost of the framing."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest

from headway.errors import BadRequest, RequestError
from headway.http.openai.bulk import parts
from headway.http.server.reader import FREE_PIECES, PIECE_BYTES, Chunks
from tests.fuzz.dearest_forms import Dear, forms, steps_of

REST = b"POST /next HTTP/1.1\r\nHost: a\r\n\r\n"


def wrapped(pieces: list[bytes], trailer: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n" + trailer + b"\r\n"


def test_unwraps_and_stops_at_the_end() -> None:
    for trailer in (b"", b"X-T: 1\r\n", b"A: b\r\nC: d\r\n"):
        chunks = Chunks(100, 100)
        assert chunks.feed(wrapped([b"ab", b"\r\n\r\n", b"c"], trailer) + REST) == (b"ab\r\n\r\nc", REST)
        assert chunks.done
    for end in (b"000\r\n\r\n", b"0;a=b\r\n\r\n"):
        chunks = Chunks(100, 100)
        assert (chunks.feed(end + REST), chunks.done) == ((b"", REST), True)


@pytest.mark.parametrize(
    "raw",
    [b"zz\r\n", b"-1\r\n", b"0x3\r\nabc\r\n", b"fffffffffffffffff\r\n", b"3\nabc\n0\n\n", b"3\r\nabcd\r\n", b" 3\r\nabc\r\n",
     b"3 \r\nabc\r\n", b"3\r\nabc\n", b"3;\0\r\n", b"0\r\nA: b\nC: d\r\n\r\n", b"0\r\n A: b\r\n\r\n", b"0\r\nA : b\r\n\r\n",
     b"\r\n3\r\nabc\r\n"],
)  # fmt: skip
def test_chunks_with_bad_framing_are_refused(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        Chunks(100, 100).feed(raw)
    assert caught.value.code == "BAD_REQUEST"
    assert caught.value.message.startswith("the chunked body is malformed: ")


@pytest.mark.parametrize(
    "flood", [b"1;" + b"x" * 300, b"0\r\n" + b"A: b\r\n" * 60, b"1;a\r\nx\r\n" * 10 + b"1" + b";a" * 150]
)
def test_refuses_more_wrapping_than_content(flood: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        Chunks(1000, 100).feed(flood)
    assert caught.value.code == "HEADERS_TOO_LARGE"


@pytest.mark.parametrize("size", [b"ffffffffffffffff", b"3d", b"3D;a=b", b"000000000000003d"])
@pytest.mark.parametrize("before", [b"", b"28\r\n" + b"x" * 40 + b"\r\n"])
def test_refuses_a_chunk_by_its_size_before_it_comes(size: bytes, before: bytes) -> None:
    chunks = Chunks(100 if before else 60, 1000)
    with pytest.raises(RequestError, match=r"larger than \d+ bytes") as refused:
        chunks.feed(before + size + b"\r\nab")
    assert refused.value.code == "PAYLOAD_TOO_LARGE"


def test_content_that_looks_like_the_size_of_a_chunk_is_none_and_chunks_may_have_one_byte() -> None:
    chunks = Chunks(100, 1000)
    assert chunks.feed(b"20\r\n\r\nffffffff\r\nff\r\n") == (b"\r\nffffffff\r\nff\r\n", b"")
    assert chunks.feed(b"x" * 16 + b"\r\n0\r\n\r\n") == (b"x" * 16, b"")
    assert chunks.done
    chunks = Chunks(1000, 100)
    content, rest = chunks.feed(wrapped([b"x"] * 1000))
    assert (content, rest, chunks.done) == (b"x" * 1000, b"", True)


def test_wrapping_is_counted_from_the_first_byte_to_the_last() -> None:
    """No single piece exceeds the limit, and neither does any stretch between two empty lines."""
    chunks = Chunks(1000, 50)
    assert chunks.feed(b"1;" + b"x" * 30 + b"\r\n.\r\n") == (b".", b"")
    with pytest.raises(RequestError) as caught:
        for _ in range(9):
            chunks.feed(b"1;" + b"x" * 30 + b"\r\n.\r\n")
    assert caught.value.code == "HEADERS_TOO_LARGE"
    assert caught.value.message == "the body's chunk extensions and trailers are too large"


def test_bytes_are_counted_once_however_they_are_cut() -> None:
    chunks = Chunks(1000, 50)
    for _ in range(40):
        chunks.feed(b"4\r\n")
        assert chunks.feed(b"\r\n\r\n") == (b"\r\n\r\n", b"")
        chunks.feed(b"\r\n")
    assert not chunks.done


@pytest.mark.parametrize(
    ("piece", "most"),
    [(b"1\r\na\r\n", 3_000), (b"2\r\n\r\n\r\n", 400), (b"3f\r\n" + b"a" * 63 + b"\r\n", 200_000), (b"100\r\n" + b"\r\n" * 128 + b"\r\n", 10)],
    ids=["of one byte", "of an empty line", "of 63 bytes", "with many empty lines"],
)  # fmt: skip
def test_refuses_a_body_that_costs_more_than_its_content_pays(piece: bytes, most: int) -> None:
    """Each piece takes time regardless of its size, so a body of tiny ones would delay all other requests."""
    chunks = Chunks(1 << 30, 65_536)
    with pytest.raises(RequestError) as caught:
        for _ in range(0, most, 10):
            chunks.feed(piece * 10)
    assert caught.value.code == "BAD_REQUEST"
    assert "in too many pieces" in caught.value.message


def test_stops_soon_when_much_comes_at_once() -> None:
    chunks = Chunks(1 << 30, 1 << 30)
    with pytest.raises(RequestError) as caught:
        chunks.feed(b"1\r\na\r\n" * 1_000_000)
    size = int(re.findall(r"[0-9]+", caught.value.message)[0])
    assert size < 2 * FREE_PIECES  # Out of a million.


@pytest.mark.parametrize(("size", "count"), [(1, FREE_PIECES), (PIECE_BYTES, 20_000), (1_448, 10_000), (100_000, 1)])
def test_takes_what_honest_clients_send(size: int, count: int) -> None:
    raw = wrapped([b"x" * size] * count)
    packet = PIECE_BYTES if count == 1 else len(raw)  # Large chunks may arrive in packets of any size.
    chunks = Chunks(1 << 30, 65_536)
    read = sum(len(chunks.feed(raw[start : start + packet])[0]) for start in range(0, len(raw), packet))
    assert (read, chunks.done) == (size * count, True)


KIND = {"content-type": 'multipart/form-data; charset=utf-8; boundary="b"'}


def body(*contents: bytes) -> bytes:
    head = b'--b\r\nX-More: a\r\nContent-Disposition: form-data; name="n"; filename="a \\"b\\"\xc3\xa9"\r\n\r\n'
    return b"".join(head + one + b"\r\n" for one in contents) + b"--b--\r\n"


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


def test_names_of_parts_may_be_quoted_or_percent_encoded() -> None:
    head = b"--b\r\ncontent-disposition: form-data; name=file; filename=x; filename*=UTF-8''a%C3%A9.jsonl\r\n\r\n1\r\n"
    whole = head + body(b"2", b"\r\n--")

    async def come() -> AsyncIterator[bytes]:
        for at in range(0, len(whole), 7):
            yield whole[at : at + 7]

    async def read() -> list[tuple[str, str | None, bytes]]:
        return [
            (part.name, part.filename, b"".join([piece async for piece in part.content]))
            async for part in parts(KIND, come())
        ]

    named = "n", 'a "b"é'
    assert asyncio.run(read()) == [("file", "aé.jsonl", b"1"), (*named, b"2"), (*named, b"\r\n--")]


MANY = [form for form in forms() if b'; name="a"' in form.body]
"""Forms with many parts that are all accepted."""


@pytest.mark.parametrize("form", MANY, ids=lambda form: form.name)
def test_a_form_gives_way_to_others_after_each_part(form: Dear) -> None:
    """Many parts with expensive headers once took 100 ms in one go."""
    assert sum(1 for _ in steps_of(form)) > form.body.count(b"--b\r\n") > 30

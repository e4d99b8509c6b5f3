"""The request reader without an event loop: bytes in, heads and body pieces out, however the bytes are split."""

import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.http.server.reader import CHUNKED, MOST_BUFFERED, HttpReader
from tests.http.stand import LAST, Answer, Stand, chunked, get, post, served

MOST = 1_000
COUNTED = b"POST /counted HTTP/1.1\r\nHost: a\r\nContent-Length: 11\r\n\r\nhello world"
CHUNKS = chunked(b"hello", b" world", path="/chunks", end=LAST)
BARE = b"GET /bare HTTP/1.1\r\nHost: a\r\n\r\n"
REQUESTS = (COUNTED, b"\r\n" + BARE, CHUNKS, COUNTED, CHUNKS, BARE)
READ = [(path, b"" if path == b"/bare" else b"hello world") for path in re.findall(rb" (/[a-z]+) ", b"".join(REQUESTS))]


def read(pieces: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    reader, found = HttpReader(MOST), list[tuple[bytes, bytes]]()
    for piece in pieces:
        assert reader.receive(piece, answering=False)
        while True:
            if reader.open:
                target, body = found.pop()
                found.append((target, body + reader.read_body()))
            elif (head := reader.read_head()) is not None:
                found.append((head[0].target, b""))
                reader.expect(head[0].length, 100)
            else:
                break
            if reader.open and not reader.buffer:
                break
    assert (reader.open, reader.waiting) == (False, 0)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_requests_are_read_alike_however_they_are_cut(seed: int) -> None:
    whole, drawn = b"".join(REQUESTS), random.Random(seed)
    cuts = sorted(drawn.sample(range(1, len(whole)), drawn.randrange(len(whole) - 1) if seed else len(whole) - 1))
    assert read([whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]) == READ


def test_what_comes_while_a_request_is_answered_is_kept_in_order() -> None:
    reader, sent = HttpReader(MOST), bytes(MOST_BUFFERED) + b"a"
    assert reader.receive(sent, answering=True), "it fits in the buffer, which is only then full"
    assert not reader.receive(b"b", answering=True)
    assert not reader.receive(b"c", answering=False), "it may not pass what came before"
    assert (reader.waiting, reader.buffer) == (len(sent) + 2, sent)
    reader.buffer = b""
    assert reader.refill()
    assert (reader.buffer, reader.refill(), reader.waiting) == (b"bc", False, 2)


def test_nothing_of_a_body_is_left_after_it_is_dropped() -> None:
    reader = HttpReader(MOST)
    reader.expect(CHUNKED, 10)
    reader.receive(b"5\r\nhel", answering=False)
    reader.close()
    assert (reader.open, reader.waiting) == (False, 0)
    reader.receive(BARE, answering=False)
    assert reader.read_head() is not None


TEXT = st.text(st.sampled_from("aé😀 "), max_size=12)
Case = tuple[bytes, tuple[int, object], bool]
"""A request, the status and content of its answer, and whether the answer has no body."""


def hot(text: str, path: str = "/v1/inference", *fields: str) -> Case:
    return post(f'{{"input": "{text}"}}', path, *fields), (200, text.upper()), False


def padded(text: str) -> Case:
    return hot(text, "/v1/inference", "X-Pad: " + "p" * len(text))


def in_chunks(text: str) -> Case:
    body = f'{{"input": "{text}"}}'.encode()
    cut = len(text) % 7 + 1
    return chunked(body[:cut], body[cut:], end=b"0\r\nX-Trailer: t\r\n\r\n"), (200, text.upper()), False


def cold_with_body(text: str) -> Case:
    return post(text, "/livez"), (405, "METHOD_NOT_ALLOWED"), False


KINDS: list[Callable[[str], Case]] = [
    hot,
    padded,
    in_chunks,
    cold_with_body,
    lambda text: hot(text, "/api/inference"),
    lambda text: (post(f'{{"inpud": "{text}"}}'), (400, "BAD_REQUEST"), False),
    lambda text: (get("/livez"), (200, "ok"), False),
    *(
        lambda text, path=path, status=status: (get(path, method="HEAD"), (status, None), True)
        for path, status in (("/livez", 200), ("/docs", 200), ("/v1/inference", 405), ("/nowhere", 404))
    ),
]
REQUEST = st.builds(lambda kind, text: kind(text), st.sampled_from(KINDS), TEXT)


def told(answer: Answer) -> tuple[int, object]:
    if not answer.body:
        return answer.status, None
    document = answer.json
    return answer.status, document.get("output", document.get("error", document.get("status")))


@given(st.lists(REQUEST, min_size=1, max_size=6), st.lists(st.integers(0, 900), max_size=10), st.booleans())
def test_splits_and_pipelining_do_not_matter(requests: list[Case], cuts: list[int], last_closes: bool) -> None:
    stream = b"".join(raw for raw, _, _ in requests)
    if last_closes:
        stream += get("/livez", "Connection: close")
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(stream)}), len(stream)]

    async def main(stand: Stand) -> None:
        client = await stand.connect()
        await client.send(*(stream[start:end] for start, end in pairwise(edges)))
        for _, expected, bodiless in requests:
            assert told(await client.answer(bodiless=bodiless)) == expected
        if last_closes:
            assert (await client.answer()).header["connection"] == "close"
            assert await client.ended()

    served(main)


@given(st.binary(max_size=200), st.integers(0, 300), st.sampled_from([hot, in_chunks, cold_with_body, padded]))
def test_noise_in_the_stream_ends_in_an_error_or_an_answer_and_nothing_else(
    noise: bytes, at: int, kind: Callable[[str], Case]
) -> None:
    stream = kind("abcdef")[0] * 2
    stream = stream[:at] + noise + stream[at:]

    async def main(stand: Stand) -> None:
        client = await stand.connect()
        await client.send(stream)
        client.writer.write_eof()
        received = await client.reader.read()
        while received:
            head, separator, rest = received.partition(b"\r\n\r\n")
            assert separator
            assert head.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4")), head
            length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert len(rest) >= length
            received = rest[length:]

    served(main)

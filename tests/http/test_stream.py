"""However a stream of requests is cut into packets, the answers are the same, in the same order."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.http.stand import Answer, Stand, get, post, served

TEXT = st.text(st.sampled_from("aé😀 "), max_size=12)


def hot(text: str) -> tuple[bytes, tuple[int, object], bool]:
    return post(f'{{"input": "{text}"}}'), (200, text.upper()), False


def padded(text: str) -> tuple[bytes, tuple[int, object], bool]:
    return post(f'{{"input": "{text}"}}', "/v1/inference", "X-Pad: " + "p" * len(text)), (200, text.upper()), False


def plain(text: str) -> tuple[bytes, tuple[int, object], bool]:
    return post(f'{{"input": "{text}"}}', "/api/inference"), (200, text.upper()), False


def chunked(text: str) -> tuple[bytes, tuple[int, object], bool]:
    body = f'{{"input": "{text}"}}'.encode()
    cut = len(text) % 7 + 1
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:cut], body[cut:]))
    head = b"POST /v1/inference HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\nX-Trailer: t\r\n\r\n", (200, text.upper()), False


def bad(text: str) -> tuple[bytes, tuple[int, object], bool]:
    return post(f'{{"inpud": "{text}"}}'), (400, "BAD_REQUEST"), False


def cold(text: str) -> tuple[bytes, tuple[int, object], bool]:
    return get("/livez"), (200, "ok"), False


def cold_with_body(text: str) -> tuple[bytes, tuple[int, object], bool]:
    return post(text, "/livez"), (405, "METHOD_NOT_ALLOWED"), False


def cold_head(text: str) -> tuple[bytes, tuple[int, object], bool]:
    return get("/nowhere", method="HEAD"), (404, None), True


REQUEST = st.builds(
    lambda kind, text: kind(text),
    st.sampled_from([hot, hot, padded, plain, chunked, bad, cold, cold_with_body, cold_head]),
    TEXT,
)


def told(answer: Answer) -> tuple[int, object]:
    if not answer.body:
        return answer.status, None
    document = answer.json
    return answer.status, document.get("output", document.get("error", document.get("status")))


@given(st.lists(REQUEST, min_size=1, max_size=6), st.lists(st.integers(0, 900), max_size=10), st.booleans())
def test_splits_and_pipelining_do_not_matter(
    requests: list[tuple[bytes, tuple[int, object], bool]], cuts: list[int], last_closes: bool
) -> None:
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


@given(st.binary(max_size=200), st.integers(0, 300), st.integers(0, 3))
def test_noise_in_the_stream_ends_in_an_error_or_an_answer_and_nothing_else(noise: bytes, at: int, kind: int) -> None:
    stream = [hot("abc"), chunked("abcdef"), cold_with_body("abc"), padded("abc")][kind][0] * 2
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

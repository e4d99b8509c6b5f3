"""How `headway bulk submit` reads a file: as requests, as plain text, or not at all."""

import io
import json

import pytest

from headway.cli.bulk import CHAT, COMPLETIONS, EMBEDDINGS, PIECE, BulkError, read_lines

REQUEST = b'{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}\n'
NO_ID = b'{"method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'


def sent(content: bytes, endpoint: str | None = None, texts: bool = False) -> tuple[str, bytes]:
    route, pieces = read_lines(io.BytesIO(content), "FILE", None, endpoint, texts)
    return route, b"".join(pieces)


@pytest.mark.parametrize("first", [b"{broken\n", NO_ID, b"a text\n", b"\n", b""])
def test_requests_behind_a_faulty_first_line_go_as_they_are(first: bytes) -> None:
    assert sent(first + REQUEST) == (EMBEDDINGS if first != NO_ID else COMPLETIONS, first + REQUEST)


def test_the_route_that_is_named_goes_before_that_of_the_first_request() -> None:
    assert sent(REQUEST, CHAT) == (CHAT, REQUEST)


@pytest.mark.parametrize("texts", [False, True])
def test_a_mark_before_the_first_line_is_no_part_of_it(texts: bool) -> None:
    _, body = sent(b"\xef\xbb\xbf" + REQUEST, texts=texts)
    if not texts:
        assert body == REQUEST
    else:
        assert json.loads(body)["body"]["prompt"] == REQUEST.decode().strip()
    assert json.loads(sent("\ufeffhello\n".encode())[1])["body"] == {"prompt": "hello"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: write one input"),
        (b" \n\n", "is empty: write one input"),
        ("hello\n".encode("utf-16"), "UTF-16"),
        ("\nhello\n".encode("utf-16-le"), "line 2.*UTF-16"),
        (b"\n{broken\nmore\n", "line 2, begins like JSON.*--texts"),
        (b'{"text": "a"}\n', "line 1, begins like JSON.*--texts"),
    ],
)
def test_a_file_that_is_neither_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(BulkError, match=words):
        sent(content)


def test_a_file_is_sent_piece_by_piece_also_where_it_has_nothing_but_blank_lines() -> None:
    _, pieces = read_lines(io.BytesIO(b"hello\n" + b"\n" * 4 * PIECE), "FILE", None, None, False)
    assert max(map(len, pieces)) < 2 * PIECE


def test_texts_that_look_like_json_are_texts_when_told_so() -> None:
    route, body = sent(b"{broken\n" + NO_ID, texts=True)
    assert route == COMPLETIONS
    assert [json.loads(one)["body"]["prompt"] for one in body.splitlines()] == ["{broken", NO_ID.decode().strip()]


def test_a_text_has_the_number_of_its_line_in_the_file() -> None:
    _, body = sent(b"a\n\n \nb\n")
    assert [(at, json.loads(one)["custom_id"]) for at, one in enumerate(body.split(b"\n"), 1) if one] == [
        (1, "1"),
        (4, "4"),
    ]

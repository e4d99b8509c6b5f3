"""Heads: what is accepted, and every form that two servers could parse differently."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import RequestError
from headway.http.server.head import OtherProtocol, read_head, suspect

GOOD = b"POST /v1/inference HTTP/1.1\r\nHost: a\r\n"


def test_a_head_is_read_into_method_target_version_and_fields() -> None:
    head = read_head(b"POST /x?y=1 HTTP/1.1\r\nHOST: a\r\nContent-Length: 0012\r\nX-A: \tb c \r\n\r\n")
    assert (head.method, head.target, head.version) == (b"POST", b"/x?y=1", "1.1")
    assert head.fields == [(b"host", b"a"), (b"content-length", b"0012"), (b"x-a", b"b c")]
    assert (head.length, head.keep, head.expects) == (12, True, False)


@pytest.mark.parametrize(
    ("raw", "length", "keep", "expects"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", 0, False, False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", 0, False, False),
        (GOOD + b"Connection: close\r\n\r\n", 0, False, False),
        (GOOD + b"Connection: foo, Close\r\n\r\n", 0, False, False),
        (GOOD + b"Connection: foo\r\nConnection: close\r\n\r\n", 0, False, False),
        (GOOD + b"Connection: keep-alive\r\n\r\n", 0, True, False),
        (GOOD + b"Expect: 100-Continue\r\nContent-Length: 1\r\n\r\n", 1, True, True),
        (GOOD + b"Transfer-Encoding: Chunked\r\n\r\n", -1, True, False),
        (GOOD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\n", 3, True, False),
        (GOOD + b"Cookie: a\r\nCookie: b\r\nX: \xff\r\n\r\n", 0, True, False),
    ],
)
def test_a_head_says_length_and_whether_it_stays(raw: bytes, length: int, keep: bool, expects: bool) -> None:
    head = read_head(raw)
    assert (head.length, head.keep, head.expects) == (length, keep, expects)


@pytest.mark.parametrize("blanks", [" ", "\t", " \t  ", ""])
def test_blanks_around_a_value_are_no_part_of_it(blanks: str) -> None:
    fields = {"X-Request-Id": "ab", "Authorization": "Bearer k", "Idempotency-Key": "a b", "Expect": "100-continue"}
    lines = "".join(f"{name}:{blanks}{value}{blanks}\r\n" for name, value in fields.items())
    head = read_head(f"POST / HTTP/1.1\r\nHost:{blanks}a{blanks}\r\n{lines}Content-Length: 1{blanks}\r\n\r\n".encode())
    assert head.single == {
        b"host": b"a",
        **{k.lower().encode(): v.encode() for k, v in fields.items()},
        b"content-length": b"1",
    }
    assert (head.length, head.expects) == (1, True)


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\x02\x00\x01", b"\x16\x03\x03\x00\x05\r\n\r\n"])
def test_a_tls_handshake_is_called_one(raw: bytes) -> None:
    assert isinstance(suspect(raw), OtherProtocol)
    with pytest.raises(OtherProtocol, match="plain HTTP"):
        read_head(raw)


@pytest.mark.parametrize(
    "host", ["a", "", "a.example:8000", "127.0.0.1:80", "[::1]:8000", "[fe80::1%25eth0]", "a_b-c.", "a:", " a\t"]
)
def test_takes_every_host_that_there_can_be(host: str) -> None:
    assert read_head(f"GET /?a=b%2fc HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).length == 0


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (GOOD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", "Content-Length"),
        (GOOD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", "Transfer-Encoding"),
        (GOOD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\n", "Content-Length"),
        (GOOD + b"Content-Length: 3, 3\r\n\r\n", "Content-Length"),
        (GOOD + b"Content-Length: -3\r\n\r\n", "Content-Length"),
        (GOOD + b"Content-Length: 1_0\r\n\r\n", "Content-Length"),
        (GOOD + b"Content-Length:\r\n\r\n", "Content-Length"),
        (GOOD + b"Content-Length: %b\r\n\r\n" % (b"0" * 5000), "5000 digits"),
        (GOOD + b"Content-Length: %b3\r\n\r\n" % (b"0" * 20), "21 digits"),
        (b"GET /v1/models#a HTTP/1.1\r\nHost: a\r\n\r\n", "has a fragment"),
        (GOOD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "chunked"),
        (GOOD + b"Transfer-Encoding: chunked, gzip\r\n\r\n", "Transfer-Encoding"),
        (GOOD + b"Transfer-Encoding: xchunked\r\n\r\n", "Transfer-Encoding"),
        (GOOD + b"Transfer-Encoding: \x0bchunked\r\n\r\n", "header"),
        (GOOD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", "Transfer-Encoding"),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", "HTTP/1.1"),
        (GOOD + b"X: a\r\n b\r\n\r\n", "whitespace"),
        (GOOD + b"X: a\r\n\tb\r\n\r\n", "whitespace"),
        (GOOD + b"X : a\r\n\r\n", "token"),
        (GOOD + b"Content-Length : 3\r\n\r\n", "field char"),
        (GOOD + b" X: a\r\n\r\n", "whitespace"),
        (GOOD + b"X: a\nY: b\r\n\r\n", "header"),
        (GOOD + b"X: a\rY: b\r\n\r\n", "header"),
        (GOOD + b"X: a\0b\r\n\r\n", "header"),
        (GOOD + b"X\0: a\r\n\r\n", "token"),
        (GOOD + b": a\r\n\r\n", "token"),
        (GOOD + b"Xa\r\n\r\n", "token"),
        (b"GET / HTTP/1.1\r\n\r\n", "host is missing"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", "host was sent twice"),
        (b"GET / HTTP/1.1\r\nHost: localhost:1@evil\r\n\r\n", "host is 'localhost:1@evil'"),
        (b"GET / HTTP/1.1\r\nHost: a:b\r\n\r\n", "host is"),
        (b"GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", "host is"),
        (b"GET / HTTP/1.0\r\nHost: ::1\r\n\r\n", "host is"),
        (b"POST /v1%2finference HTTP/1.1\r\nHost: a\r\n\r\n", "slash"),
        (b"GET /v1/result%2Fx?wait=1 HTTP/1.1\r\nHost: a\r\n\r\n", "slash"),
        (b"POST /v2%2Fmodels/a/infer HTTP/1.1\r\nHost: a\r\n\r\n", "slash"),
        (GOOD + b"Authorization: a\r\nauthorization: b\r\n\r\n", "authorization was sent twice"),
        (GOOD + b"Idempotency-Key: a\r\nIdempotency-Key: a\r\n\r\n", "idempotency-key was sent twice"),
        (b"GET /\r\n\r\n", "request line"),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", "request line"),
        (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", "request line"),
        (b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n", "request line"),
        (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", "request line"),
        (b"GET / HTTP/1.1\nHost: a\r\n\r\n", "the request line 'GET / HTTP/1.1' ends with a bare LF"),
        (b"GET / HTTP/1.1\rHost: a\r\n\r\n", "request line"),
        (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", "url"),
        (b"FOO / HTTP/1.1\r\nHost: a\r\n\r\n", "method"),
        (b"PRI * HTTP/2.0\r\n\r\n", "gRPC has its own port"),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", "CONNECT"),
    ],
)
def test_refuses_what_is_malformed_or_ambiguous(raw: bytes, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_head(raw)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("partial", "seen"),
    [
        (b"\x16\x03\x01\x02", 0),
        (b"hello\n", 0),
        (b"GET / FTP", 0),
        (b"GET / HTTP/1.1\n", 0),
        (b"GET / HTTP/1.1\r\nHost: a\n", 0),
        (b"GET / HTTP/1.1\r\nHost: a\n", 22),
        (b"GET / HTTP/1.1\r\nHost: a\rb", 24),
        (b"GET / HTTP/1.1\r\nHost: \0", 0),
    ],
)
def test_a_bad_beginning_is_not(partial: bytes, seen: int) -> None:
    assert suspect(partial, seen) is not None


FIELD = st.tuples(st.from_regex(rb"\AX-[A-Za-z0-9!#$%&'*+.^_`|~-]{0,8}\Z"), st.from_regex(rb"\A[!-~]{1,8}\Z"))


@given(st.sampled_from([b"POST", b"M-SEARCH"]), st.lists(FIELD, max_size=6), st.integers(0, 10**6), st.integers(1, 200))
def test_every_beginning_of_a_good_head_is_waited_for(
    method: bytes, fields: list[tuple[bytes, bytes]], length: int, cut: int
) -> None:
    raw = (
        GOOD.replace(b"POST", method)
        + b"".join(b"%b: %b\r\n" % field for field in fields)
        + b"Content-Length: %d\r\n\r\n" % length
    )
    head = read_head(raw)
    assert head.length == length
    assert head.fields[1:-1] == [(name.lower(), value) for name, value in fields]
    assert suspect(raw[:cut]) is None
    assert suspect(raw[: cut + 3], min(cut, len(raw))) is None

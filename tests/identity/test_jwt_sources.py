"""Key sets are fetched within bounds."""

from __future__ import annotations

import asyncio
import socket

import pytest

from headway.identity.jwt import sources
from headway.identity.jwt.sources import MAX_BYTES, MAX_REDIRECTS, Unreadable, UrlSource
from tests.identity.issuing import Publisher, jwk, jwks, publishing


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is waited for."""
    monkeypatch.setattr(sources, "TIMEOUT", 60.0)


def read(publisher: Publisher) -> bytes | None:
    return asyncio.run(UrlSource(publisher.url).read())


def test_what_is_published_is_read() -> None:
    with publishing() as publisher:
        publisher.body = jwks(jwk("ES256"))
        assert read(publisher) == publisher.body


def test_the_largest_key_set_is_read_and_a_larger_one_is_not() -> None:
    with publishing() as publisher:
        publisher.body = b" " * MAX_BYTES
        assert read(publisher) == publisher.body
        publisher.body += b" "
        with pytest.raises(Unreadable, match="larger"):
            read(publisher)


@pytest.mark.parametrize("status", [203, 401, 404, 500, 503])
def test_only_an_answer_with_status_200_counts(status: int) -> None:
    with publishing() as publisher:
        publisher.status = status
        with pytest.raises(Unreadable, match=str(status)):
            read(publisher)


def test_a_redirect_is_followed_within_the_scheme() -> None:
    with publishing() as first, publishing() as second:
        second.body = jwks(jwk("ES256"))
        first.status, first.header = 302, {"Location": second.url}
        assert read(first) == second.body


@pytest.mark.parametrize("location", ["https://127.0.0.1:1/jwks", "file:///etc/passwd", "//[", "data:,x", ""])
def test_a_redirect_that_leads_elsewhere_is_not_followed(location: str) -> None:
    with publishing() as publisher:
        publisher.status, publisher.header = 307, {"Location": location}
        with pytest.raises(Unreadable):
            read(publisher)
        assert len(publisher.asked) == (1 if location else MAX_REDIRECTS + 1)


def test_nobody_is_waited_for_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TIMEOUT", 0.05)
    with publishing() as publisher:
        publisher.gate.clear()
        with pytest.raises(Unreadable, match="no answer"):
            read(publisher)


def test_keys_of_an_address_where_nobody_listens_are_unreadable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Nobody listens there, and nobody else can.
        with pytest.raises(Unreadable, match="cannot be fetched"):
            asyncio.run(UrlSource(f"http://127.0.0.1:{taken.getsockname()[1]}/").read())


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", b"\x00" * 100])
async def test_keys_in_an_answer_that_is_not_http_or_is_cut_short_are_unreadable(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Unreadable, match="cannot be fetched"):
            await UrlSource(f"http://127.0.0.1:{port}/").read()

"""Key sets are fetched within limits and kept up to date. Errors don't change the keys in use."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from structlog.testing import capture_logs

from headway.errors import SettingError
from headway.identity.jwt import keysets
from headway.identity.jwt.issuers import ALGORITHMS
from headway.identity.jwt.keysets import (
    AGAIN,
    MAX_BYTES,
    MAX_KEYS,
    MAX_REDIRECTS,
    FileSource,
    KeySet,
    Unreadable,
    UrlSource,
    read_keys,
)
from tests.identity.issuing import Publisher, Shelf, issuer, jwk, jwks, publishing
from tests.virtual_time import VirtualLoop, run


async def settle() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    await loop.settle()


async def opened(clock: Callable[[], float], *names: str) -> tuple[Shelf, KeySet]:
    """Open a key set with keys of these ids. Return its source and the key set."""
    shelf = Shelf(jwks(*(jwk("ES256", name) for name in names)), clock)
    keyset = KeySet(issuer(), shelf, clock)
    await keyset.open()
    return shelf, keyset


def kids(text: bytes, algorithm: str = "ES256") -> list[str]:
    return list(read_keys(text, algorithm))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_keys_for_the_algorithm_are_taken(algorithm: str) -> None:
    every = [jwk(one, f"{one}-key") for one in ALGORITHMS]
    assert kids(jwks(*every, {"kty": "oct", "kid": "secret", "k": "AAAA"}), algorithm) == [f"{algorithm}-key"]


@pytest.mark.parametrize(
    ("members", "taken"),
    [
        ({}, True),
        ({"use": "sig", "alg": "ES256", "key_ops": ["verify"]}, True),
        ({"use": "enc"}, False),
        ({"alg": "ES384"}, False),
        ({"key_ops": ["sign"]}, False),
        ({"crv": "P-384"}, False),
        ({"kty": "RSA"}, False),
        ({"kid": 7}, False),
        ({"x": "AAAA"}, False),
        ({"y": jwk("ES256", "another")["y"]}, False),
    ],
)
def test_what_a_key_must_be(members: dict[str, Any], taken: bool) -> None:
    assert kids(jwks(jwk("ES256", "one", **members))) == (["one"] if taken else [])


def test_keys_of_other_sizes_are_left_out() -> None:
    weak = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key(), as_dict=True)
    other = ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP384R1()).public_key(), as_dict=True)
    assert kids(jwks({**weak, "kid": "weak"}), "RS256") == []
    assert kids(jwks({**other, "kid": "large"}), "ES256") == []


def test_of_a_private_key_only_the_public_part_is_read_and_of_one_id_the_first() -> None:
    (key,) = read_keys(jwks(jwk("ES256", "one", d="AAAA")), "ES256").values()
    assert isinstance(key.jwk.key, ec.EllipticCurvePublicKey)
    found = read_keys(jwks(jwk("ES256", "one"), jwk("ES256", "two", kid="one")), "ES256")
    assert found["one"].material == read_keys(jwks(jwk("ES256", "one")), "ES256")["one"].material


def test_what_is_no_key_set() -> None:
    too_many = json.dumps({"keys": [{}] * (MAX_KEYS + 1)}).encode()
    nested, number = b"[" * 100_000, b'{"keys": ' + b"1" * 5000 + b"}"
    for text in (b"", b"\xff", b"{", b"[]", b"null", b"{}", b'{"keys": {}}', b"<html>", nested, number, too_many):
        with pytest.raises(Unreadable):
            read_keys(text, "ES256")


async def test_an_issuers_keys_are_read_every_few_minutes_or_after_a_failure(clock: Callable[[], float]) -> None:
    shelf, keyset = await opened(clock, "first")
    loop = asyncio.create_task(keyset.run())
    await asyncio.sleep(301)
    shelf.content = "down"
    await asyncio.sleep(340)
    shelf.content = jwks(jwk("ES256"))
    await asyncio.sleep(300)
    loop.cancel()
    assert shelf.asked == [1000, 1300, 1600, 1601, 1603, 1607, 1615, 1625, 1635, 1645]


@pytest.mark.parametrize("garbage", ["no answer", b"<html>", b"{}"])
async def test_a_wrong_file_changes_nothing_and_logs_once(garbage: bytes | str, clock: Callable[[], float]) -> None:
    shelf, keyset = await opened(clock, "first")
    key = keyset.find("first")
    assert key is not None
    shelf.content = garbage
    with capture_logs() as logs:
        for _ in range(3):
            await keyset.refresh()
    assert [line["event"] for line in logs] == ["the issuer's last known keys stay in use"]
    assert keyset.find("first") is key
    assert key.live
    shelf.content = jwks(jwk("ES256"))
    with capture_logs() as logs:
        await keyset.refresh()
        await keyset.refresh()
    assert [line["event"] for line in logs] == ["the issuer's keys can be read again"]
    assert keyset.find("first") is key, "the same key stays the same object"


async def test_a_key_that_has_left_is_dead_and_a_new_one_is_found(clock: Callable[[], float]) -> None:
    shelf, keyset = await opened(clock, "old")
    old = keyset.find("old")
    shelf.content = jwks(jwk("ES256", "new"))
    await keyset.refresh()
    assert old is not None
    assert not old.live
    assert keyset.find("old") is None
    assert keyset.find("new") is not None
    shelf.content = jwks(jwk("ES256", "other", kid="new"))
    before = keyset.find("new")
    await keyset.refresh()
    assert before is not None
    assert not before.live, "another key under the same id"
    shelf.content = jwks()
    with capture_logs() as logs:
        await keyset.refresh()
    assert keyset.find("new") is None, "a key set without keys is believed"
    assert [line["event"] for line in logs] == ["the issuer has no usable key"]


async def test_who_wants_an_unknown_key_has_it_read_once_in_a_while(clock: Callable[[], float]) -> None:
    shelf, keyset = await opened(clock, "first")
    loop = asyncio.create_task(keyset.run())
    await asyncio.sleep(AGAIN - 1)
    assert not keyset.want(), "it was read of late"
    await asyncio.sleep(1)
    shelf.gate.clear()
    assert keyset.want()
    assert keyset.want()
    await settle()
    assert keyset.want(), "it is being read"
    shelf.gate.set()
    await settle()
    assert not keyset.want()
    assert shelf.asked == [1000, 1000 + AGAIN]
    loop.cancel()


async def test_without_an_id_only_an_only_key_is_meant(clock: Callable[[], float]) -> None:
    shelf = Shelf(jwks(jwk("ES256", "one")), clock)
    keyset = KeySet(issuer(), shelf, clock)
    assert keyset.find(None) is None
    await keyset.open()
    assert keyset.find(None) is keyset.find("one")
    shelf.content = jwks(jwk("ES256", "one"), jwk("ES256", "two"))
    await keyset.refresh()
    assert keyset.find(None) is None


async def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path, clock: Callable[[], float]) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks(jwk("ES256", "old")))
    source = FileSource(path)
    keyset = KeySet(issuer(jwks=str(path)), source, clock)
    await keyset.open()
    assert await source.read() is None
    loop = asyncio.create_task(keyset.run())
    path.unlink()
    with capture_logs() as logs:
        await asyncio.sleep(2.5)
    assert [line["log_level"] for line in logs] == ["warning"]
    assert keyset.find("old") is not None
    path.write_bytes(jwks(jwk("ES256", "new")))
    await asyncio.sleep(1)
    assert keyset.find("old") is None
    assert keyset.find("new") is not None
    loop.cancel()


@pytest.mark.parametrize("content", [None, b"", b"{}", b" " * 300_000])
def test_a_file_without_a_key_set_is_an_error_at_the_start(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    if content is not None:
        path.write_bytes(content)

    async def main(clock: Callable[[], float]) -> None:
        await KeySet(issuer(jwks=str(path)), FileSource(path), clock).open()

    with pytest.raises(SettingError, match="no key set"):
        run(main)


@pytest.mark.parametrize(
    ("url", "warned"),
    [("http://idp/jwks", True), ("https://idp/jwks", False), ("http://127.0.0.1:1/", False), ("http://[::1]/", False)],
)
async def test_keys_that_come_in_the_clear_are_warned_of(url: str, warned: bool, clock: Callable[[], float]) -> None:
    with capture_logs() as logs:
        await KeySet(issuer(jwks=url), Shelf(jwks(jwk("ES256")), clock), clock).open()
    assert [line["log_level"] for line in logs] == ["warning"] * warned


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keysets, "TIMEOUT", 60.0)


def read(publisher: Publisher) -> bytes | None:
    return asyncio.run(UrlSource(publisher.url).read())


def test_what_is_published_is_read_up_to_the_largest_key_set() -> None:
    with publishing() as publisher:
        publisher.body = b" " * MAX_BYTES
        assert read(publisher) == publisher.body
        publisher.body += b" "
        with pytest.raises(Unreadable, match="larger"):
            read(publisher)


def test_only_an_answer_with_status_200_counts_and_redirects_within_the_scheme_are_followed() -> None:
    with publishing() as first, publishing() as second:
        second.body = jwks(jwk("ES256"))
        first.status, first.header = 302, {"Location": second.url}
        assert read(first) == second.body
        for first.status in (203, 401, 404, 503):
            with pytest.raises(Unreadable, match=str(first.status)):
                read(first)
        first.status = 307
        elsewhere = dict.fromkeys(("https://127.0.0.1:1/jwks", "file:///etc/passwd", "data:,x"), "another scheme")
        for location, why in (elsewhere | {"//[": "cannot be fetched", "": "more than"}).items():
            first.header = {"Location": location}
            first.asked.clear()
            with pytest.raises(Unreadable, match=why):
                read(first)
            assert len(first.asked) == (1 if location else MAX_REDIRECTS + 1)


def test_nobody_is_waited_for_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keysets, "TIMEOUT", 0.05)
    with publishing() as publisher:
        publisher.gate.clear()
        with pytest.raises(Unreadable, match="no answer"):
            read(publisher)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", b"\x00" * 100])
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
    with pytest.raises(Unreadable, match="cannot be fetched"):
        await UrlSource(f"http://127.0.0.1:{port}/").read()  # Nothing listens there any more.

"""What the adapter requires of a server before using it, and its messages if the server doesn't comply."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import AsyncMock
from urllib.parse import quote

import pytest

from headway.brokers.redis import connection as links
from headway.brokers.redis.connection import RedisConnection
from headway.errors import BrokerUnavailable, SettingError
from tests.authority import Authority
from tests.redis.stand import opened, run, served
from tests.servers.ports import LOOPBACK
from tests.servers.redis import RedisServer
from tests.servers.tls import PASSWORD, UNNAMED, TlsServer


def refusal(url: str) -> SettingError:
    """The error for a refused server. Checks that it doesn't show the password."""

    async def act() -> None:
        async with opened(url):
            raise AssertionError("it is taken")

    with pytest.raises(SettingError) as caught:
        run(act())
    assert caught.value.setting == "broker"
    assert PASSWORD not in str(caught.value)
    assert quote(PASSWORD, safe="") not in str(caught.value)
    return caught.value


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    with TlsServer(tmp_path_factory.mktemp("tls")) as server:
        yield server


async def test_certificates_are_read_again_for_connections_made_from_then_on(tls: TlsServer, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(tls.authority.file.read_bytes())
    url = f"{tls.url_of().partition('?')[0]}?ssl_ca_certs={trusted}"
    async with opened(url) as link:
        trusted.write_text("no certificate")
        with pytest.raises(SettingError, match="a TLS file that cannot be used"):
            await link.renew()
        await link.call("leave", "headway:{fleet}:", "", "")
        trusted.write_bytes(Authority(tmp_path, "other").file.read_bytes())
        await link.renew()
        with pytest.raises(BrokerUnavailable, match="certificate verify failed"):
            await link.call("leave", "headway:{fleet}:", "", "")
        trusted.write_bytes(tls.authority.file.read_bytes())
        await link.renew()
        await link.call("leave", "headway:{fleet}:", "", "")


def test_a_wrong_password_is_refused_and_so_is_a_url_without_a_user_where_one_is_asked_for(tls: TlsServer) -> None:
    refused = refusal(tls.url_of().replace(":only", ":lonely"))
    assert "refuses this user: invalid username-password pair" in refused.reason
    assert "redis://USER:PASSWORD@" in refused.hint
    url = tls.url_of()
    refused = refusal("rediss://" + url.partition("@")[2])
    assert "refuses this user: Authentication required" in refused.reason


def test_an_authority_that_nobody_trusts_is_refused(tls: TlsServer, tmp_path: Path) -> None:
    stranger = Authority(tmp_path).file
    for url in (tls.url_of().partition("?")[0], f"{tls.url_of().partition('?')[0]}?ssl_ca_certs={stranger}"):
        refused = refusal(url)
        assert "is not trusted" in refused.reason
        assert "CERTIFICATE_VERIFY_FAILED" in refused.reason
        assert "ssl_ca_certs=FILE" in refused.hint


def test_certificates_of_another_host_and_of_the_client(tmp_path: Path) -> None:
    with TlsServer(tmp_path) as server:
        elsewhere = server.url_of().replace(LOOPBACK, UNNAMED)
        assert "IP address mismatch" in refusal(elsewhere).reason
        lenient = f"{elsewhere}&ssl_check_hostname=false"
        run(served(lenient))
        server.command("CONFIG", "SET", "tls-auth-clients", "yes")
        with pytest.raises(BrokerUnavailable):
            run(served(lenient))
        certificate, key = server.authority.issue("client")
        run(served(f"{lenient}&ssl_certfile={certificate}&ssl_keyfile={key}"))


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_file_that_cannot_be_used_is_named_at_once(tmp_path: Path, option: str, text: str | None) -> None:
    file = tmp_path / "file.pem"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingError, match="names a TLS file that cannot be used"):
        RedisConnection(f"rediss://127.0.0.1:1?{option}={file}")


RIGHTS = {
    "no functions": (f"~headway:* {links.NEEDED} -fcall", "'fcall'"),
    "other keys": (f"~other:* {links.NEEDED}", "keys"),
    "no look at the server": (f"~headway:* {links.NEEDED} -info", "'info'"),
    "nothing to bring": (f"~headway:* {links.NEEDED} -function|load", "'function|load'"),
}


def test_a_user_needs_the_rights_that_are_asked_for_and_no_others(tmp_path: Path) -> None:
    with TlsServer(tmp_path) as server:

        def allow(rules: str) -> None:
            server.command("ACL", "SETUSER", "headway", "reset", "on", f">{PASSWORD}", *rules.split())

        for rules, what in RIGHTS.values():
            server.command("FUNCTION", "FLUSH")
            allow(rules)
            refused = refusal(server.url_of())
            assert "refuses this user" in refused.reason
            assert what in refused.reason
            assert f"~headway:* {links.NEEDED}" in refused.hint
        for enough in (
            f"~headway:* {links.NEEDED}",
            RIGHTS["nothing to bring"][0],
            f"~headway:* {links.NEEDED} -config",
        ):
            allow(enough)
            run(served(server.url_of()))  # The first one loads the library.


def test_a_server_that_would_evict_is_refused(kind: str, own: Callable[[str], RedisServer]) -> None:
    server = own(kind)
    server.command("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    try:
        refused = refusal(server.url)
    finally:
        server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert refused.value == server.url
    assert refused.reason.startswith("has maxmemory-policy volatile-lru: ")
    assert "CONFIG SET maxmemory-policy noeviction" in refused.hint


@pytest.mark.parametrize("name", ["redis_mode", "server_mode"])
@pytest.mark.parametrize(
    ("version", "mode", "says"),
    [
        ("7.2.4", "cluster", r"is a node of a cluster.*redis\+cluster://"),
        ("7.2.4", "sentinel", r"is a Sentinel.*redis\+sentinel://"),
        (
            "6.2.14",
            "standalone",
            r"is version 6\.2\.14, which does not support functions.*Use Redis 7\.0 or later, or Valkey\.",
        ),
        ("2.8.19", "standalone", r"is version 2\.8\.19, which does not support functions"),
    ],
)
def test_a_server_of_no_use_is_refused_whatever_it_calls_its_mode(
    name: str, version: str, mode: str, says: str
) -> None:
    link = RedisConnection("redis://127.0.0.1:1")
    link._check_server({"redis_version": "7.2.4", name: "standalone"})
    with pytest.raises(SettingError, match=says):
        link._check_server({"redis_version": version, name: mode})


def test_a_database_that_the_server_lacks_is_refused(kind: str, own: Callable[[str], RedisServer]) -> None:
    url = own(kind).url.rpartition("/")[0]
    run(served(f"{url}/15"))
    refused = refusal(f"{url}/16")
    assert refused.reason == "has a database number that the server does not have"
    assert "`databases`" in refused.hint


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("unable to perform operation on <TCPTransport closed=True>; the handler is closed", BrokerUnavailable),
        ("something else", RuntimeError),
    ],
)
def test_a_write_after_a_reset_is_an_outage(said: str, told: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    link = RedisConnection("redis://127.0.0.1:1/0", timeout=1.0)
    monkeypatch.setattr(link._calls, "call", AsyncMock(side_effect=RuntimeError(said)))
    with pytest.raises(told):
        run(link.call("function", "key"))

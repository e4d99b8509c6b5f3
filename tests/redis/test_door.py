"""Demands of the adapter on a server before it uses it, and its words when they are not met."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from headway.brokers.redis import connection as links
from headway.brokers.redis.connection import RedisConnection
from headway.config import load
from headway.errors import BrokerUnavailable, SettingError
from tests.redis.stand import opened, run, served
from tests.servers.redis import KINDS, RedisServer
from tests.servers.tls import PASSWORD, Authority, TlsServer


def refusal(url: str) -> SettingError:
    """Error for a server that is refused; it never shows the password."""

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


def test_a_named_user_is_served_over_tls(tls: TlsServer) -> None:
    load({"broker": tls.url_of()}, {})
    run(served(tls.url_of()))


def test_the_rights_that_are_asked_for_are_enough(tmp_path: Path) -> None:
    with TlsServer(tmp_path, rules=f"~headway:* {links.NEEDED}") as server:
        run(served(server.url_of()))


async def test_certificates_are_read_again_for_connections_made_from_then_on(tls: TlsServer, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(tls.authority.certificate.read_bytes())
    url = f"{tls.url_of().partition('?')[0]}?ssl_ca_certs={trusted}"
    async with opened(url) as link:
        trusted.write_text("no certificate")
        with pytest.raises(SettingError, match="a file for TLS that cannot be used"):
            await link.renew()
        await link.call("leave", "headway:{fleet}:", "", "")
        trusted.write_bytes(Authority(tmp_path / "other").certificate.read_bytes())
        await link.renew()
        with pytest.raises(BrokerUnavailable, match="certificate verify failed"):
            await link.call("leave", "headway:{fleet}:", "", "")
        trusted.write_bytes(tls.authority.certificate.read_bytes())
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
    stranger = Authority(tmp_path).certificate
    for url in (tls.url_of().partition("?")[0], f"{tls.url_of().partition('?')[0]}?ssl_ca_certs={stranger}"):
        refused = refusal(url)
        assert "is not trusted" in refused.reason
        assert "CERTIFICATE_VERIFY_FAILED" in refused.reason
        assert "ssl_ca_certs=FILE" in refused.hint


def test_another_hosts_certificate_is_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    with TlsServer(tmp_path) as server:
        certificate, key = server.authority.issue("other", "DNS:elsewhere.example")
        server.command("CONFIG", "SET", "tls-cert-file", str(certificate), "tls-key-file", str(key))
        assert "IP address mismatch" in refusal(server.url_of()).reason
        run(served(f"{server.url_of()}&ssl_check_hostname=false"))


def test_a_server_that_asks_for_a_certificate_gets_it(tmp_path: Path) -> None:
    with TlsServer(tmp_path) as server:
        certificate, key = server.authority.issue("client", "DNS:client.example")
        server.command("CONFIG", "SET", "tls-auth-clients", "yes")
        with pytest.raises(BrokerUnavailable):
            run(served(server.url_of()))
        run(served(f"{server.url_of()}&ssl_certfile={certificate}&ssl_keyfile={key}"))


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_file_that_cannot_be_used_is_named_at_once(tmp_path: Path, option: str, text: str | None) -> None:
    file = tmp_path / "file.pem"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingError, match="names a file for TLS that cannot be used"):
        RedisConnection(f"rediss://127.0.0.1:1?{option}={file}")


RIGHTS = {
    "no functions": (f"~headway:* {links.NEEDED} -fcall", "'fcall'"),
    "other keys": (f"~other:* {links.NEEDED}", "keys"),
    "no look at the server": (f"~headway:* {links.NEEDED} -info", "'info'"),
    "nothing to bring": (f"~headway:* {links.NEEDED} -function|load", "'function|load'"),
}


@pytest.mark.parametrize("case", RIGHTS)
def test_a_user_without_the_rights_is_refused(case: str, tmp_path: Path) -> None:
    rules, what = RIGHTS[case]
    with TlsServer(tmp_path, rules=rules) as server:
        refused = refusal(server.url_of())
        assert "refuses this user" in refused.reason
        assert what in refused.reason
        assert f"~headway:* {links.NEEDED}" in refused.hint


def test_who_may_not_bring_the_library_or_see_the_policy_uses_what_is_there(tmp_path: Path) -> None:
    with TlsServer(tmp_path, rules=RIGHTS["nothing to bring"][0]) as server:
        run(served(server.url))
        run(served(server.url_of()))
    with TlsServer(tmp_path / "another", rules=f"~headway:* {links.NEEDED} -config") as server:
        run(served(server.url_of()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_would_evict_is_refused(kind: str, tmp_path: Path) -> None:
    with RedisServer(kind, tmp_path, "maxmemory-policy volatile-lru") as server:
        refused = refusal(server.url)
        assert refused.value == server.url
        assert refused.reason.startswith("has maxmemory-policy volatile-lru: ")
        assert "CONFIG SET maxmemory-policy noeviction" in refused.hint


@pytest.mark.parametrize("name", ["redis_mode", "server_mode"])
@pytest.mark.parametrize(("mode", "says"), [("cluster", "is a node of a cluster"), ("sentinel", "is a Sentinel")])
def test_a_server_that_is_none_is_refused_whatever_it_calls_its_mode(name: str, mode: str, says: str) -> None:
    link = RedisConnection("redis://127.0.0.1:1")
    link._check_server({"redis_version": "7.2.4", name: "standalone"})
    with pytest.raises(SettingError, match=rf"{says}.*redis\+{mode}://"):
        link._check_server({"redis_version": "7.2.4", name: mode})


def test_a_blocking_read_ends_by_itself(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BLOCK", 0.01)

    async def act() -> None:
        async with opened(server.url) as link, asyncio.timeout(10.0):
            assert await link.pop("nothing") is None
            assert await link.stream("nothing", b"0") == []

    with RedisServer(kind, tmp_path) as server:
        run(act())


@pytest.mark.parametrize("kind", KINDS)
def test_a_database_that_the_server_lacks_is_refused(kind: str, own: Callable[[str], RedisServer]) -> None:
    url = own(kind).url.rpartition("/")[0]
    run(served(f"{url}/15"))
    refused = refusal(f"{url}/16")
    assert refused.reason == "names a database that the server does not have"
    assert "`databases`" in refused.hint


@contextmanager
def stub(version: str) -> Iterator[str]:
    """URL of something that says it is a Redis of a version, and little else."""
    info = f"# Server\r\nredis_version:{version}\r\nredis_mode:standalone\r\n".encode()

    def serve(accepted: socket.socket) -> None:
        with accepted, suppress(OSError):
            while received := accepted.recv(1 << 16):
                for _ in range(received.count(b"*")):
                    wanted = b"INFO" in received
                    accepted.sendall(b"$%d\r\n%s\r\n" % (len(info), info) if wanted else b"+OK\r\n")

    def listen() -> None:
        for _ in range(2):
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=[accepted], daemon=True).start()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listening = threading.Thread(target=listen)
        listening.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        listener.shutdown(socket.SHUT_RDWR)
        listening.join()


@pytest.mark.parametrize("version", ["6.2.14", "2.8.19", "5.0"])
def test_a_server_without_functions_is_refused(version: str) -> None:
    with stub(version) as url:
        refused = refusal(url)
    assert refused.reason == f"is version {version}, which has no functions"
    assert refused.hint == "Use Redis 7.0 or later, or Valkey."


def test_a_server_that_is_not_there_may_come_yet(tmp_path: Path) -> None:
    with RedisServer("valkey", tmp_path) as server:
        run(served(server.url))
        server.stop()
        with pytest.raises(BrokerUnavailable, match="Connect call failed"):
            run(served(server.url))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("unable to perform operation on <TCPTransport closed=True>; the handler is closed", BrokerUnavailable),
        ("something else", RuntimeError),
    ],
)
def test_a_write_after_a_reset_is_an_outage(said: str, told: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    link = RedisConnection("redis://127.0.0.1:1/0", timeout=1.0)

    async def reset(*_: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(link._calls, "call", reset)
    with pytest.raises(told):
        run(link.call("function", "key"))

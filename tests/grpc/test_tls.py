"""TLS on the gRPC port: gRPC's own client, certificates of clients, new certificates between calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from headway.runtime.certificates import Certificates
from headway.runtime.counters import TlsCounts
from tests.authority import Authority
from tests.grpc.stand import PREDICT, Port, predict, predicted, served


def credentials(authority: Authority, shown: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    """Credentials of a client that trusts an authority, and shows a certificate if one is given."""
    if shown is None:
        return grpc.ssl_channel_credentials(authority.file.read_bytes())
    certificate, key = shown
    return grpc.ssl_channel_credentials(authority.file.read_bytes(), key.read_bytes(), certificate.read_bytes())


def test_calls_are_answered_over_tls_and_certificates_change_between_them(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue()
    certificates = Certificates(str(certificate), str(key), "", TlsCounts())

    async def main(port: Port) -> None:
        client = port.client(credentials(authority))
        assert predicted(await client.ask(PREDICT, predict("abc"))).output == b"ABC"
        authority.issue()
        await certificates.reread()
        for one in (client, port.client(credentials(authority))):
            assert predicted(await one.ask(PREDICT, predict("x" * 300_000))).output == b"X" * 300_000

    served(main, certificates=certificates)


def test_a_client_without_a_certificate_is_refused(tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path), Authority(tmp_path, "clients")
    certificate, key = authority.issue()
    certificates = Certificates(str(certificate), str(key), str(clients.file), TlsCounts())

    async def main(port: Port) -> None:
        good = port.client(credentials(authority, clients.issue("client")))
        assert predicted(await good.ask(PREDICT, predict("abc"))).output == b"ABC"
        refused = await port.client(credentials(authority)).fail(PREDICT, predict("abc"))
        assert refused.status is grpc.StatusCode.UNAVAILABLE
        assert certificates.counts.failures["grpc", "no_certificate"] >= 1
        assert len(port.gateway.asked) == 1

    served(main, certificates=certificates)


def test_a_client_without_tls_is_told_so(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue()
    certificates = Certificates(str(certificate), str(key), "", TlsCounts())

    async def main(port: Port) -> None:
        refused = await port.client().fail(PREDICT, predict("abc"))
        assert refused.status is grpc.StatusCode.UNAVAILABLE
        reader, writer = await asyncio.open_connection("127.0.0.1", port.listener.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"this port speaks TLS" in await reader.read()
        writer.close()
        assert certificates.counts.failures["grpc", "plain"] >= 1

    served(main, certificates=certificates)

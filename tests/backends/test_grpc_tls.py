"""TLS towards a remote API over gRPC: who is trusted and refused, and certificates that change."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from headway.backends.grpc.backend import GrpcBackend
from headway.config.target import RemoteTarget
from headway.errors import TargetError
from headway.model import ItemResult
from headway.runtime.counters import Counters
from headway.runtime.remote_certificates import RemoteCertificates
from tests.authority import Authority
from tests.backends.entries import batch
from tests.backends.grpc_remote import answer, served_grpc, texts_of

LONG = 30.0


def server_credentials(authority: Authority) -> Any:
    certificate, key = authority.issue("api")
    pair = (key.read_bytes(), certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], authority.file.read_bytes(), require_client_auth=True)


def backend_for(url: str, ca: object, shown: object, key: object) -> tuple[GrpcBackend, RemoteCertificates]:
    certificates = RemoteCertificates(str(ca), str(shown), str(key), Counters())
    return GrpcBackend(RemoteTarget(url), certificates=certificates, start_timeout=LONG, max_tries=2), certificates


def test_a_certificate_is_shown_and_a_new_one_makes_a_new_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    seen: list[tuple[str, bytes]] = []

    async def handle(asked: Any, context: Any) -> bytes:
        seen.append((context.peer(), context.auth_context()["x509_pem_cert"][0]))
        return answer([text.upper() for text in texts_of(asked)])

    async def main() -> None:
        async with served_grpc(handle, tls=server_credentials(authority)) as url:
            backend, certificates = backend_for(url, authority.file, *authority.issue("client"))
            try:
                await backend.start()
                assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
                authority.issue("client")
                await certificates.reread()
                assert await backend.run(batch("b"), LONG) == [ItemResult("B")]
            finally:
                await backend.stop()

    asyncio.run(main())
    warm_up, before, after = seen
    assert warm_up == before
    assert before[0] != after[0] and before[1] != after[1]


@pytest.mark.parametrize("who", ["shows none", "trusts another"])
def test_without_the_right_certificates_there_is_no_start(tmp_path: Path, who: str) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")

    async def handle(asked: Any, context: Any) -> bytes:
        raise AssertionError("it was let in")

    async def main() -> None:
        files: tuple[object, object, object] = (authority.file, "", "")
        if who == "trusts another":
            files = (other.file, *authority.issue("client"))
        async with served_grpc(handle, tls=server_credentials(authority)) as url:
            backend, _ = backend_for(url, *files)
            try:
                with pytest.raises(TargetError, match=r"credentials and certificates"):
                    await backend.start()
            finally:
                await backend.stop()

    asyncio.run(main())

"""TLS towards a remote API over gRPC: who is trusted and refused, and certificates that change."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from headway.backends.grpc.backend import GrpcBackend
from headway.backends.remote.tls_failures import explain_words
from headway.config.target import RemoteTarget
from headway.errors import TargetError
from headway.model import ItemResult
from headway.runtime.certificates import RemoteCertificates
from headway.runtime.counters import TlsCounts
from tests.authority import Authority
from tests.backends.entries import batch
from tests.backends.grpc_remote import answer, served_grpc, texts_of

LONG = 30.0


def server_credentials(authority: Authority) -> Any:
    certificate, key = authority.issue("api")
    pair = (key.read_bytes(), certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], authority.file.read_bytes(), require_client_auth=True)


def backend_for(url: str, ca: object, shown: object, key: object) -> tuple[GrpcBackend, RemoteCertificates]:
    certificates = RemoteCertificates(str(ca), str(shown), str(key), TlsCounts())
    return GrpcBackend(RemoteTarget(url), certificates=certificates, start_timeout=LONG, max_tries=2), certificates


async def test_a_certificate_is_shown_and_a_new_one_makes_a_new_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    seen: list[tuple[str, bytes]] = []

    async def handle(asked: Any, context: Any) -> bytes:
        seen.append((context.peer(), context.auth_context()["x509_pem_cert"][0]))
        return answer([text.upper() for text in texts_of(asked)])

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
    warm_up, before, after = seen
    assert warm_up == before
    assert before[0] != after[0] and before[1] != after[1]


ENDED = "it ended the handshake, and gRPC does not tell why. It may ask for a certificate"
Shown = Callable[[Authority, Authority], tuple[object, object, object]]


@pytest.mark.parametrize(
    ("told", "files"),
    [
        (ENDED, lambda by, other: (by.file, "", "")),
        (ENDED, lambda by, other: (by.file, *other.issue("stranger"))),
        ("Name the authority that issued it with remote_ca", lambda by, other: (other.file, *by.issue("client"))),
    ],
    ids=["shows none", "shows a stranger's", "trusts another"],
)
async def test_a_start_says_which_certificate_will_not_do(tmp_path: Path, told: str, files: Shown) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")

    async def handle(asked: Any, context: Any) -> bytes:
        raise AssertionError("it was let in")

    async with served_grpc(handle, tls=server_credentials(authority)) as url:
        backend, _ = backend_for(url, *files(authority, other))
        with pytest.raises(TargetError, match=r"check host and port, the certificates") as raised:
            await backend.start()
    assert told in str(raised.value)


async def test_a_port_without_tls_is_named(tmp_path: Path) -> None:
    async def handle(asked: Any, context: Any) -> bytes:
        raise AssertionError("it was let in")

    async with served_grpc(handle) as url:
        backend, _ = backend_for(url.replace("grpc:", "grpcs:"), Authority(tmp_path).file, "", "")
        with pytest.raises(TargetError, match=r"does not speak TLS on this port\. Write grpc://"):
            await backend.start()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", "its certificate is not valid now: certificate has expired."),
        ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid: OK", "its certificate is not valid now"),
        ("CERTIFICATE_VERIFY_FAILED: self signed certificate: OK", "its certificate is not trusted: self signed certificate."),
        ("CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted"),
        (
            "CERTIFICATE_VERIFY_FAILED: authority and subject key identifier mismatch: OK",
            "its certificate is not trusted: authority and subject key identifier mismatch.",
        ),
        ("CERTIFICATE_VERIFY_FAILED: Hostname mismatch, certificate is not valid for 'a'.", "its certificate is of another host"),
        ("UNAUTHENTICATED: Hostname Verification Check failed.", "its certificate is of another host"),
        ("SSL_ERROR_SSL: OPENSSL_internal:WRONG_VERSION_NUMBER", "it does not speak TLS on this port. Write grpc://"),
        ("Unwrap failed (TSI_DATA_CORRUPTED)", ENDED),
    ],
)  # fmt: skip
def test_words_of_grpc_are_explained(said: str, told: str) -> None:
    assert explain_words(said).startswith(told)


def test_what_is_not_of_tls_is_not_explained() -> None:
    assert explain_words("Failed to connect to remote host: connect: Connection refused (111)") == ""


@pytest.mark.processes
@pytest.mark.parametrize("set_by_user", ["", "ERROR"])
def test_the_c_library_is_silent_unless_the_user_wants_it(set_by_user: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    if set_by_user:
        environment["GRPC_VERBOSITY"] = set_by_user
    program = (
        "import os, headway.backends.grpc.backend, grpc\n"
        "print(os.environ.get('GRPC_VERBOSITY', ''))\n"
        "trusted = grpc.ssl_channel_credentials(b'none')\n"
        "channel = grpc.secure_channel('127.0.0.1:1', trusted)\n"
        "try: channel.unary_unary('/a/b')(b'', timeout=5)\n"
        "except grpc.RpcError: pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=LONG
    )
    assert done.stdout.strip() == set_by_user, "the environment of others is as it was"
    assert bool(done.stderr) == bool(set_by_user), done.stderr

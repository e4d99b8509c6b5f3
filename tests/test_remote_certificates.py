"""Certificates towards a remote API: what cannot be used is refused, and what changes is read again when it fits."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import structlog
from cryptography import x509

from headway.app.backends import make_remote_certificates
from headway.config import Settings
from headway.config.target import ModuleTarget, RemoteTarget, parse_target
from headway.errors import SettingError
from headway.runtime.certificates import RemoteCertificates
from headway.runtime.counters import TlsCounts
from tests.authority import Authority

API = RemoteTarget("https://localhost/batch")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def made(ca: object = "", certificate: object = "", key: object = "", **options: Any) -> RemoteCertificates:
    return RemoteCertificates(str(ca), str(certificate), str(key), TlsCounts(), **options)


Wrong = Callable[[Path, Authority], tuple[object, object, object]]


def _written(folder: Path, text: str) -> Path:
    file = folder / "wrong.pem"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("name", "reason", "wrong"),
    [
        ("remote_ca", "no such file", lambda at, by: (at / "no", "", "")),
        ("remote_ca", "no certificate of an authority", lambda at, by: (_written(at, "hello"), "", "")),
        ("remote_cert", "no such file", lambda at, by: ("", at / "no", "")),
        ("remote_cert", "Is a directory", lambda at, by: ("", at, by.issue()[1])),
        ("remote_cert", "is not a certificate", lambda at, by: ("", _written(at, "hello"), by.issue()[1])),
        ("remote_cert", "Name the file of its key with --remote-key", lambda at, by: ("", by.issue()[0], "")),
        ("remote_key", "no such file", lambda at, by: ("", by.issue()[0], at / "no")),
        ("remote_key", "holds no private key", lambda at, by: ("", by.issue()[0], _written(at, "hello"))),
        ("remote_key", "is not the key of", lambda at, by: ("", by.issue()[0], by.issue("other")[1])),
        ("remote_key", "is encrypted", lambda at, by: ("", *by.issue(password=b"secret"))),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, authority: Authority, name: str, reason: str, wrong: Wrong
) -> None:
    with pytest.raises(SettingError) as raised:
        made(*wrong(tmp_path, authority))
    assert raised.value.setting == name
    assert reason in str(raised.value)
    assert raised.value.hint


def test_a_key_without_its_certificate_is_refused() -> None:
    with pytest.raises(SettingError, match="has no effect without `remote_cert`"):
        Settings(remote_key="client.key")


@pytest.mark.parametrize("name", ["remote_ca", "remote_cert"])
def test_certificates_towards_an_api_without_tls_are_refused(authority: Authority, name: str) -> None:
    certificate, key = authority.issue()
    given = {"remote_ca": authority.file} if name == "remote_ca" else {"remote_cert": certificate, "remote_key": key}
    settings = Settings(**{field: str(path) for field, path in given.items()})  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"http://localhost/batch, which is asked without TLS") as raised:
        make_remote_certificates(settings, [None, parse_target("http://localhost/batch")], TlsCounts())
    assert raised.value.setting == name
    assert "https://" in raised.value.hint


def test_a_target_of_python_leaves_the_files_unread() -> None:
    settings = Settings(remote_ca="/not/there.pem")
    assert make_remote_certificates(settings, [ModuleTarget("module", "function"), None], TlsCounts()) is None
    with pytest.raises(SettingError, match="no such file"):
        make_remote_certificates(settings, [API], TlsCounts())
    assert make_remote_certificates(Settings(), [API], TlsCounts()) is None


def test_what_was_read_is_there_as_a_context_and_as_text(authority: Authority) -> None:
    certificate, key = authority.issue()
    counters = TlsCounts()
    settings = Settings(remote_ca=str(authority.file), remote_cert=str(certificate), remote_key=str(key))
    found = make_remote_certificates(settings, [API], counters)
    assert found is not None
    tls = found.current
    assert (tls.authorities, tls.certificate, tls.key) == (
        authority.file.read_bytes().strip(),
        certificate.read_bytes(),
        key.read_bytes(),
    )
    assert tls.context.verify_mode == ssl.CERT_REQUIRED
    assert tls.context.check_hostname
    assert tls.context.cert_store_stats()["x509_ca"] == 1
    assert b"PRIVATE" not in repr(tls).encode()
    ends = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    assert counters.remote_ends == ends.timestamp()


def test_without_an_authority_those_of_the_system_are_trusted(authority: Authority) -> None:
    tls = made("", *authority.issue()).current
    assert tls.authorities is None
    assert tls.context.verify_mode == ssl.CERT_REQUIRED


def test_the_authority_alone_may_change(tmp_path: Path, authority: Authority) -> None:
    other = Authority(tmp_path, "other")

    async def main() -> None:
        found = made(authority.file)
        authority.file.write_bytes(authority.file.read_bytes() + other.file.read_bytes())
        await found.reread()
        assert found.current.context.cert_store_stats()["x509_ca"] == 2
        assert found.current.certificate is None

    with structlog.testing.capture_logs() as lines:
        asyncio.run(main())
    assert [line["event"] for line in lines] == ["certificates for the remote API read"] * 2


@pytest.mark.parametrize(
    ("days", "event"),
    [
        (10, "the certificate for the remote API ends soon"),
        (-1, "the certificate for the remote API is not valid now, and the API refuses it"),
    ],
)
def test_the_end_of_a_certificate_is_told(authority: Authority, days: float, event: str) -> None:
    with structlog.testing.capture_logs() as lines:
        made("", *authority.issue(days=days), now=lambda: datetime.now(UTC).timestamp())
    assert [line["event"] for line in lines if line["log_level"] != "info"] == [event]

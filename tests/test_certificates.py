"""Certificate files of ports and for remote APIs: unusable ones are refused, and changed ones are reloaded."""

import asyncio
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from headway.app.backends import make_remote_certificates
from headway.config import Settings
from headway.config.target import ModuleTarget, RemoteTarget, parse_target
from headway.errors import SettingError
from headway.runtime import certificates
from headway.runtime.certificates import DAY, Certificates, RemoteCertificates, validity
from headway.runtime.counters import TlsCounts
from headway.runtime.supervisor import Supervisor
from tests.authority import Authority

BROKEN = "-----BEGIN {0}-----\nMIIB\n-----END {0}-----\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def made(certificate: object, key: object = "", client_ca: object = "", **options: Any) -> Certificates:
    return Certificates(str(certificate), str(key), str(client_ca), TlsCounts(), **options)


def of_remote(ca: object = "", certificate: object = "", key: object = "", **options: Any) -> RemoteCertificates:
    return RemoteCertificates(str(ca), str(certificate), str(key), TlsCounts(), **options)


def shown(context: ssl.SSLContext, trust: ssl.SSLContext) -> int:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trust.wrap_bio(back, there, server_hostname="localhost")
    service = context.wrap_bio(there, back, server_side=True)
    for _ in range(3):
        for side in (client, service):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    certificate = client.getpeercert(binary_form=True)
    assert certificate is not None
    return x509.load_der_x509_certificate(certificate).serial_number


def number(certificate: Path) -> int:
    return x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number


# Unusable files.

Wrong = Callable[[Path, Authority], tuple[object, object, object]]


def _written(folder: Path, text: str | bytes) -> Path:
    file = folder / "wrong.pem"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


@pytest.mark.parametrize(
    ("name", "reason", "wrong"),
    [
        ("tls_cert", "no such file", lambda at, by: (at / "no", at / "no", "")),
        ("tls_cert", "Is a directory", lambda at, by: (at, by.issue()[1], "")),
        ("tls_cert", "null byte", lambda at, by: ("\0", by.issue()[1], "")),
        ("tls_cert", "is not a certificate", lambda at, by: (_written(at, "hello"), by.issue()[1], "")),
        ("tls_cert", "is not a certificate", lambda at, by: (_written(at, ""), by.issue()[1], "")),
        ("tls_cert", "is not a certificate", lambda at, by: (_written(at, BROKEN.format("CERTIFICATE")), by.issue()[1], "")),
        ("tls_cert", "is not a certificate", lambda at, by: (_written(at, by.issue()[0].read_bytes()[:-60]), by.issue()[1], "")),
        ("tls_cert", "holds a key, but no certificate", lambda at, by: (*by.issue()[::-1], "")),
        ("tls_cert", "--tls-key", lambda at, by: (by.issue()[0], "", "")),
        ("tls_cert", "ee key too small", lambda at, by: (*by.issue(key=rsa.generate_private_key(65537, 1024)), "")),
        ("tls_key", "no such file", lambda at, by: (by.issue()[0], at / "no", "")),
        ("tls_key", "holds no private key", lambda at, by: (by.issue()[0], by.file, "")),
        ("tls_key", "holds no private key", lambda at, by: (by.issue()[0], _written(at, BROKEN.format("PRIVATE KEY")), "")),
        ("tls_key", "is not the key of", lambda at, by: (by.issue()[0], by.issue("other")[1], "")),
        ("tls_key", "is not the key of", lambda at, by: (by.issue()[0], by.issue("b", key=rsa.generate_private_key(65537, 2048))[1], "")),
        ("tls_key", "is encrypted", lambda at, by: (*by.issue(password=b"secret"), "")),
        ("tls_client_ca", "no such file", lambda at, by: (*by.issue(), at / "no")),
        ("tls_client_ca", "no certificate of an authority", lambda at, by: (*by.issue(), _written(at, "hello"))),
        ("tls_client_ca", "no certificate of an authority", lambda at, by: (*by.issue(), by.issue("x")[1])),
        ("tls_client_ca", "no certificate of an authority", lambda at, by: (*by.issue(), _written(at, BROKEN.format("CERTIFICATE")))),
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
)  # fmt: skip
def test_unusable_files_are_refused(tmp_path: Path, authority: Authority, name: str, reason: str, wrong: Wrong) -> None:
    with pytest.raises(SettingError) as raised:
        (of_remote if name.startswith("remote") else made)(*wrong(tmp_path, authority))
    assert raised.value.setting == name
    assert reason in str(raised.value)
    assert raised.value.hint


def test_an_encrypted_key_of_the_older_format_is_refused(authority: Authority) -> None:
    certificate, key = authority.issue()
    old = serialization.load_pem_private_key(key.read_bytes(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.BestAvailableEncryption(b"secret"),
    )
    key.write_bytes(old)
    with pytest.raises(SettingError, match="is encrypted"):
        made(certificate, key)


def test_a_key_may_be_in_the_file_of_its_certificate(authority: Authority) -> None:
    certificate, key = authority.issue()
    certificate.write_bytes(key.read_bytes() + certificate.read_bytes())
    made(certificate)


def test_a_key_that_others_may_read_is_warned_of(authority: Authority) -> None:
    certificate, key = authority.issue()
    for mode, warned in ((0o600, 0), (0o440, 0), (0o644, 1), (0o660, 1)):
        key.chmod(mode)
        with structlog.testing.capture_logs() as lines:
            made(certificate, key)
        told = [line for line in lines if "can be read or changed by others" in line["event"]]
        assert [line["mode"] for line in told] == [f"{mode:04o}"] * warned


# Expiry.


@pytest.mark.parametrize(
    ("days", "event"),
    [(30, ""), (10, "the certificate expires soon"), (-1, "the certificate is not valid now, and clients refuse it")],
)
def test_the_end_of_a_certificate_is_told_each_day(authority: Authority, days: float, event: str) -> None:
    now = [datetime.now(UTC).timestamp()]

    async def main() -> None:
        found = made(*authority.issue(days=days), now=lambda: now[0])
        await found.look()
        now[0] += DAY / 2
        await found.look()
        now[0] += DAY / 2
        await found.look()

    with structlog.testing.capture_logs() as lines:
        asyncio.run(main())
        of_remote("", *authority.issue(days=days), now=lambda: now[0])
    *ours, remote = [line["event"] for line in lines if line["log_level"] != "info"] or [""]
    assert ours == [event] * (2 if event else 0)
    assert remote == event.replace("certificate", "certificate for the remote API").replace(
        "clients refuse", "the API refuses"
    )


def test_the_end_is_a_metric_and_both_forms_of_a_date_are_read(authority: Authority) -> None:
    counters = TlsCounts()
    certificate, key = authority.issue()
    Certificates(str(certificate), str(key), "", counters)
    read = x509.load_pem_x509_certificate(certificate.read_bytes())
    assert counters.ends == read.not_valid_after_utc.timestamp()
    certificate, _ = authority.issue(days=365 * 30)  # Dates from 2050 on have the longer form.
    read = x509.load_pem_x509_certificate(certificate.read_bytes())
    found = validity(read.public_bytes(serialization.Encoding.DER))
    assert found == (read.not_valid_before_utc.timestamp(), read.not_valid_after_utc.timestamp())


@pytest.mark.parametrize("data", [b"", b"\x30", b"\x30\x84\xff\xff\xff\xff", b"\x30\x03\x30\x01\x02", b"\x04\x00"])
def test_no_certificate_has_no_dates(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a certificate"):
        validity(data)


# Changes.


def test_a_pair_is_taken_when_both_files_fit(authority: Authority) -> None:
    certificate, key = authority.issue()
    first, trust = number(certificate), authority.trust()

    async def main() -> None:
        found = made(certificate, key)
        before = found.context("http/1.1")
        await found.look()
        assert found.context("http/1.1") is before
        old = key.read_bytes()
        authority.issue()
        new = key.read_bytes()
        key.write_bytes(old)
        for _ in range(4):
            await found.look()
        assert shown(found.context("http/1.1"), trust) == first
        key.write_bytes(new)
        await found.look()
        assert shown(found.context("http/1.1"), trust) == first  # It might still be changing.
        await found.look()
        for protocol in certificates.PROTOCOLS:
            assert shown(found.context(protocol), trust) == number(certificate) != first
        assert shown(before, trust) == first

    with structlog.testing.capture_logs() as lines:
        asyncio.run(main())
    assert [line["event"] for line in lines] == [
        "certificate read",
        "the changed certificates cannot be used; the previous ones stay in use",
        "certificate read",
    ]


async def test_a_file_that_is_gone_leaves_what_was_read(authority: Authority) -> None:
    certificate, key = authority.issue()
    found = made(certificate, key)
    before = found.context("h2")
    content = certificate.read_bytes()
    certificate.unlink()
    for _ in range(3):
        await found.look()
    assert found.context("h2") is before
    certificate.write_bytes(content)
    for _ in range(2):
        await found.look()
    assert found.context("h2") is not before


async def test_links_are_followed_to_what_they_name_by_then(authority: Authority, tmp_path: Path) -> None:
    """Kubernetes updates a mounted secret by pointing a link to another folder."""
    folders = [tmp_path / "1", tmp_path / "2"]
    for folder in folders:
        folder.mkdir()
        for file in authority.issue():
            file.rename(folder / file.name)
    link = tmp_path / "data"
    link.symlink_to(folders[0])
    found = made(link / "service.pem", link / "service.key")
    (tmp_path / "new").symlink_to(folders[1])
    (tmp_path / "new").rename(link)
    for _ in range(2):
        await found.look()
    assert shown(found.context("h2"), authority.trust()) == number(folders[1] / "service.pem")


async def test_the_authorities_of_clients_change_too(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue()
    other = Authority(tmp_path, "other")
    found = made(certificate, key, other.file)
    before = found.context("h2")
    other.file.write_bytes(other.file.read_bytes() + authority.file.read_bytes())
    for _ in range(2):
        await found.look()
    assert before.cert_store_stats()["x509"] == 1
    assert found.context("h2").cert_store_stats()["x509"] == 2


async def test_a_signal_reads_at_once_and_says_what_is_wrong(authority: Authority) -> None:
    certificate, key = authority.issue()
    found = made(certificate, key)
    authority.issue()
    await found.reread()
    assert shown(found.context("h2"), authority.trust()) == number(certificate)
    key.write_text("")
    with pytest.raises(SettingError, match="holds no private key"):
        await found.reread()
    assert shown(found.context("h2"), authority.trust()) == number(certificate)


async def test_the_files_are_looked_at_until_the_end(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "CHECK_FILES_EVERY", 0.01)
    certificate, key = authority.issue()
    found = made(certificate, key)
    before, supervisor = found.context("h2"), Supervisor()
    await found.open()
    found.start(supervisor)
    authority.issue()
    for _ in range(1000):
        await asyncio.sleep(0.01)
        if found.context("h2") is not before:
            break
    assert found.context("h2") is not before
    await supervisor.stop()
    await found.close()


API = RemoteTarget("https://localhost/batch")


def test_a_key_without_its_certificate_is_refused() -> None:
    for name, cert in (("remote_key", "remote_cert"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
        with pytest.raises(SettingError, match=f"{name} = .* has no effect without `{cert}`"):
            Settings(**{name: "client.pem"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["remote_ca", "remote_cert"])
def test_certificates_towards_an_api_without_tls_are_refused(authority: Authority, name: str) -> None:
    certificate, key = authority.issue()
    given = {"remote_ca": authority.file} if name == "remote_ca" else {"remote_cert": certificate, "remote_key": key}
    settings = Settings(**{field: str(path) for field, path in given.items()})  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"http://localhost/batch, which is not called over TLS") as raised:
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
    tls = of_remote("", *authority.issue()).current
    assert tls.authorities is None
    assert tls.context.verify_mode == ssl.CERT_REQUIRED


def test_the_authority_alone_may_change(tmp_path: Path, authority: Authority) -> None:
    other = Authority(tmp_path, "other")

    async def main() -> None:
        found = of_remote(authority.file)
        authority.file.write_bytes(authority.file.read_bytes() + other.file.read_bytes())
        await found.reread()
        assert found.current.context.cert_store_stats()["x509_ca"] == 2
        assert found.current.certificate is None

    with structlog.testing.capture_logs() as lines:
        asyncio.run(main())
    assert [line["event"] for line in lines] == ["certificates for the remote API read"] * 2

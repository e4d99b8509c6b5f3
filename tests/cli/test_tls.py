"""Commands that connect over TLS: `headway status`, `headway bench`, and start-up with unusable certificates."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.runtime.certificates import Certificates
from headway.runtime.counters import TlsCounts
from tests.authority import Authority
from tests.cli.command import code_of
from tests.cli.test_operate import Running


class Files:
    """Certificates of a service and a client, and the URL of an admin port that requires client certificates."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.service = self.authority.issue()
        self.client = self.authority.issue("client")
        self.stranger = Authority(folder, "other").issue("stranger")
        self.url = ""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    found = Files(tmp_path)
    certificate, key = map(str, found.service)
    with Running(Certificates(certificate, key, str(found.authority.file), TlsCounts())) as running:
        found.url = running.url
        yield found


def flags(ca: Path, shown: tuple[Path, Path] | None = None) -> list[str]:
    own = [] if shown is None else ["--cert", str(shown[0]), "--cert-key", str(shown[1])]
    return ["--ca", str(ca), *own]


def test_status_shows_a_certificate(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    trusted = flags(files.authority.file, files.client)
    assert code_of(["status", "--admin", files.url, *trusted]) == 0
    assert capsys.readouterr().out.startswith("status        ok\n")
    assert code_of(["dlq", "list", "--admin", files.url, *trusted]) == 0
    assert code_of(["top", "--once", "--admin", files.url, *trusted]) == 0


def test_status_takes_the_files_of_the_environment(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("CA", files.authority.file), ("CERT", files.client[0]), ("CERT_KEY", files.client[1])):
        monkeypatch.setenv(f"HEADWAY_{name}", str(file))
    assert code_of(["status", "--admin", files.url]) == 0
    monkeypatch.delenv("HEADWAY_CA")
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority.file))
    assert code_of(["status", "--admin", files.url]) == 0


def test_status_says_what_is_wrong_with_the_certificates(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    for given, told in (
        (["--cert", str(files.client[0]), "--cert-key", str(files.client[1])], "certificate is not trusted"),
        (flags(files.authority.file), "requires a client certificate. Name one with --cert"),
        (flags(files.authority.file, files.stranger), "does not accept the client certificate"),
    ):
        assert code_of(["status", "--admin", files.url, *given]) == 1
        assert told in capsys.readouterr().err


def test_unusable_files_are_bad_settings(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("hello")
    encrypted = files.authority.issue("encrypted", password=b"secret")
    for given, told in (
        (["--ca", str(tmp_path / "no")], "--ca = "),
        (["--ca", str(wrong)], "--ca = "),
        (["--cert", str(files.client[0])], "--cert = "),
        (["--cert-key", str(files.client[1])], "--cert-key = "),
        (flags(files.authority.file, (files.client[0], files.service[1])), "key values mismatch"),
        (flags(files.authority.file, encrypted), "is encrypted"),
    ):
        assert code_of(["status", "--admin", "https://127.0.0.1:1", *given]) == 3
        assert told in capsys.readouterr().err


def test_bench_asks_over_tls(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--rate", "50", "--duration", "0.2", "--quiet"]
    assert code_of(["bench", f"{files.url}/livez", *load, *flags(files.authority.file)]) == 1
    assert "certificate" in capsys.readouterr().err
    assert code_of(["bench", files.url + "/livez", *load, *flags(files.authority.file, files.client)]) == 1
    assert "405" in capsys.readouterr().out  # An answer over TLS: that route doesn't accept POST.

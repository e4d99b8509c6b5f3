"""Commands without --admin: they ask the process that their environment describes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cli.trust import described
from headway.errors import SettingError
from tests.authority import Authority
from tests.cli.command import code_of
from tests.cli.test_operate import Running, service
from tests.cli.test_tls import Files, files

__all__ = ["files", "service"]


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "http://127.0.0.1:9000"),
        ({"HEADWAY_ADMIN_PORT": "9100"}, "http://127.0.0.1:9100"),
        ({"HEADWAY_ADMIN_HOST": "0.0.0.0", "HEADWAY_ADMIN_PORT": ""}, "http://127.0.0.1:9000"),
        ({"HEADWAY_ADMIN_HOST": "::"}, "http://[::1]:9000"),
        ({"HEADWAY_ADMIN_HOST": "[fd00::7]"}, "http://[fd00::7]:9000"),
        ({"HEADWAY_ADMIN_HOST": "10.0.0.5"}, "http://10.0.0.5:9000"),
        ({"HEADWAY_ADMIN_HOST": "localhost", "HEADWAY_TLS_CERT": "a.pem"}, "https://localhost:9000"),
    ],
)
def test_the_address_is_that_of_the_environment(environ: dict[str, str], url: str) -> None:
    assert described(environ) == (url, environ.get("HEADWAY_TLS_CERT", ""))


def test_the_environment_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "headway.toml"
    file.write_text('admin_port = 9100\ntls_cert = "a.pem"\n[models.m]\n')
    assert described({"HEADWAY_CONFIG": str(file)}) == ("https://127.0.0.1:9100", "a.pem")
    monkeypatch.chdir(tmp_path)
    assert described({}).url == "https://127.0.0.1:9100"
    assert described({"HEADWAY_CONFIG": str(file), "HEADWAY_ADMIN_PORT": "9200"}).url == "https://127.0.0.1:9200"


@pytest.mark.parametrize("port", ["0", "70000", "http", "-1"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(SettingError, match="--admin"):
        described({"HEADWAY_ADMIN_PORT": port})


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "headway.toml"
    broken.write_text("admin_port =")
    for file in (broken, tmp_path / "none.toml"):
        with pytest.raises(SettingError, match="HEADWAY_CONFIG"):
            described({"HEADWAY_CONFIG": str(file)})


def test_a_headway_toml_that_is_no_file_is_not_overlooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert described({}).url == "http://127.0.0.1:9000"
    file = tmp_path / "headway.toml"
    file.mkdir()
    with pytest.raises(SettingError, match=r"headway\.toml"):
        described({})
    file.rmdir()
    file.symlink_to("nowhere")
    with pytest.raises(SettingError, match=r"headway\.toml"):
        described({})


def test_commands_ask_the_port_of_the_environment(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_ADMIN")
    monkeypatch.setenv("HEADWAY_ADMIN_HOST", "0.0.0.0")
    monkeypatch.setenv("HEADWAY_ADMIN_PORT", service.url.rpartition(":")[2])
    for command in (["status"], ["top", "--once"], ["dlq", "list"]):
        assert code_of(command) == 0


def test_commands_trust_exactly_the_certificate_of_their_own_process(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_ADMIN_PORT", files.url.rpartition(":")[2])
    monkeypatch.setenv("HEADWAY_CERT", str(files.client[0]))
    monkeypatch.setenv("HEADWAY_CERT_KEY", str(files.client[1]))
    chain = tmp_path / "chain.pem"
    chain.write_bytes(files.service[0].read_bytes() + files.authority.file.read_bytes())
    for certificate in (files.service[0], chain):
        monkeypatch.setenv("HEADWAY_TLS_CERT", str(certificate))
        assert code_of(["status"]) == 0
    other = files.authority.issue("other-service")[0]
    other.write_bytes(other.read_bytes() + files.authority.file.read_bytes())  # Whom its authority trusts is no matter.
    monkeypatch.setenv("HEADWAY_TLS_CERT", str(other))
    capsys.readouterr()
    assert code_of(["status"]) == 1
    assert "certificate is not trusted" in capsys.readouterr().err
    monkeypatch.setenv("HEADWAY_CA", str(files.authority.file))
    assert code_of(["status"]) == 0
    monkeypatch.setenv("HEADWAY_CA", str(Authority(tmp_path, "stranger").file))
    assert code_of(["status"]) == 1
    for file in (tmp_path / "none.pem", files.service[1]):
        monkeypatch.delenv("HEADWAY_CA", raising=False)
        monkeypatch.setenv("HEADWAY_TLS_CERT", str(file))
        assert code_of(["status"]) == 3

"""Headway in front of another Headway whose ports ask for certificates of clients."""

from __future__ import annotations

from pathlib import Path

import pytest

import headway
from headway.app.serving import BackgroundService
from headway.client import ApiError
from headway.config import Settings
from headway.config.target import ObservedTarget, RemoteTarget
from headway.model import Role
from headway.runtime.certificates import RemoteCertificates
from tests.authority import Authority


def _upper(inputs: list[str]) -> list[str]:
    return [text.upper() for text in inputs]


def test_a_certificate_that_has_become_bad_is_nobodys_fault_and_can_be_mended(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    certificate, key = map(str, authority.issue("behind"))
    shown, trusted = authority.issue("front"), str(authority.file)
    inner = Settings(port=0, admin_port=0, model="inner", tls_cert=certificate, tls_key=key, tls_client_ca=trusted)
    remote = {"remote_ca": trusted, "remote_cert": str(shown[0]), "remote_key": str(shown[1])}
    outer = Settings(port=0, admin_port=0, remote_model="inner", workers=2, **remote)  # type: ignore[arg-type]
    with (
        BackgroundService(inner, Role.SERVE, ObservedTarget(_upper, [])) as behind,
        BackgroundService(outer, Role.SERVE, RemoteTarget(f"{behind.url}/v1/completions")) as front,
        headway.Client(front.url, retries=0) as client,
    ):
        [certificates] = (one for one in front.process.service._resources if isinstance(one, RemoteCertificates))
        assert client.infer("a").output == "A"
        for path, new in zip(shown, other.issue("stranger"), strict=True):
            path.write_bytes(new.read_bytes())
        front.call(certificates.reread())
        with pytest.raises(ApiError) as raised:
            client.infer("b")
        assert raised.value.status in (502, 503, 504)  # 502 where it is not certain that no request has left.
        authority.issue("front")
        front.call(certificates.reread())
        while True:
            try:
                assert client.infer("c").output == "C"
                break
            except ApiError as exc:  # The breaker may rest yet.
                assert exc.status in (502, 503, 504)

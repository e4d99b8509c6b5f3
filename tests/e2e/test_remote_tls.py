"""Headway in front of another Headway whose ports ask for certificates of clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import headway
from headway.app.background import BackgroundService
from headway.client import ApiError
from headway.config import Settings
from headway.config.target import ObservedTarget, RemoteTarget
from headway.model import Role
from headway.runtime.certificates import RemoteCertificates
from tests.authority import Authority


def _upper(inputs: list[str]) -> list[str]:
    return [text.upper() for text in inputs]


class Chain:
    """Certificates of the service behind, and those that the one in front shows."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.other = Authority(folder), Authority(folder, "other")
        certificate, key = self.authority.issue("behind")
        self.shown = self.authority.issue("front")
        self.behind = BackgroundService(
            Settings(
                port=0,
                admin_port=0,
                model="inner",
                tls_cert=str(certificate),
                tls_key=str(key),
                tls_client_ca=str(self.authority.file),
            ),
            Role.SERVE,
            ObservedTarget(_upper, []),
        )

    def front(self, **changes: str) -> BackgroundService:
        """Service in front of the other one."""
        given = {
            "remote_ca": str(self.authority.file),
            "remote_cert": str(self.shown[0]),
            "remote_key": str(self.shown[1]),
            **changes,
        }
        settings = Settings(port=0, admin_port=0, remote_model="inner", workers=2, **given)  # type: ignore[arg-type]
        return BackgroundService(settings, Role.SERVE, RemoteTarget(f"{self.behind.url}/v1/completions"))

    def reread(self, front: BackgroundService) -> None:
        """Have the one in front read its certificates now."""
        [found] = (one for one in front.process.service._resources if isinstance(one, RemoteCertificates))
        front.call(found.reread())


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    made = Chain(tmp_path)
    with made.behind:
        yield made


def test_a_certificate_that_has_become_bad_is_nobodys_fault_and_can_be_mended(chain: Chain) -> None:
    with chain.front() as front, headway.Client(front.url, retries=0) as client:
        assert client.infer("a").output == "A"
        for path, new in zip(chain.shown, chain.other.issue("stranger"), strict=True):
            path.write_bytes(new.read_bytes())
        chain.reread(front)
        with pytest.raises(ApiError) as raised:
            client.infer("b")
        assert raised.value.status in (502, 503, 504)  # 502 where it is not certain that no request has left.
        chain.authority.issue("front")
        chain.reread(front)
        while True:
            try:
                assert client.infer("c").output == "C"
                break
            except ApiError as exc:  # The breaker may rest yet.
                assert exc.status in (502, 503, 504)

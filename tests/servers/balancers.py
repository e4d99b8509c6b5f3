"""Envoy, HAProxy or nginx in front of gateways, as a child process with its file from `deploy/`.

    with Balancer("nginx", tmp_path / "nginx", gateways, certificates) as balancer:
        balancer.port

HAProxy and nginx come from the distribution, Envoy from `make clients`. Without one a test is skipped, or fails.
"""

import signal
from collections.abc import Sequence
from pathlib import Path

from bench.stand import proxies
from bench.stand.proxies import Behind, Certificates
from tests.clients import environments
from tests.servers.child import ChildServer
from tests.servers.redis import lacking


class Balancer(ChildServer):
    """Envoy, HAProxy or nginx in front of two gateways. `idle`: seconds that a connection to a gateway may be idle."""

    ends_by = signal.SIGTERM

    def __init__(
        self,
        kind: str,
        folder: Path,
        gateways: Sequence[Behind],
        certificates: Certificates,
        *,
        mutual: bool = False,
        idle: float | None = None,
    ) -> None:
        if kind == "envoy":
            environments.need("deploy")
        elif not proxies.program(kind):
            lacking(f"{kind} is not on the path; on Debian and Ubuntu: apt-get install {kind}")
        super().__init__(folder)
        self.kind = kind
        self.certificates = certificates
        self.argv = proxies.command(kind, folder, self.port, gateways, certificates, mutual=mutual, idle=idle)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        return proxies.listens(self.port)

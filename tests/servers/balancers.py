"""Envoy, HAProxy or nginx in front of gateways, as a child process with its file of `deploy/`.

    with Balancer("nginx", tmp_path / "nginx", gateways, certificates) as balancer:
        balancer.port

HAProxy and nginx are the distribution's, Envoy comes with `make clients`. Without one a test is skipped, or fails where none may
be missing.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from bench.stand import proxies
from bench.stand.proxies import Behind, Certificates
from tests.clients import environments
from tests.e2e.client import PATIENCE, wait_until
from tests.servers.ports import Port
from tests.servers.reaper import the_reaper
from tests.servers.redis import lacking


class Balancer:
    """Envoy, HAProxy or nginx before two gateways; `with` starts it and ends it. `idle`: seconds for which a connection to a
    gateway may be idle."""

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
        folder.mkdir(parents=True, exist_ok=True)
        self.kind = kind
        self._port = Port()
        self.port = self._port.number
        self.certificates = certificates
        self._command = proxies.command(kind, folder, self.port, gateways, certificates, mutual=mutual, idle=idle)
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            process = self._process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        the_reaper().watch(process.pid)
        wait_until(lambda: proxies.listens(self.port) or process.poll() is not None)
        assert process.poll() is None, self.log
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE)
            finally:
                self._process.kill()
                self._process.wait()
                the_reaper().forget(self._process.pid)
        self._port.close()

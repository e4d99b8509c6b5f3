"""Envoy, HAProxy and nginx in front of gateways, each with its file of `deploy/`. Only addresses, ports, paths and the need for client
certificates are changed."""

import re
import shutil
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.stand import programs, stand
from tests.authority import Authority
from tests.clients import environments

FILES = {
    "envoy": stand.ROOT / "deploy" / "envoy" / "envoy.yaml",
    "haproxy": stand.ROOT / "deploy" / "haproxy" / "haproxy.cfg",
    "nginx": stand.ROOT / "deploy" / "nginx" / "nginx.conf",
}
KINDS = tuple(FILES)
IDLE = {"envoy": "idle_timeout: 4s", "haproxy": "pool-purge-delay 1s", "nginx": "keepalive_timeout 4s"}
"""Each file's setting for how long a connection to a gateway may be idle."""
MTLS = re.compile(r"# mTLS: ")
"""Marks lines for clients that have to show certificates."""


class Behind(NamedTuple):
    http: int
    grpc: int


class Certificates:
    """A proxy's certificates and its clients', in a folder, named as in `deploy/`.

    Attributes:
        trusted: file by which clients verify the proxy.
        client: certificate and key of a client.
    """

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder)
        certificate, _ = authority.issue()  # Its key is service.key.
        self.folder = folder
        self.trusted = authority.file
        self.client = authority.issue("client")
        shutil.copy(certificate, folder / "service.crt")
        shutil.copy(authority.file, folder / "clients.crt")

    def context(self, *protocols: str, known: bool = False) -> ssl.SSLContext:
        """Return the context of a client that offers these protocols, and shows a certificate if it is `known`."""
        made = ssl.create_default_context(cafile=str(self.trusted))
        made.set_alpn_protocols(list(protocols))
        if known:
            made.load_cert_chain(*self.client)
        return made


def program(kind: str) -> str:
    """Return the path of a proxy's program, or an empty string if it isn't installed."""
    if kind == "envoy":
        return environments.program("deploy", "envoy")
    return programs.found(kind)


def command(
    kind: str,
    folder: Path,
    port: int,
    gateways: Sequence[Behind],
    certificates: Certificates,
    *,
    mutual: bool = False,
    idle: float | None = None,
) -> list[str]:
    """Write a proxy's file, and return the command that runs it.

    `mutual`: clients have to show a certificate. `idle`: seconds after which a connection to one of the two gateways is closed as idle.
    """
    text = FILES[kind].read_text(encoding="utf-8")
    lines = text.splitlines()
    for number, gateway in enumerate(gateways, 1):
        lines = [_at(line, f"10.0.0.{number}", gateway) for line in lines]
    text = "\n".join(lines) + "\n"
    if mutual:
        text = MTLS.sub("", text)
    if idle is not None:
        span = f"{idle:g}s" if kind == "envoy" else f"{idle * 1000:.0f}ms"
        text = text.replace(IDLE[kind], f"{IDLE[kind].rpartition(' ')[0]} {span}")
    text = text.replace("/etc/headway/tls", str(certificates.folder))
    path = folder / FILES[kind].name
    match kind:
        case "haproxy":
            text = text.replace("bind :443", f"bind 127.0.0.1:{port}").replace("maxconn 16384", "maxconn 4096")
            made = ["-db", "-f", str(path)]
        case "nginx":
            text = _nginx(text.replace("listen 443", f"listen 127.0.0.1:{port}"), folder)
            made = ["-c", str(path), "-e", "stderr"]
        case _:
            text = text.replace("address: 0.0.0.0, port_value: 443", f"address: 127.0.0.1, port_value: {port}")
            text = text.replace("port_value: 9901", "port_value: 0")
            made = ["-c", str(path), "--disable-hot-restart", "--concurrency", "2", "--log-level", "warning"]
    path.write_text(text, encoding="utf-8")
    return [program(kind), *made]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _at(line: str, address: str, gateway: Behind) -> str:
    if address not in line:
        return line
    return line.replace(address, "127.0.0.1").replace("8000", str(gateway.http)).replace("8081", str(gateway.grpc))


def _nginx(text: str, folder: Path) -> str:
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"    {name}_temp_path {folder}/{name};\n" for name in names)
    text = text.replace("http {\n", f"http {{\n{temporary}", 1).replace("/var/log/nginx", str(folder))
    text = re.sub(r"^error_log .*$", "error_log stderr warn;", text, flags=re.MULTILINE)
    text = re.sub(r"^pid .*$", f"pid {folder}/nginx.pid;\ndaemon off;", text, flags=re.MULTILINE)
    return ("user root;\n" if folder.owner() == "root" else "") + text

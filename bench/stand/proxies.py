"""nginx and HAProxy in front of gateways, set up as the documents say: their blocks are read from there, and nothing but
addresses and ports is changed."""

from __future__ import annotations

import re
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from bench.stand import stand
from bench.stand.stand import Broken, Server

DOCS = stand.ROOT / "docs"
KINDS = ("haproxy", "nginx")


class Proxy:
    """One of them; use it as a context manager.

    Arguments:
        kind: one of KINDS.
        ports: of the gateways, on 127.0.0.1.

    Attributes:
        url: of its port.
    """

    def __init__(self, kind: str, ports: Sequence[int]) -> None:
        if shutil.which(kind) is None:
            raise Broken(f"{kind} is not installed. On Debian and Ubuntu: apt-get install {kind}")
        self._kind = kind
        self._port = stand.free_port()
        self._folder = tempfile.TemporaryDirectory(prefix=f"headway-{kind}-")
        self.url = f"http://127.0.0.1:{self._port}"
        path = Path(self._folder.name) / "proxy.conf"
        text = _haproxy(self._port, ports) if kind == "haproxy" else _nginx(self._port, ports, path.parent)
        path.write_text(text, encoding="utf-8")
        self._command = ["haproxy", "-db", "-f", str(path)] if kind == "haproxy" else ["nginx", "-c", str(path)]

    def __enter__(self) -> Self:
        self._server = Server(f"drills-{self._kind}", self._command, lambda _: self._kind)
        self._server.wait_for(self._listens)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._folder.cleanup()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0


def block(page: str, first: str) -> str:
    """The block of a page that has a line which begins so.

    Raises:
        Broken: there is none.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    for found in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if re.search(f"^ *{first}", found, re.MULTILINE):
            return str(found)
    raise Broken(f"docs/{page} has no block with a line {first!r}")


def _haproxy(port: int, gateways: Sequence[int]) -> str:
    text = block("fleet.md", "defaults")
    text = re.sub(r"^( *bind ).*$", rf"\g<1>127.0.0.1:{port}", text, flags=re.MULTILINE)
    servers = "\n".join(f"    server gateway-{number} 127.0.0.1:{one}" for number, one in enumerate(gateways, 1))
    return re.sub(r"(^ *server gateway-\d .*\n?)+", servers + "\n", text, flags=re.MULTILINE)


def _nginx(port: int, gateways: Sequence[int], folder: Path) -> str:
    text = block("operations.md", "upstream headway")
    text = re.sub(r"listen \d+;", f"listen 127.0.0.1:{port};", text)
    options = re.search(r"^ *server 127\.0\.0\.1:\d+([^;]*);", text, re.MULTILINE)
    servers = "\n".join(f"    server 127.0.0.1:{one}{options[1] if options else ''};" for one in gateways)
    text = re.sub(r"(^ *server 127\.0\.0\.1:\d+.*\n)+", servers + "\n", text, flags=re.MULTILINE)
    temporary = "\n".join(
        f"    {name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if folder.owner() == "root" else ""
    return (
        f"{user}worker_processes 1;\ndaemon off;\npid {folder}/nginx.pid;\nerror_log stderr warn;\n"
        f"events {{ worker_connections 4096; }}\nhttp {{\n    access_log off;\n{temporary}\n{text}\n}}\n"
    )

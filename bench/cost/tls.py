"""What TLS costs the server: CPU for each request and connection, memory for each connection, and a flood of half handshakes.

    python bench/cost/tls.py                    about a minute
    python bench/cost/tls.py --flood 10000      with more half handshakes at once

Three servers of the same function: without TLS, with it, and with certificates of clients. Requests go over one connection after the
other was opened and kept, as clients keep them; a flood opens connections and sends no more than their first message.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.stand import Server
from tests.authority import Authority

ROUNDS = 3
CONNECTIONS = 500
EIGHT = 8
"""Connections over which requests are sent at once."""
REQUEST = b'POST /v1/inference HTTP/1.1\r\nHost: a\r\nContent-Length: 24\r\n\r\n{"input": "hello world"}'

Connect = Callable[[Server], socket.socket]


def main() -> int:
    parser = argparse.ArgumentParser(description="What TLS costs the server.")
    parser.add_argument("--times", type=int, default=1000, help="that eight requests are sent (default %(default)s)")
    parser.add_argument("--flood", type=int, default=2000, help="half handshakes at once (default %(default)s)")
    options = parser.parse_args()
    stand.end_in_order()
    stand.pin_to_load_core()
    findings = Findings("tls", times=options.times, flood=options.flood)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name, contextlib.ExitStack() as stack:
        kinds = _kinds(Authority(Path(name)))
        servers = {
            kind: stack.enter_context(
                stand.headway(f"{stand.TARGETS}:upper", "--log-level", "error", *flags, name=f"tls-{number}")
            )
            for number, (kind, (flags, _)) in enumerate(kinds.items())
        }
        rows = []
        for kind, (_, connect) in kinds.items():
            cpu, memory = _open(servers[kind], connect)
            asked = min(_ask(servers[kind], connect, options.times)[0] for _ in range(ROUNDS))
            rows.append({
                "": kind, "CPU µs a request": asked, "CPU µs a connection and its first request": cpu,
                "kB an open connection": memory,
            })  # fmt: skip
        findings.table("cost for the server", rows)
        server, connect = servers["TLS"], kinds["TLS"][1]
        _, calm = _ask(server, connect, options.times)
        with _half_open(server, options.flood):
            _, beside = _ask(server, connect, options.times)
        findings.table("what others see of a flood", [
            {"": "calm", "P95 ms of eight": calm},
            {"": f"beside {options.flood} half handshakes", "P95 ms of eight": beside},
        ])  # fmt: skip
    return findings.close()


def _kinds(authority: Authority) -> dict[str, tuple[list[str], Connect]]:
    """Flags of each kind of server, and how a client connects to it."""
    certificate, key = map(str, authority.issue())
    flags = ["--tls-cert", certificate, "--tls-key", key]
    trusting, known = (ssl.create_default_context(cafile=str(authority.file)) for _ in range(2))
    known.load_cert_chain(*authority.issue("client"))

    def over(context: ssl.SSLContext) -> Connect:
        return lambda server: context.wrap_socket(_connected(server), server_hostname="localhost")

    return {
        "plain": ([], _connected),
        "TLS": (flags, over(trusting)),
        "mutual TLS": ([*flags, "--tls-client-ca", str(authority.file)], over(known)),
    }


def _connected(server: Server) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0), timeout=60)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _round(connections: list[socket.socket]) -> None:
    """Send a request over each, and take the answers."""
    for one in connections:
        one.sendall(REQUEST)
    for one in connections:
        if not one.recv(65536).startswith(b"HTTP/1.1 200"):
            raise stand.Broken("a request was not answered")


def _ask(server: Server, connect: Connect, times: int) -> tuple[float, float]:
    """CPU time of the server in µs for each request, and the 95th percentile of eight requests at once, in ms."""
    with contextlib.ExitStack() as held:
        connections = [held.enter_context(connect(server)) for _ in range(EIGHT)]
        _round(connections)
        took, before = [], server.usage()["front"]
        for _ in range(times):
            began = time.monotonic()
            _round(connections)
            took.append(time.monotonic() - began)
        used = server.usage()["front"] - before
    return used / (times * EIGHT) * 1e6, sorted(took)[len(took) * 95 // 100] * 1000


def _open(server: Server, connect: Connect) -> tuple[float, float]:
    """CPU time of the server in µs for each connection with one request, and its memory in kB."""
    memory, before = server.rss()["front"], server.usage()["front"]
    with contextlib.ExitStack() as held:
        for _ in range(CONNECTIONS):
            _round([held.enter_context(connect(server))])
        used, more = server.usage()["front"] - before, server.rss()["front"] - memory
    return used / CONNECTIONS * 1e6, more / CONNECTIONS / 1000


@contextlib.contextmanager
def _half_open(server: Server, count: int) -> Iterator[None]:
    """Connections of which each has sent the beginning of a handshake."""
    context, incoming, outgoing = ssl.create_default_context(), ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    hello = outgoing.read()
    with contextlib.ExitStack() as held:
        for _ in range(count):
            held.enter_context(_connected(server)).sendall(hello)
        yield


if __name__ == "__main__":
    sys.exit(main())

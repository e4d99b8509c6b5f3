"""What TLS costs the server: CPU for each request and handshake, memory for each connection, and a flood of half handshakes.

    python bench/cost/tls.py                    about a minute
    python bench/cost/tls.py --flood 10000      with more half handshakes at once

One process serves the same target three times: without TLS, with it, and with certificates of clients. Requests come from
processes of their own, so that the CPU time of this one is the servers'. Connections are kept, as clients keep them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import headway
from bench.stand import processes, stand
from bench.stand.findings import Findings
from headway.app.background import BackgroundService
from tests.authority import Authority

ROUNDS = 3
CONNECTIONS = 500

_CLIENT = """
import socket, ssl, sys, time
port, count, what, ca, certificate, key = sys.argv[1:]
context = ssl.create_default_context(cafile=ca or None)
if certificate:
    context.load_cert_chain(certificate, key)

def connected():
    sock = socket.create_connection(("127.0.0.1", int(port)))
    sock.settimeout(60)
    return context.wrap_socket(sock, server_hostname="localhost") if ca else sock

def hello():
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()

def ask(socks):
    for sock in socks:
        sock.sendall(b'POST /v1/inference HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 24\\r\\n\\r\\n{"input": "hello world"}')
    for sock in socks:
        if not sock.recv(65536).startswith(b"HTTP/1.1 200"):
            raise SystemExit("no answer")

if what == "ask":
    socks, took = [connected() for _ in range(8)], []
    ask(socks)
    print("open", flush=True)
    sys.stdin.readline()
    for _ in range(int(count)):
        began = time.monotonic()
        ask(socks)
        took.append(time.monotonic() - began)
    print(sorted(took)[len(took) * 95 // 100] * 1000, flush=True)
    sys.stdin.readline()
else:
    kept = []
    for _ in range(int(count)):
        if what == "half":
            sock = socket.create_connection(("127.0.0.1", int(port)))
            sock.sendall(hello())
        else:
            sock = connected()
            ask([sock])
        kept.append(sock)
    print("open", flush=True)
    sys.stdin.readline()
"""
"""Client that asks over eight connections, or opens many, whole or up to their first message, and keeps them.

It goes on, and ends, when it hears a line.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="What TLS costs the server.")
    parser.add_argument(
        "--times", type=int, default=250, help="times that eight requests are sent (default %(default)s)"
    )
    parser.add_argument("--flood", type=int, default=2000, help="half handshakes at once (default %(default)s)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("tls", times=options.times, flood=options.flood)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder, contextlib.ExitStack() as stack:
        authority = Authority(Path(folder))
        service, client, ca = authority.issue(), authority.issue("client"), str(authority.file)
        tls: dict[str, str] = {"tls_cert": str(service[0]), "tls_key": str(service[1])}
        files = {"plain": ("", "", ""), "TLS": (ca, "", ""), "mutual TLS": (ca, *map(str, client))}
        more: dict[str, dict[str, str]] = {"plain": {}, "TLS": tls, "mutual TLS": {**tls, "tls_client_ca": ca}}
        target = f"{stand.TARGETS}:upper"
        servers = {
            kind: stack.enter_context(headway.serve(target, block=False, port=0, log_level="error", **given))
            for kind, given in more.items()
        }
        asked = {kind: [_ask(servers[kind], files[kind], options.times) for _ in range(ROUNDS)] for kind in files}
        rows = []
        for kind, found in asked.items():
            cpu, memory = _open(servers[kind], files[kind])
            rows.append({
                "": kind,
                "CPU µs a request": min(used for used, _ in found),
                "CPU µs a connection and its first request": cpu,
                "kB an open connection": memory,
            })  # fmt: skip
        findings.table("cost for the server", rows)
        calm = min(p95 for _, p95 in asked["TLS"])
        with _client(servers["TLS"], files["TLS"], options.flood, "half"):
            _, beside = _ask(servers["TLS"], files["TLS"], options.times)
        rows = [
            {"": "calm", "P95 ms of eight": calm},
            {"": f"beside {options.flood} half handshakes", "P95 ms of eight": beside},
        ]
        findings.table("what others see of a flood", rows)
    return findings.close()


def _ask(server: BackgroundService, files: Sequence[str], times: int) -> tuple[float, float]:
    """CPU time of the server in µs for each request, and the 95th percentile of eight requests at once, in ms."""
    with _client(server, files, times, "ask") as client:
        _hear(client)
        before = time.process_time()
        _tell(client)
        p95 = float(_hear(client))
        return (time.process_time() - before) / (times * 8) * 1e6, p95


def _open(server: BackgroundService, files: Sequence[str]) -> tuple[float, float]:
    """CPU time of the server in µs for each connection with one request, and its memory in kB."""
    memory, before = _memory(), time.process_time()
    with _client(server, files, CONNECTIONS, "whole") as client:
        _hear(client)
        return (time.process_time() - before) / CONNECTIONS * 1e6, (_memory() - memory) / CONNECTIONS / 1000


@contextlib.contextmanager
def _client(
    server: BackgroundService, files: Sequence[str], count: int, what: str
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", _CLIENT, str(urlsplit(server.url).port), str(count), what, *files]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        try:
            yield client
        finally:
            client.communicate(b"\n")


def _hear(client: subprocess.Popen[bytes]) -> bytes:
    line = client.stdout.readline() if client.stdout is not None else b""
    if not line:
        raise stand.Broken("the client has ended")
    return line


def _tell(client: subprocess.Popen[bytes]) -> None:
    if client.stdin is not None:
        client.stdin.write(b"\n")
        client.stdin.flush()


def _memory() -> int:
    own = processes.look(os.getpid())
    return own.rss if own is not None else 0


if __name__ == "__main__":
    sys.exit(main())

"""Clients use up all descriptors. Excess clients get a 503 or are cut off; operators and workers still have theirs."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.load import http2
from tests.bulk.test_http import BOUNDARY, form
from tests.e2e.client import PATIENCE, Connection, request, wait_until
from tests.e2e.server import ROOT, Server, serving
from tests.identity.writing import entry, key_of
from tests.servers.ports import Port

FEW = 128
BODY = b'{"input": "abc"}'
SOFT, HARD = 256, 512


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))


def fate(connection: Connection) -> str:
    """Return what happened to a client, which stays connected: `200`, `503`, or `cut`."""
    try:
        with contextlib.suppress(ConnectionError):  # It may already have been answered and closed.
            connection.send(request(BODY))
        return str(connection.answer().status)
    except ConnectionError:
        return "cut"


def served_again(server: Server) -> bool:
    connection = server.connect()
    try:
        return fate(connection) == "200"
    finally:
        connection.close()


@contextmanager
def limited(server: Server, limit: int) -> Iterator[None]:
    """Lower the running service's limit on descriptors."""
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, hard))
    yield
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_clients_beyond_the_descriptors_are_told_so_and_operators_and_workers_have_theirs(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2", before=few_descriptors, lawful=False) as server:
        server.expected = {"worker process ended"}
        inside, at_rest = server.ask("before"), server.descriptors()
        inside.output()
        # Refused clients are soon cut off, which makes room, so all must have connected by then.
        connections = [server.connect() for _ in range(2 * FEW)]
        fates = Counter(map(fate, connections))
        assert set(fates) == {"200", "503"}
        assert fates["200"] <= FEW
        assert server.metrics().value("refusals_total", reason="service_overloaded") == fates["503"]
        victim = server.workers()[0]["pid"]
        os.kill(victim, signal.SIGKILL)
        server.logged("worker process ended", pid=victim)
        server.all_healthy()
        server.ask("during", on=inside.connection).output()
        for connection in connections:
            connection.close()
        wait_until(lambda: server.descriptors() <= at_rest + 1)
        assert served_again(server)


def test_who_comes_when_there_is_no_descriptor_is_cut_off_or_waits_and_who_is_in_is_served_on(tmp_path: Path) -> None:
    with serving(tmp_path, lawful=False) as server:
        inside = server.ask("inside")
        inside.output()
        most = max(int(entry.name) for entry in Path(f"/proc/{server.process.pid}/fd").iterdir())
        with limited(server, most + 1):  # The last one is used for something else.
            fates = {fate(server.connect()) for _ in range(20)}
            assert "cut" in fates and fates <= {"200", "503", "cut"}
            server.ask("still inside", on=inside.connection).output()
        wait_until(lambda: served_again(server))
        with limited(server, 4):
            waiting = [server.connect() for _ in range(5)]
            for connection in waiting:
                connection.send(request(BODY))
            server.ask("inside to the end", on=inside.connection).output()
        assert [connection.answer().status for connection in waiting] == [200] * 5


@pytest.mark.parametrize("limit", [24, 70])
def test_a_limit_too_low_to_serve_anybody_is_told_with_what_is_needed(tmp_path: Path, limit: int) -> None:
    (tmp_path / "target.py").write_text("def echo(inputs: list[str]) -> list[str]:\n    return inputs\n")
    command = [sys.executable, "-m", "headway", "serve", "target.py:echo", "--port", "0", "--admin-port", "0"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(limit), *command],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert f"headway: ulimit -n = {limit}: 71 open files are needed" in done.stderr
    assert "LimitNOFILE=" in done.stderr and "Traceback" not in done.stderr


def low_soft_limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))


def crowd(server: Server, authorization: str, file: str, each: int) -> list[Connection]:
    """Open `each` downloads that are not read, stalled uploads, gRPC streams, and idle connections."""
    metadata = [("authorization", authorization.partition(": ")[2])]
    stream = http2.headers(0, "/inference.GRPCInferenceService/ModelStreamInfer", metadata)
    kind = f"content-type: multipart/form-data; boundary={BOUNDARY}"
    upload = request(form(b"a" * 1000), "/v1/files", authorization, kind)
    ways = (
        (server.port, request(b"", f"/v1/files/{file}/content", authorization, method="GET")),
        (server.port, upload[:-100]),
        (server.grpc_port, http2.hello() + stream),
        (server.port, request(b"", "/v1/models", authorization, method="GET")),
    )
    found = []
    for _ in range(each):
        for port, sent in ways:
            with contextlib.suppress(ConnectionError):
                found.append(Connection(port))
                found[-1].send(sent)
    return found


def test_what_one_tenant_holds_open_keeps_no_other_out(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(
        "".join(entry(name, tenant=name, more="rate = 0") for name in ("acme", "globex"))
    )
    acme, globex = (f"authorization: Bearer {key_of(name)}" for name in ("acme", "globex"))
    with (
        contextlib.closing(Port()) as port,
        serving(
            tmp_path, "--keys", "keys.toml", "--bulk-dir", "bulk", "--grpc-port", str(port.number),
            before=low_soft_limit, lawful=False,
        ) as server,
    ):  # fmt: skip
        assert (
            f"files    {HARD} descriptors, too few for 10000 connections (--max-connections), which need 10256"
            in server.banner()
        )
        first = server.connect()
        kind = f"content-type: multipart/form-data; boundary={BOUNDARY}"
        first.send(request(form(b"a" * 100_000 * 40), "/v1/files", acme, kind))
        file = first.answer().json["id"]
        held = crowd(server, acme, file, HARD // 3)
        for _ in range(20):
            other = server.connect()
            other.send(request(BODY, "/v1/inference", globex))
            assert other.answer().status == 200
        assert server.metrics().value("refusals_total", reason="connections") > 0
        for one in held:
            one.close()
        wait_until(lambda: server.descriptors() < HARD // 4)
        assert not server.log("a request failed")

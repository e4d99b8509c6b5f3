"""A gRPC client that shares no code with ours, against a running service with keys."""

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

from tests.clients.environments import client_command
from tests.e2e.client import PATIENCE
from tests.e2e.server import ROOT, Server, launched
from tests.identity.writing import entry, key_of
from tests.servers.ports import Port

TARGET = "tests.clients.targets:answer"
NEVER = "-1"


def test_grpc_js_works_and_no_call_of_its_is_cut_by_a_shutdown(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(entry("client", more="rate = 0") + entry("slow", more="rate = 1\nburst = 1"))
    with (
        contextlib.closing(Port()) as port,
        launched(tmp_path, "--keys", "keys.toml", "--grpc-port", str(port.number), target=TARGET) as server,
    ):
        server.ready()
        keys = key_of("client"), key_of("slow")
        command, environ = client_command(
            "grpc-js", "grpc_js.js", f"127.0.0.1:{port.number}", *keys, str(ROOT / "headway" / "protos")
        )
        told, counts = _run(server, command, environ)
        server.check_end()
    code, pushback = told["refusals"].pop("slow")
    assert code == 8
    assert 0 < int(pushback) <= 60_000
    assert told == {
        "predict": "HELLO",
        "infer": ["q", "01000000410100000042"],
        "health": 1,
        "refusals": {
            "stranger": [16, NEVER],
            "unknown": [5, NEVER],
            "late": [4, None],
            "bad": [3, NEVER],
            "fault": [13, NEVER],
            "large": [8, None],
            "load": [12, NEVER],
        },
    }
    assert set(counts) == {"ok"}


def _run(server: Server, command: list[str], environ: dict[str, str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what the client received, and how its calls ended once the service had stopped."""
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            told = json.loads(client.stdout.readline())
            assert client.stdout.readline() == "enough\n"
            server.signal()
            counts = json.loads(client.stdout.readline())
            assert client.wait(PATIENCE) == 0
            return told, counts
        finally:
            client.kill()

"""Targets of arrays behind the native API: the line to try, dead letters and the ledger, embeddings."""

from __future__ import annotations

import json
import shlex
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import PATIENCE, request, wait_until
from tests.e2e.server import Server, serving
from tests.servers.redis import lacking

SUMS = "tests.targets.arrays:Sums"


def ask(server: Server, value: Any, path: str = "/v1/inference") -> Any:
    connection = server.connect()
    connection.send(request(json.dumps({"input": value}).encode(), path))
    return connection.answer()


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("Sums", [0.0]),
        ("Ranked", {"scores": [0.0], "best": 0}),
    ],
)
def test_the_line_to_try_works_as_it_stands(tmp_path: Path, name: str, output: Any) -> None:
    if shutil.which("curl") is None:
        lacking("curl is not on the path, with which the line asks; on Debian and Ubuntu: apt-get install curl")
    with serving(tmp_path, lawful=False, target=f"tests.targets.arrays:{name}") as server:
        line = server.banner().splitlines()[-1].replace("curl ", "curl -sS ")
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=PATIENCE, check=True)
        told = json.loads(done.stdout)
        assert told["name" if output is None else "output"] == ("default" if output is None else output), shlex.quote(
            line
        )


def test_dead_letters_and_the_ledger_tell_shapes_and_a_replay_runs_the_same_numbers(tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    target = f"{SUMS}({str(obstacle)!r})"
    with serving(
        tmp_path, "--ledger", "sqlite:///ledger.db", "--ledger-content", lawful=False, target=target
    ) as server:
        server.expected = {"batch failed"}
        wait_until(lambda: "TensorInput" in server.get("/openapi.json").json["components"]["schemas"])
        rows = [[0.125, 2, 3, 4], [-8191.5, 0, 0, 0]]
        bad = ask(server, rows)
        assert (bad.status, bad.json["error"]) == (422, "REJECTED_BY_MODEL")
        [letter] = server.letters()
        assert "8191" not in json.dumps(letter)
        whole = server.admin(f"/internal/dlq/{letter['id']}").json
        assert (whole["tensors"], whole["input"]) == ("`INPUT`, FP32 of shape [2, 4]", rows)
        obstacle.unlink()
        again = server.admin(f"/internal/dlq/{letter['id']}/replay", "POST")
        assert (again.status, again.json["output"]) == (200, [[9.125], [-8191.5]])
        status = server.admin(f"/internal/requests/{bad.json['request_id']}").json
        assert status["status"] == "failed"
        nan = ask(server, [99, 0, 0, 0])
        assert (nan.status, nan.json["error"]) == (502, "BACKEND_ERROR")
        assert "NaN" in nan.json["message"]
        assert "8191" not in server.log_text()
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        kept = database.execute("SELECT input, output FROM headway_requests").fetchall()
    assert ("`INPUT`, FP32 of shape [2, 4]", "`OUTPUT`, FP32 of shape [2, 1]") in [
        tuple(str(one).removeprefix("tensors: ") for one in row) for row in kept
    ]
    assert "8191" not in str(kept)

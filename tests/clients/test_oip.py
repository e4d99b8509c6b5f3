"""Clients of the Open Inference Protocol over REST, unchanged, against a running server with keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import run_client
from tests.e2e.server import Server, serving
from tests.identity.writing import entry, key_of

ANSWERED = ["ONE", "ZWÖLF", ""]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "keys.toml").write_text(entry("client", more="rate = 0") + entry("slow", more="rate = 1\nburst = 1"))
    with serving(tmp_path, "--keys", "keys.toml", lawful=False, target="tests.clients.targets:answer") as server:
        server.expected = {"an input was rejected"}
        yield server


def ask(server: Server, environment: str, program: str) -> Any:
    return run_client(environment, program, f"127.0.0.1:{server.port}", key_of("client"), key_of("slow"))


def test_triton_s_client_works_as_it_is(server: Server) -> None:
    told = ask(server, "triton", "triton_http.py")
    assert told["health"] == [True, True, True, True, False]
    assert told["answers"] == [[ANSWERED, [3], None]] * 6
    assert told["column"] == [ANSWERED, [3, 1], "42"]
    assert told["compressed"] == [[ANSWERED, [3], None]] * 2
    assert told["wishes"] == told["version"] == [ANSWERED, [3], None]
    assert told["later"] == ["LATER"]
    assert told["server"]["name"] == "headway"
    assert told["model"]["inputs"] == [{"name": "INPUT", "datatype": "BYTES", "shape": [-1, 1]}]
    assert told["config"]["max_batch_size"] > 0
    assert told["index"] == [{"name": "default", "version": "1", "state": "READY", "reason": ""}]
    [statistics] = told["statistics"]["model_stats"]
    assert statistics["inference_count"] > 30
    assert told["all statistics"] == told["statistics"]
    refusals = {name: (int(status), message) for name, (status, message) in told["refusals"].items()}
    assert refusals.pop("too late")[0] in (429, 503, 504), "by whoever saw first that it cannot be answered in time"
    assert {name: status for name, (status, _) in refusals.items()} == {
        "no key": 401, "other model": 404, "other version": 404, "shape": 400, "element": 422, "too large": 413, "load": 501,
        "fault": 502, "rate": 429,
    }  # fmt: skip
    assert refusals["element"][1].startswith("input 1 of 2, counted from 0: ")
    assert "a key is required" in refusals["no key"][1]


def test_kserve_s_client_works_as_it_is(server: Server) -> None:
    told = ask(server, "kserve", "kserve_rest.py")
    assert told["health"] == [True, True, True]
    assert told["answers"] == [[["ONE", "ZWÖLF"], "7"]] * 4
    assert {name: status for name, (status, _) in told["refusals"].items()} == {
        "no input": 400, "no key": 401, "other model": 404, "too large": 413, "element": 422, "rate": 429, "fault": 502,
    }  # fmt: skip
    assert "the request has no input" in told["refusals"]["no input"][1]

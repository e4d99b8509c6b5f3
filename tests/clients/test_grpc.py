"""Clients of the gRPC port, unchanged, against a running server with keys."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environments import client_command, run_client
from tests.clients.test_oip_arrays import NAMES, SCORES, SUMS, TARGETS
from tests.e2e.client import PATIENCE
from tests.e2e.server import ROOT, Server, launched, serving
from tests.identity.writing import entry, key_of
from tests.servers.ports import Port

TARGET = "tests.clients.targets:answer"
NEVER = "-1"


@pytest.fixture
def port() -> Iterator[int]:
    with contextlib.closing(Port()) as port:
        yield port.number


@pytest.fixture
def server(port: int, tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "keys.toml").write_text(entry("client", more="rate = 0") + entry("slow", more="rate = 1\nburst = 1"))
    with launched(tmp_path, "--keys", "keys.toml", "--grpc-port", str(port), target=TARGET) as server:
        server.ready()
        yield server
        server.signal()
        server.check_end()


def test_tritonclient_works_unchanged(server: Server, port: int) -> None:
    told = run_client("triton", "triton_grpc.py", f"127.0.0.1:{port}", key_of("client"))
    assert told.pop("statistics") >= 7
    statuses = {name: status.removeprefix("StatusCode.") for name, (status, _) in told["refusals"].items()}
    assert statuses == {
        "no key": "UNAUTHENTICATED", "other model": "NOT_FOUND", "other metadata": "NOT_FOUND", "other version": "NOT_FOUND",
        "too large": "RESOURCE_EXHAUSTED",
        "element": "INVALID_ARGUMENT", "fault": "INTERNAL", "too late": "DEADLINE_EXCEEDED", "load": "UNIMPLEMENTED",
        "traces": "UNIMPLEMENTED",
    }  # fmt: skip
    assert told.pop("refusals")["element"][1].startswith("input 1 of 2, counted from 0: ")
    *answers, error = told.pop("stream")
    assert answers == [["S0"], ["S1"], ["S2"], True]
    assert "no model named" in error
    assert told == {
        "health": [True, True, True, False, False],
        "server": "headway",
        "inputs": [{"name": "INPUT", "datatype": "BYTES", "shape": ["-1", "1"]}],
        "config": 1024,
        "index": [{"name": "default", "version": "1", "state": "READY"}],
        "infer": ["7", ["A", "B"]],
        "compressed": ["", ["ZIP" * 100]],
        "later": ["LATER"],
    }


def test_kserve_s_client_works_unchanged(server: Server, port: int) -> None:
    told = run_client("kserve", "kserve_grpc.py", f"127.0.0.1:{port}", key_of("client"), key_of("slow"))
    assert told["health"] == [True, True, True]
    assert told["answer"] == [["ONE", "ZWÖLF"], "7"]
    status, _, pushback = told["refusals"].pop("rate")
    assert status == "RESOURCE_EXHAUSTED"
    assert 0 < int(pushback) <= 60_000
    assert {name: (status, pushback) for name, (status, _, pushback) in told["refusals"].items()} == {
        "no key": ("UNAUTHENTICATED", NEVER),
        "other model": ("NOT_FOUND", NEVER),
        "element": ("INVALID_ARGUMENT", NEVER),
        "fault": ("INTERNAL", NEVER),
        "too large": ("RESOURCE_EXHAUSTED", None),
        "too late": ("DEADLINE_EXCEEDED", None),
    }


def test_grpc_js_works_and_no_call_of_its_is_cut_by_a_shutdown(server: Server, port: int) -> None:
    protos = str(ROOT / "headway" / "protos")
    command, environ = client_command(
        "grpc-js", "grpc_js.js", f"127.0.0.1:{port}", key_of("client"), key_of("slow"), protos
    )
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            told = json.loads(client.stdout.readline())
            assert client.stdout.readline() == "enough\n"
            server.signal()
            assert server.ended() == 0
            counts = json.loads(client.stdout.readline())
            assert client.wait(PATIENCE) == 0
        finally:
            client.kill()
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


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    models = [f"{name}=tests.clients.array_targets:{target}" for name, target in TARGETS.items()]
    with (
        contextlib.closing(Port()) as port,
        serving(tmp_path, *models[1:], "--grpc-port", str(port.number), lawful=False, target=models[0]),
    ):
        yield f"127.0.0.1:{port.number}"


def test_triton_s_client_sends_and_reads_arrays_of_every_datatype(address: str) -> None:
    told = run_client("triton", "triton_grpc_arrays.py", address)
    assert told["other"] == [[]] * 2
    assert told["large"]
    assert told["sums"] == [SUMS[:1], ""]
    assert told["rows"] == [SUMS, "7"]
    assert told["compressed"] == [SUMS, ""]
    assert told["any name"] == SUMS
    assert (told["all"], told["some"]) == (["scores", "names"], ["names"])
    assert told["embeddings"] == [[1.0, 0.5], [3.0, 0.5]]
    wrong = "the input `x` is FP32 of shape [2, 3]; the model takes `x`, FP32 of shape [-1, 4]"
    assert [told["stream"][0], told["stream"][1], told["stream"][3]] == [SUMS[:1], SUMS, SCORES]
    assert wrong in told["stream"][2]
    assert told["model"] == [
        {"name": "query", "datatype": "FP32", "shape": ["-1", "2"]},
        {"name": "ids", "datatype": "INT64", "shape": ["-1", "-1"]},
    ]
    assert [(one["name"], one["data_type"], one["dims"]) for one in told["config"]] == [
        ("scores", "TYPE_FP32", ["-1"]),
        ("names", "TYPE_STRING", ["-1"]),
    ]
    refusals = {name: status.removeprefix("StatusCode.") for name, (status, _) in told["refusals"].items()}
    assert refusals.pop("rows") == "RESOURCE_EXHAUSTED"
    assert refusals == dict.fromkeys(("datatype", "axis", "rank", "missing", "output"), "INVALID_ARGUMENT")
    assert told["refusals"]["axis"][1] == wrong


def test_kserve_s_client_sends_and_reads_arrays(address: str) -> None:
    told = run_client("kserve", "kserve_grpc_arrays.py", address)
    assert told["sums"] == [[SUMS, [2, 3], "7"]] * 2
    assert told["scores"] == [SCORES] * 2
    assert told["names"] == [NAMES] * 2
    assert {name: status for name, (status, _) in told["refusals"].items()} == {
        "datatype": "INVALID_ARGUMENT",
        "axis": "INVALID_ARGUMENT",
    }

"""Clients of the gRPC port, unchanged, against a running server of models that take arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environments import run_client
from tests.clients.test_oip_arrays import NAMES, SCORES, SUMS, TARGETS
from tests.e2e.server import serving
from tests.servers.ports import Port


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

"""Clients of the Open Inference Protocol over REST, unchanged, against a running server of models that take arrays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import run_client
from tests.e2e.server import Server, serving

TARGETS = {"sums": "Sums", "same": "Same", "ranker": "Ranker", "columns": "Columns", "embed": "embed"}
SUMS = [[6.0, 12.0, 36.0], [22.0, 44.0, 484.0]]
SCORES, NAMES = [[6.0, 7.0]], [["id 3", "id 4"]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    models = [f"{name}=tests.clients.array_targets:{target}" for name, target in TARGETS.items()]
    with serving(tmp_path, *models[1:], lawful=False, target=models[0]) as server:
        yield server


def ask(server: Server, environment: str, program: str) -> Any:
    return run_client(environment, program, f"127.0.0.1:{server.port}")


def test_triton_s_client_sends_and_reads_arrays_of_every_datatype(server: Server) -> None:
    told = ask(server, "triton", "triton_http_arrays.py")
    assert told["other"] == [[]] * 8
    assert told["sums"] == [[SUMS[:1], None]] * 2
    assert told["rows"] == [SUMS, "7"]
    assert told["any name"] == SUMS
    assert told["compressed"] == [SUMS, None]
    assert (told["all"], told["some"]) == (["scores", "names"], ["names"])
    assert told["embeddings"] == [[1.0, 0.5], [3.0, 0.5]]
    assert told["model"]["inputs"] == [
        {"name": "query", "datatype": "FP32", "shape": [-1, 2]},
        {"name": "ids", "datatype": "INT64", "shape": [-1, -1]},
    ]
    assert told["config"]["output"] == [
        {"name": "scores", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "names", "data_type": "TYPE_STRING", "dims": [-1]},
    ]
    assert {name: int(status) for name, (status, _) in told["refusals"].items()} == {
        "datatype": 400, "axis": 400, "rank": 400, "rows": 413, "missing": 400, "output": 400,
    }  # fmt: skip
    assert (
        told["refusals"]["axis"][1]
        == "the input `x` is FP32 of shape [2, 3]; the model takes `x`, FP32 of shape [-1, 4]"
    )


def test_kserve_s_client_sends_and_reads_arrays(server: Server) -> None:
    told = ask(server, "kserve", "kserve_rest_arrays.py")
    assert told["sums"] == [[SUMS, [2, 3], "7"]] * 4
    assert [one["scores"] for one in told["ranked"]] == [SCORES] * 4
    assert [one["names"] for one in told["ranked"]] == [NAMES] * 4
    assert {name: status for name, (status, _) in told["refusals"].items()} == {"datatype": 400, "axis": 400}


def test_mlserver_s_codecs_read_what_they_are_answered(server: Server) -> None:
    told = ask(server, "mlserver", "mlserver_arrays.py")
    assert told["request"] == SUMS
    assert told["ranked"] == {"scores": SCORES}
    assert told["names"] == NAMES[0]
    assert told["frame"] == {"score": [45.0, 82.0]}
    assert told["embeddings"] == {"OUTPUT": [[1.0, 0.5], [3.0, 0.5]]}

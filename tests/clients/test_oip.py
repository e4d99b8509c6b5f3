"""Unmodified clients of the Open Inference Protocol, over REST and gRPC, against a running service with keys."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.environments import run_client
from tests.e2e.server import Server, serving
from tests.identity.writing import entry, key_of
from tests.servers.ports import Port

MODELS = {"sums": "Sums", "same": "Same", "ranker": "Ranker", "columns": "Columns", "embed": "embed"}
ANSWERED = ["ONE", "ZWÖLF", ""]
SUMS = [[6.0, 12.0, 36.0], [22.0, 44.0, 484.0]]
SCORES, NAMES = [[6.0, 7.0]], ["id 3", "id 4"]
EMBEDDINGS = [[1.0, 0.5], [3.0, 0.5]]
WRONG = "the input `x` is FP32 of shape [2, 3]; the model takes `x`, FP32 of shape [-1, 4]"
HTTP_STATUSES = {
    "no key": 401, "other model": 404, "element": 422, "fault": 502, "rate": 429, "too large": 413, "load": 501, "axis": 400, "rows": 413,
}  # fmt: skip
CODES = {
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    422: "INVALID_ARGUMENT",
    400: "INVALID_ARGUMENT",
    502: "INTERNAL",
    501: "UNIMPLEMENTED",
}


def code(name: str) -> str:
    return CODES.get(HTTP_STATUSES[name], "RESOURCE_EXHAUSTED")


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("oip")
    (folder / "keys.toml").write_text(entry("client", more="rate = 0") + entry("slow", more="rate = 1\nburst = 1"))
    models = [f"{name}=tests.clients.array_targets:{target}" for name, target in MODELS.items()]
    flags = "--keys", "keys.toml", "--default-model", "default"
    with (
        contextlib.closing(Port()) as port,
        serving(
            folder, *models, *flags, "--grpc-port", str(port.number), lawful=False, target="default=tests.clients.targets:answer"
        ) as server,
    ):  # fmt: skip
        server.expected = {"an input was rejected"}
        yield server


def ask(service: Server, environment: str, program: str, protocol: str) -> Any:
    port = service.grpc_port if protocol == "grpc" else service.port
    return run_client(environment, program, protocol, f"127.0.0.1:{port}", key_of("client"), key_of("slow"))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_triton_s_client_works_as_it_is(service: Server, protocol: str) -> None:
    told, is_grpc = ask(service, "triton", "triton_program.py", protocol), protocol == "grpc"
    ways = 1 if is_grpc else 6
    refusals = told.pop("refusals")
    late, _ = refusals.pop("too late")
    assert late in ("DEADLINE_EXCEEDED", "429", "503", "504"), "by whoever saw first that it cannot be answered in time"
    assert {name: status for name, (status, _) in refusals.items()} == {
        name: code(name) if is_grpc else str(status) for name, status in HTTP_STATUSES.items()
    }
    assert refusals["element"][1].startswith("input 1 of 2, counted from 0: ")
    assert refusals["axis"][1] == WRONG
    stream = told.pop("stream")
    if is_grpc:
        texts, error, last, numbers, wrong = stream
        assert (texts, last, numbers) == ([["S0"], ["S1"], ["S2"]], True, SUMS)
        assert "no model named" in error and WRONG in wrong
    assert told.pop("statistics") >= 7
    assert told == {
        "health": [True, True, True, False, True, False],
        "answers": [[ANSWERED, [3], ""]] * ways,
        "column": [ANSWERED, [3, 1], "42"],
        "other": [[ANSWERED, [3], ""]] * 2,
        "version": [ANSWERED, [3], ""],
        "later": ["LATER"],
        "server": "headway",
        "inputs": [[["INPUT", "BYTES", [-1, 1]]], [["query", "FP32", [-1, 2]], ["ids", "INT64", [-1, -1]]]],
        "config": [["scores", "TYPE_FP32", [-1]], ["names", "TYPE_STRING", [-1]]],
        "index": sorted(("default", *MODELS)),
        "changed": [[]] * 2 * ways,
        "sums": [[SUMS, "7"]] * ways,
        "any name": [SUMS, ""],
        "packed": [SUMS, ""],
        "ranked": [["scores", "names"], ["names"]],
        "embeddings": EMBEDDINGS,
    }


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_kserve_s_client_works_as_it_is(service: Server, protocol: str) -> None:
    told, is_grpc = ask(service, "kserve", "kserve_program.py", protocol), protocol == "grpc"
    ways = 2 if is_grpc else 4
    assert told == {
        "health": [True, True, True],
        "texts": [[ANSWERED[:2], "7"]] * ways,
        "sums": [[SUMS, [2, 3], "7"]] * ways,
        "ranked": [[SCORES, NAMES]] * ways,
    }


def test_mlserver_s_codecs_read_what_they_are_answered(service: Server) -> None:
    told = run_client("mlserver", "mlserver_arrays.py", f"127.0.0.1:{service.port}", key_of("client"))
    assert told == {
        "request": SUMS,
        "ranked": {"scores": SCORES},
        "names": NAMES,
        "frame": {"score": [45.0, 82.0]},
        "embeddings": {"OUTPUT": EMBEDDINGS},
    }

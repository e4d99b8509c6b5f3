"""Headway in front of Headway, in each dialect that it speaks itself: exact answers, and errors that stay what they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.client import BadRequest, Client
from tests.e2e.client import wait_until
from tests.e2e.server import Server, serving
from tests.servers.ports import Port
from tests.targets.passed import Passed
from tests.targets.vectors import vectors

MOST = 20_000
"""Longest body that the service behind takes."""
TEXTS = ["a", "ÀÉ 漢字 😀", '"\\', "two\nlines", "x" * 5000, *(f"text {number}" for number in range(25))]


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int]]:
    """The service that is asked by others, and its gRPC port."""
    flags = ("--max-body-bytes", str(MOST))
    with (
        contextlib.closing(Port()) as port,
        serving(tmp_path_factory.mktemp("behind"), "--grpc-port", str(port.number), *flags, lawful=False) as server,
    ):
        server.expected = {"batch failed"}
        yield server, port.number


DIALECTS = {
    "oip": ("http://127.0.0.1:{port}/v2/models/default/infer",),
    "oip-grpc": ("grpc://127.0.0.1:{grpc_port}/default",),
    "openai-completions": ("http://127.0.0.1:{port}/v1/completions", "--remote-model", "default"),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_texts_come_back_exactly_and_a_bad_input_alone_is_refused(
    behind: tuple[Server, int], tmp_path: Path, dialect: str
) -> None:
    url, *flags = DIALECTS[dialect]
    target = url.format(port=behind[0].port, grpc_port=behind[1])
    with serving(tmp_path, *flags, target=target) as front:
        front.expected = {"batch failed", "the remote API answered no outputs"}
        asked = [front.ask(text) for text in TEXTS]
        bad, large = front.ask("raise"), front.ask("x" * (MOST + 1))
        for one in asked:
            one.output()
        assert bad.refusal() == "REJECTED_BY_MODEL"
        assert large.refusal() == "REJECTED_BY_MODEL"
        assert front.ask("x" * (MOST + 1)).refusal() == "REJECTED_BY_MODEL", "by itself, too"
        assert front.metrics().value("batches_total") < len(TEXTS), "many go together"


def test_embeddings_come_back_exactly(tmp_path: Path) -> None:
    with serving(tmp_path, target="tests.targets.vectors:vectors", lawful=False) as behind:
        url = f"http://127.0.0.1:{behind.port}/v1/embeddings"
        with serving(tmp_path, "--remote-model", "default", target=url, answer_to=vector_of) as front:
            for one in [front.ask(text) for text in TEXTS[:5]]:
                one.output()


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int]]:
    """A service that gives arrays of every datatype back, and its gRPC port."""
    folder, target = tmp_path_factory.mktemp("passing"), "tests.targets.passed:Passed"
    with (
        contextlib.closing(Port()) as port,
        serving(folder, "--grpc-port", str(port.number), target=target, lawful=False) as server,
    ):
        yield server, port.number


@pytest.mark.parametrize("dialect", ["oip", "oip-grpc"])
def test_tensors_come_back_byte_for_byte(passing: tuple[Server, int], tmp_path: Path, dialect: str) -> None:
    target = DIALECTS[dialect][0].format(port=passing[0].port, grpc_port=passing[1])
    with serving(tmp_path, target=target, lawful=False) as front, Client(f"http://127.0.0.1:{front.port}") as client:
        front.expected = {"starts without a warm-up batch, as no input is known to fit"}
        wait_until(lambda: any("leave an axis beside the first free" in str(line.get("hint")) for line in front.log()))
        rng = np.random.default_rng(7)
        requests = [random_arrays(rng, rows, width) for rows in (1, 2, 5) for width in (0, 1, 3, 40)]
        for asked, result in zip(requests, client.infer_many(requests), strict=True):
            for name, array in asked.items():
                output = result.output[name.replace("in_", "out_")]
                assert (output.dtype, output.shape) == (array.dtype, array.shape)
                assert (
                    output.tolist() == array.tolist() if array.dtype == object else output.tobytes() == array.tobytes()
                )
        wrong = {**requests[0], "in_FP32": requests[0]["in_FP32"].astype("f8")}
        with pytest.raises(BadRequest, match=r"`in_FP32` is FP64 of shape .*FP32 of shape \[-1, -1\]"):
            client.infer(wrong)


def random_arrays(rng: np.random.Generator, rows: int, width: int) -> dict[str, Any]:
    """An array of each datatype of `tests.targets.passed`, of random bits."""
    found: dict[str, Any] = {}
    for name, (datatype, _) in Passed.inputs.items():
        if datatype == "BYTES":
            array = np.empty((rows, width), object)
            array[...] = rng.bytes(5)
        elif datatype == "BOOL":
            array = rng.integers(0, 2, (rows, width)).astype(bool)
        else:
            kind = "f" if datatype.startswith("FP") else datatype[0].lower()
            size = int("".join(filter(str.isdigit, datatype))) // 8
            array = np.frombuffer(rng.bytes(rows * width * size), f"{kind}{size}").reshape(rows, width)
        found[name] = array
    return found


@pytest.mark.parametrize("dialect", ["oip", "oip-grpc"])
def test_texts_become_arrays_behind(tmp_path: Path, dialect: str) -> None:
    lengths = "tests.targets.passed:lengths"
    with (
        contextlib.closing(Port()) as port,
        serving(tmp_path, "--grpc-port", str(port.number), target=lengths, lawful=False) as behind,
    ):
        target = DIALECTS[dialect][0].format(port=behind.port, grpc_port=port.number)
        with (
            serving(tmp_path, target=target, lawful=False) as front,
            Client(f"http://127.0.0.1:{front.port}") as client,
        ):
            assert client.infer("abc").output == [3.0, 0.5]
            found = client.infer(np.array(["abc", "é"])).output
            assert (found.dtype, found.tolist()) == (np.float32, [[3.0, 0.5], [1.0, 0.5]])


def vector_of(text: str) -> Any:
    """Output of `tests.targets.vectors`."""
    return vectors([text])[0]

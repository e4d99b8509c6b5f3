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


def test_tensors_come_back_as_they_went(tmp_path: Path) -> None:
    with (
        contextlib.closing(Port()) as port,
        serving(tmp_path, "--grpc-port", str(port.number), target="tests.targets.passed:Passed", lawful=False),
        serving(tmp_path, target=f"grpc://127.0.0.1:{port.number}/default", lawful=False) as front,
        Client(f"http://127.0.0.1:{front.port}") as client,
    ):
        front.expected = {"starts without a warm-up batch, as no input is known to fit"}
        wait_until(lambda: any("leave an axis beside the first free" in str(line.get("hint")) for line in front.log()))
        requests = [arrays(rows, width) for rows in (1, 2, 5) for width in (0, 1, 3, 40)]
        for asked, result in zip(requests, client.infer_many(requests), strict=True):
            for name, array in asked.items():
                output = result.output[name.replace("in_", "out_")]
                assert (output.dtype, output.shape, output.tolist()) == (array.dtype, array.shape, array.tolist())
        wrong = {**requests[0], "in_FP32": requests[0]["in_FP32"].astype("f8")}
        with pytest.raises(BadRequest, match=r"`in_FP32` is FP64 of shape .*FP32 of shape \[-1, -1\]"):
            client.infer(wrong)


def arrays(rows: int, width: int) -> dict[str, Any]:
    """An array of each datatype of `tests.targets.passed`."""
    numbers = np.arange(rows * width).reshape(rows, width) % 100
    dtypes = "?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "S8"
    found: dict[str, Any] = {name: numbers.astype(dtype) for name, dtype in zip(Passed.inputs, dtypes, strict=True)}
    return {**found, "in_BYTES": found["in_BYTES"].astype(object)}

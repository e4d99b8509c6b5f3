"""Headway in front of Headway, in each API dialect: answers must be exact, and errors unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, serving
from tests.servers.ports import Port

MOST = 20_000
"""Longest body that the service behind accepts."""
TEXTS = ["a", "ÀÉ 漢字 😀", '"\\', "two\nlines", "x" * 5000, *(f"text {number}" for number in range(25))]


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int]]:
    """Run the service behind. Returns it with its gRPC port."""
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
        front.expected = {"batch failed", "the remote API returned no outputs"}
        asked = [front.ask(text) for text in TEXTS]
        bad, large = front.ask("raise"), front.ask("x" * (MOST + 1))
        for one in asked:
            one.output()
        assert bad.refusal() == "REJECTED_BY_MODEL"
        assert large.refusal() == "REJECTED_BY_MODEL"
        assert front.ask("x" * (MOST + 1)).refusal() == "REJECTED_BY_MODEL", "by itself, too"
        assert front.metrics().value("batches_total") < len(TEXTS), "many go together"

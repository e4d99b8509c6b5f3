"""Headway in front of Triton, over HTTP and gRPC: exact answers. Run `make triton` to install Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.stand import triton_server
from bench.stand.stand import free_port
from tests.e2e.server import serving
from tests.e2e.test_headway_remote import TEXTS

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not triton_server.is_installed(), reason="there is no Triton; make triton installs it"),
]


def test_texts_come_back_exactly_over_http_and_over_grpc(tmp_path: Path) -> None:
    port = free_port()
    with triton_server.upper(grpc_port=port) as triton:
        for target in (f"{triton.url}/v2/models/upper/infer", f"grpc://127.0.0.1:{port}/upper"):
            with serving(tmp_path, target=target) as front:
                for one in [front.ask(text) for text in TEXTS]:
                    one.output()
                assert front.metrics().value("batches_total") < len(TEXTS), "many go together"

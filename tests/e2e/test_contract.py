"""The service as its own contract describes it: schemathesis finds no answer that the contract does not allow."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from tests.e2e.server import serving

CONFIG = """
[checks]
# A promise kept: a request may ask for a deadline of a millisecond.
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]

[[operations]]
# Its query must name a model when its body is no JSON, which OpenAPI has no words for.
include-name = "POST /v1/predict"
checks.positive_data_acceptance.enabled = false
"""


def test_the_service_keeps_its_contract(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digest = sha256(b"contract").hexdigest()
    keys.write_text(f'[[keys]]\nsha256 = "{digest}"\nuser = "u"\ntenant = "t"\ntier = "paid"\nrate = 0\n')
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    with serving(tmp_path, "--keys", "keys.toml", lawful=False) as server:
        command = [
            *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
            *("--config-file", str(config), "run", f"http://127.0.0.1:{server.port}/openapi.json"),
            *("--header", "Authorization: Bearer contract", "--checks", "all", "--mode", "all", "--seed", "1"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "80", "--no-color"),
        ]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Tested: 6" in done.stdout
        assert server.metrics().value("requests_total", outcome="ok") > 50
        assert server.metrics().value("requests_total", outcome="internal") == 0

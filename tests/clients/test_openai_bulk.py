"""OpenAI's client, with files and batches of a running service."""

from __future__ import annotations

from pathlib import Path

from tests.clients.environments import run_client
from tests.e2e.server import launched
from tests.identity.writing import entry, key_of

TARGET = "tests.clients.targets:answer"


def test_openais_client_runs_batches_unchanged(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(entry("client", more="rate = 0") + entry("other", tenant="globex"))
    with launched(tmp_path, "--keys", "keys.toml", "--bulk-dir", "bulk", target=TARGET) as server:
        server.ready()
        url = f"http://127.0.0.1:{server.port}"
        seen = run_client("openai", "openai_bulk_program.py", url, key_of("client"), key_of("other"))
        assert seen == {
            "completions": ["completed", [3, 1, 2], "HELLO", 400],
            "chat": "USER: HI\nASSISTANT:",
            "embeddings": [[[2.0, 0.5, -1.0]] * count for count in (1, 3)],
            "files": [3, 7, "batch_output"],
            "batches": [2, 3, {"k": "v"}],
            "file": True,
            "deleted": True,
            "gone": "not_found",
            "foreign file": "not_found",
            "foreign batch": "not_found",
            "cancelled": ["cancelled", True],
        }
        server.signal()
        server.check_end()

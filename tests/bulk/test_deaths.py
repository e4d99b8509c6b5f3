"""Bulk jobs of real processes that are killed while they run: each line is answered exactly once."""

import json
import sqlite3
from pathlib import Path

import pytest

from tests.bulk.test_http import Client, line
from tests.e2e.client import wait_until
from tests.e2e.server import Server, launched
from tests.e2e.test_bulk import BRIEF

pytestmark = pytest.mark.processes

LINES = 1000


def client_of(server: Server) -> Client:
    server.ready()
    return Client(f"http://127.0.0.1:{server.port}", "")


def test_each_line_is_answered_once_though_every_process_is_killed(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    flags = "--bulk-dir", str(tmp_path / "bulk"), "--ledger", f"sqlite:///{ledger}", "--max-batch-size", "8"
    target = "tests.bulk.targets:slow_upper"
    with launched(tmp_path, *flags, target=target, constants=BRIEF) as first:
        client = client_of(first)
        prompts = [f"line {number}" if number % 5 else [f"line {number}"] * 3 for number in range(1, LINES + 1)]
        batch = client.batch(*(line(number, prompt) for number, prompt in enumerate(prompts, 1)))
        path = f"/v1/batches/{batch['id']}"
        wait_until(lambda: client.json("GET", path)["request_counts"]["completed"] > 100)
        first.kill()
    with launched(tmp_path, *flags, target=target, constants=BRIEF) as second:
        other = client_of(second)
        wait_until(lambda: other.json("GET", path)["status"] == "completed")
        found = other.json("GET", path)
        assert found["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        _, content = other.ask("GET", f"/v1/files/{found['output_file_id']}/content")
        records = [json.loads(text) for text in content.splitlines()]
        texts = {one["custom_id"]: [two["text"] for two in one["response"]["body"]["choices"]] for one in records}
        assert len(records) == LINES
        assert texts == {str(number): [f"LINE {number}"] * (1 if number % 5 else 3) for number in range(1, LINES + 1)}
        assert 0 < second.metrics().value("bulk_lines_total", outcome="answered") < LINES
        second.signal()
        second.check_end()
    rows = sqlite3.connect(ledger).execute("SELECT tier, status, requests FROM headway_requests").fetchall()
    assert rows == [("bulk", "completed", LINES)]

"""`headway bulk` against a running service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.app.background import BackgroundService
from headway.config import Settings
from headway.http.server.listener import Listener
from headway.model import Role
from tests.bulk import test_http
from tests.cli.command import code_of

pytestmark = pytest.mark.processes


def test_a_file_of_texts_goes_in_and_answers_come_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(port=0, admin_port=0, bulk_dir=str(tmp_path / "bulk"))
    service = BackgroundService(settings, Role.SERVE, f"{test_http.__name__}:upper", Listener)
    try:
        monkeypatch.setenv("HEADWAY_URL", service.url)
        lines = tmp_path / "lines.txt"
        lines.write_text("hello\n\nwörld\n")
        assert code_of(["bulk", "submit", str(lines), "--wait"]) == 0
        told = capsys.readouterr()
        id = told.out.strip()
        assert id.startswith("batch_") and "2 of 2 lines done, 0 failed" in told.err
        out = tmp_path / "answers.jsonl"
        assert code_of(["bulk", "fetch", id, "--out", str(out)]) == 0
        answers = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, out.read_text().splitlines())}
        assert {id: body["choices"][0]["text"] for id, body in answers.items()} == {"1": "HELLO", "3": "WÖRLD"}
        assert code_of(["bulk", "fetch", id, "--errors"]) == 1
        assert "has no errors" in capsys.readouterr().err
        requests = tmp_path / "requests.jsonl"
        requests.write_text(test_http.line(7, "again") + "\n" + test_http.line(8, model="elsewhere"))
        assert code_of(["bulk", "submit", str(requests)]) == 0
        other = capsys.readouterr().out.strip()
        assert code_of(["bulk", "status", other, "--wait", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert code_of(["bulk", "list"]) == 0
        assert [row.split()[:2] for row in capsys.readouterr().out.splitlines()[1:]] == [
            [other, "completed"],
            [id, "completed"],
        ]
        assert code_of(["bulk", "cancel", other]) == 1
        assert "has ended already" in capsys.readouterr().err
        assert code_of(["bulk", "status", "batch_0", "--url", "http://127.0.0.1:9"]) == 1
        assert "does not answer" in capsys.readouterr().err
    finally:
        service.stop(drain=False)

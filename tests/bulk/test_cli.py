"""`headway bulk` with a running service."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.app.serving import BackgroundService
from headway.cli import bulk
from headway.config import Settings
from headway.errors import HeadwayError
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
        assert told.out == f"{id}\n"
        out = tmp_path / "answers.jsonl"
        assert code_of(["bulk", "fetch", id, "--out", str(out)]) == 0
        answers = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, out.read_text().splitlines())}
        assert {id: body["choices"][0]["text"] for id, body in answers.items()} == {"1": "HELLO", "3": "WÖRLD"}
        assert code_of(["bulk", "fetch", id, "--errors"]) == 1
        assert "has no errors" in capsys.readouterr().err
        requests = tmp_path / "requests.jsonl"
        requests.write_text(test_http.line(7, "again") + "\n" + test_http.line(8, model="elsewhere"))
        assert code_of(["bulk", "submit", str(requests), "--wait"]) == 1
        told = capsys.readouterr()
        other = told.out.strip()
        assert "first error, in line 2: no model named 'elsewhere'" in told.err
        assert told.err.rstrip().endswith(f"headway bulk fetch {other} --errors")
        assert code_of(["bulk", "submit", str(lines), "--model", "defualt", "--wait"]) == 1
        told = capsys.readouterr()
        assert told.out == "" and "no model named 'defualt' is served here; available: default" in told.err
        assert code_of(["bulk", "status", other, "--wait", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert code_of(["bulk", "list"]) == 0
        assert [row.split()[:2] for row in capsys.readouterr().out.splitlines()[1:]] == [
            [other, "completed"],
            [id, "completed"],
        ]
        assert code_of(["bulk", "cancel", other]) == 1
        assert "has already ended" in capsys.readouterr().err
        assert code_of(["bulk", "list", "--url", service.admin_url]) == 1
        assert "Is this the service's public port (--url)? (404)" in capsys.readouterr().err
        assert code_of(["bulk", "status", "batch_0", "--url", "http://127.0.0.1:9"]) == 1
        assert "does not answer" in capsys.readouterr().err
    finally:
        service.stop(drain=False)


JOB = {
    "id": "batch_1",
    "status": "in_progress",
    "errors": None,
    "request_counts": {"total": 2, "completed": 1, "failed": 0},
    "output_file_id": None,
    "error_file_id": None,
}


class RestartedPort(bulk.PublicPort):
    """A port that is down for some looks at a job. By the last look the job has ended."""

    def __init__(self, *answers: HeadwayError | dict[str, Any]) -> None:
        super().__init__("http://127.0.0.1:9", "", "", "", "")
        self.answers = list(answers)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        if path == "/v1/batches" and method == "POST":
            return JOB
        answer = self.answers.pop(0)
        if isinstance(answer, HeadwayError):
            raise answer
        return answer

    def send(self, name: str, pieces: Iterator[bytes]) -> str:
        return "file-1"


def submitted(port: RestartedPort, path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of `submit --wait`, on a clock that advances as it sleeps."""
    now = [100.0]
    monkeypatch.setattr("headway.cli.bulk.PublicPort", lambda *known: port)
    monkeypatch.setattr(
        "headway.cli.bulk.time",
        SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds)),
    )
    (path / "lines.txt").write_text("hello")
    return code_of(["bulk", "submit", str(path / "lines.txt"), "--wait"])


def test_a_job_is_waited_for_while_its_service_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = [bulk.Away("URL does not answer: refused", ". Name it")] * 60
    port = RestartedPort(JOB, *away, JOB, *away, {**JOB, "status": "completed"})
    assert submitted(port, tmp_path, monkeypatch) == 0
    told = capsys.readouterr()
    assert told.out == "batch_1\n"
    assert told.err.count("URL does not answer: refused; trying again") == 2


def test_what_a_job_waits_for_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def waits(why: str) -> dict[str, Any]:
        return {**JOB, "errors": {"data": [{"code": "waiting", "message": why}]}}

    looks = [
        *(waits(f"requests came of late; {left} seconds more") for left in (9, 8, 7)),
        JOB,
        waits("the disk is full"),
    ]
    assert submitted(RestartedPort(*looks, {**JOB, "status": "completed"}), tmp_path, monkeypatch) == 0
    told = capsys.readouterr().err
    assert told.count("requests came of late; 9 seconds more\n") == 1
    assert "8 seconds" not in told
    assert told.count("the disk is full\n") == 1


def test_a_job_whose_service_stays_away_is_known_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = RestartedPort(*[bulk.Away("URL: draining (503)")] * 1000)
    assert submitted(port, tmp_path, monkeypatch) == 1
    told = capsys.readouterr()
    assert told.out == "batch_1\n"
    assert "the job continues" in told.err and "headway bulk status batch_1 --wait" in told.err
    assert 60 <= 1000 - len(port.answers) <= 120


def test_the_answers_of_a_job_that_runs_are_to_be_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headway.cli.bulk.PublicPort", lambda *known: RestartedPort(JOB))
    assert code_of(["bulk", "fetch", "batch_1"]) == 1
    assert "headway bulk status batch_1 --wait" in capsys.readouterr().err

"""Dead letters, listed, shown, replayed and purged over the admin port and by the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.server import Server, run_cli, serving

UNHAPPY = {"batch failed", "worker process ended"}


def ids(server: Server) -> list[str]:
    return [str(letter["id"]) for letter in server.letters()]


def test_a_letter_is_kept_until_a_replay_succeeds(tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    text = f"unless {obstacle} …"
    with serving(tmp_path, lawful=False) as server:
        server.expected = UNHAPPY
        asked = server.ask(text, parameters={"temperature": 0.5})
        assert asked.refusal() == "REJECTED_BY_MODEL"
        [letter] = server.letters()
        id = letter["id"]
        assert id == f"req_{asked.id}"
        assert (letter["cause"], letter["attempts"], letter["worker"], letter["tier"]) == ("raised", 2, "cpu-0", "paid")
        assert "input" not in letter
        shown = server.admin(f"/internal/dlq/{id}").json
        assert (shown["input"], shown["parameters"]) == (text, {"temperature": 0.5})

        again = server.admin(f"/internal/dlq/{id}/replay", "POST")
        assert (again.status, again.json["error"]) == (422, "REJECTED_BY_MODEL")
        assert ids(server) == [id], "kept under its first id, and once"
        obstacle.unlink()
        again = server.admin(f"/internal/dlq/{id}/replay", "POST")
        assert (again.status, again.json["replayed"], again.json["output"]) == (200, id, text.upper())
        assert ids(server) == []
        for path, method in (("", "GET"), ("", "DELETE"), ("/replay", "POST")):
            assert server.admin(f"/internal/dlq/{id}{path}", method).json["error"] == "NOT_FOUND"


def test_the_command_line_lists_shows_replays_and_purges(tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    with serving(tmp_path, lawful=False) as server:
        server.expected = UNHAPPY
        assert run_cli(server, tmp_path, "dlq", "list").stdout == "no dead letters\n"
        for text in (f"unless {obstacle}", "exception", "last-words", "none", "raise"):
            server.ask(text).answer()
        listed = run_cli(server, tmp_path, "dlq", "list")
        assert listed.returncode == 0
        assert len(listed.stdout.splitlines()) == 6
        assert "\x1b" not in listed.stdout
        assert run_cli(server, tmp_path, "status").returncode == 0

        by_text = {asked.text: f"req_{asked.id}" for asked in server.asked}
        first, last = by_text[f"unless {obstacle}"], by_text["raise"]
        shown = run_cli(server, tmp_path, "dlq", "show", first)
        assert json.loads(shown.stdout)["input"] == f"unless {obstacle}"
        failed = run_cli(server, tmp_path, "dlq", "replay", first, last)
        assert failed.returncode == 1
        assert failed.stderr.count("(422)") == 2
        obstacle.unlink()
        done = run_cli(server, tmp_path, "dlq", "replay", first)
        assert (done.returncode, ids(server).count(first)) == (0, 0)
        assert "succeeded" in done.stdout
        assert run_cli(server, tmp_path, "dlq", "purge", last).returncode == 0
        assert len(ids(server)) == 3
        assert run_cli(server, tmp_path, "dlq", "purge", "--all", "--yes").returncode == 0
        assert ids(server) == []
        assert run_cli(server, tmp_path, "dlq", "show", last).returncode == 1
        assert server.metrics().value("dlq_depth") == 0

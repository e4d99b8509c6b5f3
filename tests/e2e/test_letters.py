"""Dead letters, listed, shown, replayed and purged over the admin port and by the command line."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.server import Server, serving

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

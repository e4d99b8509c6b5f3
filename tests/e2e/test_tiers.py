"""Keys, tiers and limits, as clients with keys see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.client import wait_until
from tests.e2e.server import TIERS, Server, serving
from tests.identity.writing import entry, key_of

KEYS = {
    "enterprise": ("acme", "enterprise", 0, 1),
    "paid": ("acme", "paid", 0, 1),
    "free": ("globex", "free", 0, 1),
    "limited": ("globex", "free", 1, 3),
}
"""Name of a key to tenant, tier, requests a minute (0: no limit), and burst."""


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(
        "".join(
            entry(key, key[0], tenant, tier, f"rate = {rate}\nburst = {burst}")
            for key, (tenant, tier, rate, burst) in KEYS.items()
        )
    )
    return str(path)


def bearer(name: str) -> str:
    return f"Authorization: Bearer {key_of(name)}"


def printed(server: Server) -> list[str]:
    return [line["line"] for line in server.log("worker output") if line["stream"] == "stdout"]


def test_higher_tiers_ride_first_and_the_lowest_rides_too(tmp_path: Path, keys: str) -> None:
    with serving(tmp_path, *TIERS, "--keys", keys, "--max-batch-size", "8", lawful=False) as server:
        hold = server.ask("print hold", bearer("free"))
        hold.output()
        with server.without_workers():
            server.expected = {"worker process ended"}
            asked = [server.ask(f"print free {number}", bearer("free")) for number in range(12)]
            asked += [server.ask(f"print paid {number}", bearer("paid")) for number in range(4)]
            asked += [server.ask(f"print enterprise {number}", bearer("enterprise")) for number in range(5)]
            lowered = server.ask("print lowered", bearer("enterprise"), "X-Request-Tier: free")
            server.queued(22)
            depths = {queue["tier"]: queue["depth"] for queue in server.health()["queues"]}
            assert depths == {"enterprise": 5, "paid": 4, "free": 13, "last": 0}
        for one in (*asked, lowered):
            one.output()
        wait_until(lambda: len(printed(server)) == 23)
        first = [line.split()[0] for line in printed(server)[1:9]]
        assert first == ["enterprise"] * 5 + ["paid"] * 2 + ["free"], "the last place is kept for who waits longest"
        assert printed(server).index("lowered") > 8


def test_who_has_no_key_or_a_wrong_one_is_turned_away(tmp_path: Path, keys: str) -> None:
    with serving(tmp_path, *TIERS, "--keys", keys) as server:
        for fields in ([], [bearer("wrong")], [f"Authorization: Basic {key_of('paid')}"]):
            asked = server.ask("let me in", *fields)
            assert asked.refusal() == "UNAUTHENTICATED"
        server.ask("let me in", bearer("paid")).output()
        server.ask("let me in", bearer("free"), "X-Request-Tier: enterprise").output()
        metrics = server.metrics()
        assert metrics.value("refusals_total", reason="unauthenticated") == 3
        assert metrics.by("requests_total", "tier") == {"paid": 1, "free": 1}


def test_the_rate_limit_holds_for_its_key_alone(tmp_path: Path, keys: str) -> None:
    with serving(tmp_path, *TIERS, "--keys", keys) as server:
        line = server.connect()
        for number in range(3):
            server.ask(f"within {number}", bearer("limited"), on=line).output()
        asked = server.ask("beyond", bearer("limited"), on=line)
        answer = asked.answer()
        assert (answer.status, asked.outcome) == (429, "RATE_LIMITED")
        assert 30 <= int(answer.header["retry-after"]) <= 60
        assert answer.header["x-headway-dropped-reason"] == "rate"
        server.ask("another key of the tenant", bearer("free"), on=line).output()
        assert server.metrics().value("refusals_total", reason="rate", tier="free") == 1


def test_no_key_and_no_input_is_written_anywhere(tmp_path: Path, keys: str) -> None:
    with serving(tmp_path, *TIERS, "--keys", keys, "--log-level", "debug") as server:
        server.expected = {"batch failed", "worker process ended"}
        server.ask("input-canary", bearer("paid")).output()
        server.ask("raise", bearer("paid")).answer()
        server.ask("none", bearer("limited")).answer()
        server.ask("exit", bearer("enterprise"), parameters={"key": "parameter-canary"}).answer()
        server.ask("input-canary", bearer("wrong")).answer()
        told = [server.log_text(), server.banner(), server.admin("/metrics").body.decode()]
        told += [str(server.letters()), str(server.health()), str(server.workers())]
        told += [server.admin(f"/internal/requests/req_{asked.id}").body.decode() for asked in server.asked]
        assert "canary" not in "".join(told)

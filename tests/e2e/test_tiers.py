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

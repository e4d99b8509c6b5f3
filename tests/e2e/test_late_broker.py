"""A process with a fallback comes up without the broker, and takes part when that is there and will do."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.client import wait_until
from tests.e2e.server import TARGET, launched
from tests.servers.redis import RedisServer

DIRECT = "the broker does not answer; coming up in direct mode"
UNFIT = "the broker cannot be used; direct mode goes on"
EXPECTED = {DIRECT, UNFIT, "the broker is out of reach", "direct mode until the broker is back"}


def test_a_start_without_the_broker_is_one_in_direct_mode(tmp_path: Path) -> None:
    redis = RedisServer("valkey", tmp_path / "redis", "maxmemory-policy allkeys-lru")
    try:
        with launched(tmp_path, "--broker", redis.url, "--fallback", TARGET, "--name", "late") as server:
            server.expected |= EXPECTED
            server.ready()
            server.logged(DIRECT)
            wait_until(lambda: server.get("/readyz").status == 200)
            assert server.get("/readyz").json["status"] == "degraded"
            server.ask("answered by the fallback").output()
            assert server.metrics().value("direct_total") == 1
            redis.start()
            assert "allkeys-lru" in str(server.logged(UNFIT)["error"])
            server.ask("answered by the fallback, too").output()
            assert server.metrics().value("direct_total") == 2
            assert redis.command("HKEYS", "headway:{fleet}:k") == []
            redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
            server.logged("the broker is there; direct mode ends")
            wait_until(lambda: server.get("/readyz?verbose").json["checks"]["workers"] == "healthy")
            server.logged("the broker is back", who="gateway")
            server.ask("answered by its own worker").output()
            assert server.metrics().value("direct_total") == 2
            assert redis.command("HLEN", "headway:{fleet}:k") == 1
            server.signal()
            server.check_end()
            assert redis.command("HLEN", "headway:{fleet}:k") == 0
    finally:
        redis.close()

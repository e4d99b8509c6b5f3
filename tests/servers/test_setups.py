"""Sentinel, cluster and TLS are as a client finds them in the field."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from redis.cluster import RedisCluster
from redis.sentinel import Sentinel

from tests.e2e.client import wait_until
from tests.servers.cluster import ClusterSetup
from tests.servers.redis import client
from tests.servers.sentinel import SERVICE, SentinelSetup
from tests.servers.tls import Authority, TlsServer


def test_sentinels_fail_over_and_the_old_primary_follows_the_new(tmp_path: Path) -> None:
    with SentinelSetup("valkey", tmp_path) as setup:
        first, second = setup.primary, setup.replica
        assert setup.servers == [first, second]
        first.command("SET", "a", "1")
        wait_until(lambda: second.command("GET", "a") == b"1")
        first.kill()
        assert setup.primary is second
        addresses = [("127.0.0.1", one.port) for one in setup.sentinels]
        assert Sentinel(addresses).discover_master(SERVICE) == ("127.0.0.1", second.port)  # type: ignore[no-untyped-call]
        second.command("SET", "a", "2")
        first.start()
        wait_until(setup.in_step)
        assert first.command("GET", "a") == b"2"
        with pytest.raises(redis.ReadOnlyError):
            first.command("SET", "a", "3")


def test_the_nodes_of_a_cluster_share_the_slots(tmp_path: Path) -> None:
    with ClusterSetup("valkey", tmp_path) as cluster:
        keys = [f"{{{number}}}:a" for number in range(30)]
        with RedisCluster(host="127.0.0.1", port=cluster.servers[0].port) as asked:
            for key in keys:
                asked.set(key, key)
        assert {cluster.of(key) for key in keys} == set(cluster.servers)
        for key in keys:
            assert cluster.of(key).command("GET", key) == key.encode()
        with pytest.raises(redis.exceptions.MovedError):
            next(one for one in cluster.servers if one is not cluster.of("a")).command("GET", "a")


def test_tls_is_needed_and_users_do_what_they_may(tmp_path: Path) -> None:
    with TlsServer(tmp_path) as server:
        with client(server.url_of()) as asked:
            asked.set("headway:a", "1")
            assert asked.config_get("maxmemory-policy")
            with pytest.raises(redis.exceptions.NoPermissionError):
                asked.set("other", "1")
            with pytest.raises(redis.exceptions.NoPermissionError):
                asked.flushall()
        assert server.command("GET", "headway:a") == b"1"
        with client(f"redis://127.0.0.1:{server.port}") as plain, pytest.raises(redis.ConnectionError):
            plain.ping()
        nobody = server.url_of().replace("headway:", "headway:not-", 1)
        with client(nobody) as wrong, pytest.raises(redis.AuthenticationError):
            wrong.ping()
        stranger = server.url_of().replace(f"{tmp_path.name}%2Fcertificates", f"{tmp_path.name}%2Fother")
        Authority(tmp_path / "other")
        with client(stranger) as deceived, pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            deceived.ping()
        server.restart()
        assert server.command("PING")

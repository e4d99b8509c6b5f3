"""A machine without servers: what a test has opened before it is skipped would break another one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.stand.proxies import Behind
from tests.servers.balancers import Balancer
from tests.servers.cluster import ClusterSetup
from tests.servers.pgbouncer import PgBouncer
from tests.servers.prometheus import Prometheus
from tests.servers.redis import REQUIRED, RedisServer
from tests.servers.sentinel import SentinelSetup
from tests.servers.tls import Authority, TlsServer

SETUPS: dict[str, Callable[[Path], object]] = {
    "a server": lambda folder: RedisServer("redis", folder),
    "a cluster": lambda folder: ClusterSetup("redis", folder),
    "sentinels": lambda folder: SentinelSetup("redis", folder),
    "a server over TLS": TlsServer,
    "certificates": Authority,
    "PgBouncer": lambda folder: PgBouncer("postgresql://127.0.0.1:1/postgres", "session"),
    "Prometheus": lambda folder: Prometheus(folder, []),
    "a balancer": lambda folder: Balancer("haproxy", folder, [Behind(1, 2)], certificates=None),  # type: ignore[arg-type]
}


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize("name", SETUPS)
def test_a_setup_that_is_skipped_has_opened_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(REQUIRED, raising=False)
    monkeypatch.setattr("tests.servers.redis._found", lambda kind: ("", f"{kind} is not there"))
    gc.collect()
    before = descriptors()
    with pytest.raises(pytest.skip.Exception):
        SETUPS[name](tmp_path)
    assert descriptors() == before

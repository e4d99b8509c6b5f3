"""The servers do what is asked of them, none outlives its test, and a missing one is told."""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.stand.proxies import Behind
from tests.e2e.client import wait_until
from tests.servers.balancers import Balancer
from tests.servers.cluster import ClusterSetup
from tests.servers.pgbouncer import PgBouncer
from tests.servers.prometheus import Prometheus
from tests.servers.redis import FOREIGN, REQUIRED, WORKERS, RedisServer, RunningServer, SharedServers, lacking
from tests.servers.sentinel import SentinelSetup
from tests.servers.tls import Authority, TlsServer


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_server_ends_with_its_test_run_however_that_ends(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tests.servers.redis import RedisServer\n"
        "with RedisServer('valkey', pathlib.Path(sys.argv[1])) as server:\n"
        "    print(server.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        try:
            assert run.stdout
            pid = int(run.stdout.readline())
            assert alive(pid)
        finally:
            run.kill()
    wait_until(lambda: not alive(pid))


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no-such-setting"), RedisServer("valkey", tmp_path, "no-such-setting 1"):
        pass


def test_a_shared_server_is_started_once_and_is_empty_whenever_asked_for(servers: SharedServers) -> None:
    server = servers.of("valkey")
    server.command("SET", "a", "1")
    assert servers.of("valkey") is server
    assert server.command("DBSIZE") == 0


def test_a_foreign_server_must_be_empty_and_lends_one_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer("valkey", tmp_path / "foreign") as own:
        own.command("SET", "treasure", "1")
        monkeypatch.setenv(FOREIGN, own.url)
        monkeypatch.setenv(WORKERS, "2")
        with pytest.raises(pytest.fail.Exception, match="one worker"):
            SharedServers(tmp_path).of("redis")
        monkeypatch.setenv(WORKERS, "1")
        with pytest.raises(pytest.fail.Exception, match="1 keys"):
            SharedServers(tmp_path).of("redis")
        monkeypatch.setenv(FOREIGN, own.url.removesuffix("/0") + "/1")
        shared = SharedServers(tmp_path)
        server = shared.of("redis")
        assert type(server) is RunningServer
        assert server.port == own.port
        server.command("SET", "a", "1")
        shared.close()
        assert server.command("DBSIZE") == 0
        assert own.command("DBSIZE") == 1


def test_a_server_that_is_lacking_skips_a_test_unless_none_may_be_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no such server"):
        lacking("no such server")
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="no such server"):
        lacking("no such server")


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

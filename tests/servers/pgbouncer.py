"""A PgBouncer in front of a PostgreSQL, as a child process.

It is the distribution's. Without one a test is skipped, or fails with HEADWAY_TEST_REQUIRE_SERVERS=1.
"""

import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from bench.stand import programs
from tests.e2e.client import PATIENCE, wait_until
from tests.servers.nobody import as_nobody, give
from tests.servers.ports import LOOPBACK, Port
from tests.servers.reaper import the_reaper
from tests.servers.redis import lacking

MODES = ("session", "transaction")
"""Times for which it keeps a connection to the server. In its third mode there are no transactions."""

_CONFIG = """
[databases]
* = {server}
[pgbouncer]
listen_addr = {loopback}
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
server_round_robin = 1
default_pool_size = 20
server_idle_timeout = 0.2
"""


class PgBouncer:
    """One for all databases of a server; `with` starts it and ends it. Each transaction gets another connection than the last one
    did."""

    def __init__(self, url: str, mode: str) -> None:
        self._program = programs.found("pgbouncer")
        if not self._program:
            lacking("pgbouncer is not on the path; on Debian and Ubuntu: apt-get install pgbouncer")
        self._port = Port()
        self._folder = Path(tempfile.mkdtemp(prefix="headway-pgbouncer-"))
        self._process: subprocess.Popen[bytes] | None = None
        given = urlsplit(url)
        server = {
            "host": given.hostname,
            "port": given.port or 5432,
            "user": given.username,
            "password": given.password,
        }
        text = _CONFIG.format(
            server=" ".join(f"{name}={value}" for name, value in server.items() if value),
            loopback=LOOPBACK,
            port=self._port.number,
            mode=mode,
        )
        (self._folder / "pgbouncer.ini").write_text(text, encoding="utf-8")
        give(self._folder)

    def front_of(self, url: str) -> str:
        """The URL of a database of the server, by way of this one."""
        given = urlsplit(url)
        return given._replace(netloc=f"{given.username}@{LOOPBACK}:{self._port.number}").geturl()

    def close(self) -> None:
        """End it if it runs, and leave nothing of it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE)
            the_reaper().forget(self._process.pid)
        self._port.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        assert self._program
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "pgbouncer.ini"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
                **as_nobody(),
            )
        the_reaper().watch(self._process.pid)
        wait_until(self._listens)
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _listens(self) -> bool:
        assert self._process
        if self._process.poll() is not None:
            raise AssertionError((self._folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:])
        try:
            socket.create_connection((LOOPBACK, self._port.number), PATIENCE).close()
        except ConnectionRefusedError:
            return False
        return True

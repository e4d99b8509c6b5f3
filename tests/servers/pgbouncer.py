"""PgBouncer in front of PostgreSQL, as a child process. It comes from the distribution. Without it a test is skipped,
or fails with HEADWAY_TEST_REQUIRE_SERVERS=1."""

import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from bench.stand import programs
from tests.e2e.client import PATIENCE
from tests.servers.child import ChildServer, as_nobody, give
from tests.servers.ports import LOOPBACK
from tests.servers.redis import lacking

MODES = ("session", "transaction")
"""How long it keeps a server connection. Its third mode has no transactions."""

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


class PgBouncer(ChildServer):
    """For all databases of a server; `with` starts and stops it. Each transaction uses a different connection."""

    def __init__(self, url: str, mode: str) -> None:
        program = programs.found("pgbouncer")
        if not program:
            lacking("pgbouncer is not on the path; on Debian and Ubuntu: apt-get install pgbouncer")
        super().__init__(Path(tempfile.mkdtemp(prefix="headway-pgbouncer-")), temporary=True)
        self.argv = [program, "pgbouncer.ini"]
        self.how = {"start_new_session": True, **as_nobody()}
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
            port=self.port,
            mode=mode,
        )
        (self.folder / "pgbouncer.ini").write_text(text, encoding="utf-8")
        give(self.folder)

    def front_of(self, url: str) -> str:
        """The URL of the server's database through PgBouncer."""
        given = urlsplit(url)
        return given._replace(netloc=f"{given.username}@{LOOPBACK}:{self.port}").geturl()

    def answers(self) -> bool:
        try:
            socket.create_connection((LOOPBACK, self.port), PATIENCE).close()
        except ConnectionRefusedError:
            return False
        return True

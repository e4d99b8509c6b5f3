"""A Redis Cluster of three primaries, each with a replica, as docs/fleet.md sets it up."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

from tests.e2e.client import wait_until
from tests.servers.ports import LOOPBACK, Port
from tests.servers.redis import RedisServer

SLOTS = 16384
CONFIG = ("cluster-enabled yes", "cluster-node-timeout 3000", "repl-diskless-sync-delay 0")


class ReplicatedCluster:
    """`with` starts it, and it is whole.

    Arguments:
        folder: where the files of its servers are.

    Attributes:
        servers: its six servers; the first three are primaries to begin with.
    """

    def __init__(self, folder: Path) -> None:
        self._buses = [Port() for _ in range(6)]
        self.servers = [
            RedisServer("redis", folder / f"node-{number}", *CONFIG, f"cluster-port {bus.number}", durable=True)
            for number, bus in enumerate(self._buses)
        ]
        self._running = ExitStack()

    @property
    def url(self) -> str:
        """redis+cluster://HOST:PORT,… of the first three."""
        return f"redis+cluster://{','.join(f'{LOOPBACK}:{one.port}' for one in self.servers[:3])}"

    def replica_of(self, primary: RedisServer) -> RedisServer:
        """The replica of one of the first three."""
        return self.servers[self.servers.index(primary) + 3]

    def __enter__(self) -> Self:
        for bus in self._buses:
            self._running.enter_context(closing(bus))
        try:
            for server in self.servers:
                self._running.callback(server.close)
                server.start()
            self._join()
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _join(self) -> None:
        """Make one of all servers."""
        primaries = self.servers[:3]
        for number, server in enumerate(primaries):
            server.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            server.command("CLUSTER", "ADDSLOTSRANGE", SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1)
        for server, bus in zip(self.servers[1:], self._buses[1:], strict=True):
            self.servers[0].command("CLUSTER", "MEET", LOOPBACK, server.port, bus.number)
        wait_until(lambda: self._all_say(self.servers, b"cluster_known_nodes:6"))
        for server in primaries:
            self.replica_of(server).command("CLUSTER", "REPLICATE", server.command("CLUSTER", "MYID"))
        wait_until(lambda: self._all_say(self.servers, b"cluster_state:ok"))
        followed = "master_link_status", "up"
        wait_until(
            lambda: all(one.command("INFO", "replication").get(followed[0]) == followed[1] for one in self.servers[3:])
        )

    def _all_say(self, servers: list[RedisServer], what: bytes) -> bool:
        return all(what in one.command("CLUSTER", "INFO") for one in servers)
